"""What a URL holds of passwords and signatures stays in the source, and reaches nothing that is shown."""

import csv
import json
import logging

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dino_vit
from dino_vit.cli import main
from dino_vit.data.image_set import ImageSet
from dino_vit.data.open import open_source
from dino_vit.data.synthetic import make_textures
from tests.support.image_sets import write_tar
from tests.support.images import write_classes
from tests.support.remote import as_png, serving
from tests.support.runs import TINY

SECRET = "hunter2"
USER = f"me:{SECRET}'@"
QUERY = f"?X-Amz-Signature={SECRET}/{SECRET}.x&X-Amz-Date={SECRET} b'{SECRET}\"c"
KEPT = {"config.yaml", "checkpoints"}  # what a resume needs


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server that asks for no password, and takes any."""
    folder = tmp_path_factory.mktemp("served")
    write_classes(folder / "photos", ["a cat", "dogs"], 6)
    source = make_textures(length=24)
    for shard in range(2):
        pictures = {f"{'ab'[number % 2]}/{number}.png": as_png(source, number) for number in range(8)}
        write_tar(folder / "shards" / f"{shard}.tar", pictures)
    with serving(folder) as running:
        yield running


@pytest.fixture
def sources(server, tmp_path):
    """A source of each kind that may have secrets, whose images can be read; some of the list's cannot."""
    root = server.url.replace("://", f"://{USER}")
    names = sorted(path.relative_to(server.folder) for path in server.folder.rglob("photos/*/*.png"))
    rows = [(f"{root}/{name}{QUERY}", name.parts[1]) for name in names]
    rows += [(f"{root.replace('http', 'HTTP')}/{names[n]}{QUERY}&id={n}", "dogs") for n in range(3)]
    lost = [(f"{root}/none.png{QUERY}", ""), (f"hTTps://{USER}host/a b.png{QUERY}", "")]
    with (tmp_path / "list.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("path", "label"), *rows, *lost])
    data = [(server.folder / name).read_bytes() for name in names]
    table = {
        "image": data,
        "path": [row[0] for row in rows[: len(data)]],
        "label": [row[1] for row in rows[:12]],
    }
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    return {
        "list": f"{tmp_path}/list.csv",
        "shards": f"{root}/shards/{{0..1}}.tar",
        "signed": f"{root}/shards/0.tar{QUERY}",
        "table": f"{tmp_path}/a.parquet",
    }


def check_clean(folder, *texts):
    """Check what was printed, and the names and the bytes of all files but those that a resume needs."""
    for path in sorted(folder.rglob("*")):
        if not KEPT.intersection(path.parts):
            assert SECRET not in path.name
            assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path
    for text in texts:
        assert SECRET not in text, text


def run_commands(out, commands, capsys, caplog):
    """Run commands, and check after each what it printed and wrote."""
    for argv in commands:
        assert main(argv) == 0, argv
        printed = capsys.readouterr()
        check_clean(out, printed.out, printed.err, caplog.text)
        assert "as_json=true" not in argv or json.loads(printed.out)["source"]


@pytest.fixture
def lines(caplog):
    """The lines as a program sees them that has a handler of its own."""
    caplog.set_level(logging.INFO)
    return caplog


def test_no_command_writes_or_prints_the_secrets_of_a_list(sources, weights, tmp_path, capsys, lines):
    source, out, given = sources["list"], tmp_path / "out", [f"weights={weights}", "precision=no"]
    commands = (
        ["inspect-data", source, f"sheet={out}/views.png", "count=3"],
        ["embed", source, *given, f"output={out}/e.parquet"],
        ["label", source, *given, f"output={out}/label.html"],
        ["knn", source, *given, f"output={out}/knn.json"],
        ["linear", source, *given, f"output={out}/linear.json"],
        ["attention", source, f"weights={weights}", f"output={out}/maps", "count=2"],
    )
    run_commands(out, commands, capsys, lines)


@pytest.mark.parametrize("kind", ["list", "shards", "signed", "table"])
def test_no_source_shows_its_secrets(kind, sources, tmp_path, capsys, lines):
    out, source = tmp_path / "out", sources[kind]
    commands = ["inspect-data", source, "as_json=true"], ["pack", source, f"{out}/packed"]
    run_commands(out, commands, capsys, lines)
    packed = open_source(f"{out}/packed")
    assert len(packed) == {"shards": 16, "signed": 8}.get(kind, 12)


def test_a_run_keeps_secrets_in_its_config_and_checkpoints_only(sources, tmp_path, capsys, lines):
    run, settings = (
        tmp_path / "run",
        {**TINY, "budget.steps": 2, "optim.warmup_epochs": 0, "optim.freeze_last_layer_epochs": 0},
    )
    settings |= {"compute.eval_every": 1, "data.max_unreadable": 1, "compute.trackers": "[tensorboard]"}
    text = json.dumps({"data": {"source": [sources["signed"], sources["list"]]}, "output": str(run)})
    (tmp_path / "run.yaml").write_text(text)
    del settings["data.source"]
    pretrain = ["pretrain", "--config", f"{tmp_path}/run.yaml"]
    commands = (
        [*pretrain, *(f"{key}={value}" for key, value in settings.items())],
        ["report", f"{run}", "images=8"],
        ["export", f"{run}", f"{run}/a.safetensors", "format=reference"],
        ["inspect-weights", f"{run}"],
    )
    run_commands(run, commands, capsys, lines)
    print(dino_vit.RunFolder(run))
    check_clean(run, capsys.readouterr().out)
    assert {"report.html", "unreadable.txt", "a.safetensors"} <= {path.name for path in run.iterdir()}
    assert SECRET in (run / "config.yaml").read_text()


@pytest.mark.parametrize("switches", [[], ["--traceback"]])
@pytest.mark.parametrize("path", ["photos/none.csv", "none/{0..1}.zip"])
def test_errors_have_no_secrets(path, switches, server, weights, capsys):
    address = f"{server.url.replace('://', f'://{USER}')}/{path}"
    for spec in (address, address + QUERY, address.replace("http", "HTTPS")):
        assert main([*switches, "knn", spec, f"weights={weights}"]) > 0
        printed = capsys.readouterr()
        check_clean(server.folder, printed.out, printed.err)
    with pytest.raises(SystemExit):
        main([address])
    assert SECRET not in capsys.readouterr().err


SCHEMES = [
    f"s3://key:{SECRET}@bucket",
    f"gs://{SECRET}@bucket",
    f"AZ://{SECRET}@box",
    "hf://datasets/a/b@main",
]


@pytest.fixture
def addresses(tmp_path):
    """A list of addresses that nobody answers at."""
    names = [f"{scheme}/{part} b.jpg?token={SECRET}" for scheme in SCHEMES for part in "xy"]
    (tmp_path / "list.txt").write_text("\n".join([*names, "https://host/a.jpg"]))
    return sorted([*names, "https://host/a.jpg"])


def test_names_are_public(addresses, tmp_path):
    source = open_source(str(tmp_path / "list.txt"))
    names = [source.name(index) for index in range(len(source))]
    assert SECRET not in "".join(names)
    assert [source.full_name(index) for index in range(len(source))] == addresses
    assert names[addresses.index("https://host/a.jpg")] == "https://host/a.jpg"
    mixed = open_source([f"{tmp_path}/list.txt", "synthetic:4"])
    assert SECRET not in mixed.name(0)


@pytest.mark.parametrize("write", [ImageSet.full_name, ImageSet.name])
def test_labels_are_found_by_whole_addresses_and_by_shown_names(write, addresses, tmp_path, caplog):
    source = open_source(str(tmp_path / "list.txt"))
    table = {write(source, index): str(index % 3) for index in range(len(source))}
    (tmp_path / "labels.json").write_text(json.dumps({**table, f"s3://{SECRET}@none/a.jpg": "0"}))
    labelled = open_source(str(tmp_path / "list.txt"), tmp_path / "labels.json")
    assert [labelled.label(index) for index in range(len(source))] == [n % 3 for n in range(len(source))]
    assert "names not in the source: 's3://none/a.jpg'" in caplog.text
    assert SECRET not in caplog.text
