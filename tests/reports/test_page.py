"""The page as a file: what it holds, what it loads, what damaged runs give."""

import shutil

import pytest
import torch
from tensorboard.plugins.projector.projector_config_pb2 import ProjectorConfig

from dino_vit.cli import main
from dino_vit.data.sources.open import open_source
from dino_vit.reports.record import read_run
from dino_vit.training.metrics import Baseline
from tests.support.reports import HOSTILE, IMAGES, write_report


def change_config(folder, old, new):
    path = folder / "config.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_the_page_loads_nothing_and_describes_the_run(made, capsys):
    """A name like a script is only a name; only the page's own script and style may run."""
    page = write_report(made)
    size = (made / "report.html").stat().st_size
    assert size < 5e6
    assert f"report.html: {size / 1e6:.1f} MB" in capsys.readouterr().out
    loaded = [value for _, name, value in page.attributes if name in ("src", "href", "srcset", "action")]
    assert all(value.startswith(("data:", "#")) for value in loaded)
    assert not any(name.startswith("on") or name == "style" for _, name, _ in page.attributes)
    assert page.tags.count("script") == 2
    assert "raw pixels" in page.text
    assert "20 of 20 steps" in page.text
    assert "head.prototypes 256 65536" in page.text
    assert "Map, attention and neighbours: teacher at step 20." in page.text
    assert len(page.data["map"]["names"]) == IMAGES
    assert "<script>alert" not in (made / "report.html").read_text()
    assert HOSTILE in page.data["map"]["names"]
    assert any(HOSTILE in value for tag, name, value in page.attributes if (tag, name) == ("img", "alt"))
    titles = {chart["title"] for chart in page.data["charts"]}
    assert titles >= {"Loss", "Teacher entropies", "k-NN accuracy", "Effective rank", "Learning rate"}

    (policy,) = (value for _, name, value in page.attributes if name == "content" and "default-src" in value)
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == rules["connect-src"] == "'none'"
    nonces = {value for tag, name, value in page.attributes if name == "nonce"}
    assert {rules["script-src"], rules["style-src"]} == {f"'nonce-{nonce}'" for nonce in nonces}


def test_images_that_moved_are_reported_and_can_be_given(folder, made):
    images = made.parent / "images"
    change_config(folder, str(images), "/no/such/place")
    page = write_report(folder)
    assert page.text.count("'/no/such/place' does not exist") >= 3
    assert "say where with source=..." in page.text
    assert page.data["map"] is None
    assert page.data["charts"]
    assert len(write_report(folder, f"source={images}", "images=20").data["map"]["names"]) == 20


def test_without_a_usable_checkpoint_the_rest_is_shown(folder):
    change_config(folder, "patch_size: 8", "patch_size: 16")  # the network is the one of the checkpoint
    assert len(write_report(folder, "images=20").data["map"]["names"]) == 20
    for path in (folder / "checkpoints").iterdir():
        path.write_bytes(path.read_bytes()[:-100])
    assert "none of the" in write_report(folder).text
    shutil.rmtree(folder / "checkpoints")
    page = write_report(folder)
    assert "the run has not written a checkpoint yet" in page.text
    assert "global 1" in page.text
    assert page.data["charts"]


@pytest.mark.parametrize("content", [None, b'{"step": 1, "lo'])
def test_a_run_without_metrics_still_has_a_page(folder, content):
    for name in ("baseline.json", "starts.jsonl", "metrics.jsonl"):
        (folder / name).unlink()
    if content is not None:
        (folder / "metrics.jsonl").write_bytes(content)
    page = write_report(folder, "images=20")
    assert "metrics.jsonl has no lines yet." in page.text
    assert page.data["charts"] == []
    assert len(page.data["map"]["names"]) == 20


DAMAGED = [
    ("metrics.jsonl", '{"step": 21}\n'),
    ("metrics.jsonl", '{"step": 21, "lo{"step": 22}\n'),
    ("metrics.jsonl", "[" * 10**4 + "\n"),
    ("starts.jsonl", '{"step": 5, "began": "2026\n'),
]


def test_damaged_lines_are_left_out_of_the_page(folder, made, caplog):
    for name, line in DAMAGED:
        with (folder / name).open("a") as file:
            file.write(line * 500)
    whole = read_run(made)
    for baseline in ("[]", '{"knn": [1', '{"knn": "high"}', ""):
        (folder / "baseline.json").write_text(baseline)
        record = read_run(folder)
        assert (record.history, record.starts, record.baseline) == (whole.history, whole.starts, Baseline())
    assert caplog.text.count("left out") == 4 * 2 + 3  # at each reading; the last baseline has no lines
    assert "20 of 20 steps" in write_report(folder, "images=4").text


def test_labels_of_a_file_colour_the_map_and_missing_ones_are_reported(folder, tmp_path):
    source, labels = open_source(read_run(folder).config.data.source), tmp_path / "labels.csv"
    change_config(folder, "labels: null", f"labels: {labels}")
    page = write_report(folder, "images=20")
    assert len(page.data["map"]["names"]) == 20
    assert str(labels) in page.text
    lines = [f"{source.name(index)},{'even' if index % 2 == 0 else 'odd'}" for index in range(len(source))]
    labels.write_text("\n".join(["name,label", *lines]))
    assert write_report(folder).data["map"]["classes"] == [["even", IMAGES // 2], ["odd", IMAGES // 2]]


def test_tensorboard_gets_the_features_of_the_map(folder):
    from google.protobuf import text_format

    change_config(folder, "trackers: []", "trackers: [tensorboard]")
    for _ in range(2):  # the second report replaces what the first wrote
        page = write_report(folder, "images=20")
    logs = folder / "logs" / "embedding"
    (embedding,) = text_format.Parse(
        (logs / "projector_config.pbtxt").read_text(), ProjectorConfig()
    ).embeddings
    rows = (logs / embedding.tensor_path).read_text().splitlines()
    features = torch.tensor([[float(number) for number in row.split("\t")] for row in rows])
    assert features.shape == (20, 32)
    nearest = (features @ features.T).fill_diagonal_(-1).argmax(dim=1).tolist()
    shown = [near[0] for near in page.data["map"]["neighbours"]]
    assert sum(a == b for a, b in zip(nearest, shown, strict=True)) >= 18  # up to the rounding
    names = (logs / embedding.metadata_path).read_text().splitlines()
    assert [line.split("\t")[0] for line in names] == ["name", *page.data["map"]["names"]]
    assert (logs / embedding.sprite.image_path).stat().st_size > 1000


def test_a_folder_without_a_run_is_an_error(tmp_path, capsys):
    for arguments, message in (
        (["report", str(tmp_path / "none")], "is not the folder of a run: there is no such folder"),
        (["report", str(tmp_path)], "is not the folder of a run: it has no config.yaml"),
    ):
        assert main(arguments) == 2
        assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
