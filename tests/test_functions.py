"""The commands as functions: what they return is what they wrote, and wrong input is a sentence."""

import contextlib
import json
import logging
import subprocess
import sys
from inspect import signature
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import dino_vit
from dino_vit.commands import COMMANDS
from dino_vit.config.loading import load
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.config.settings import settings_of
from dino_vit.eval.results import write_results
from tests.support.runs import CPU, ROOT, SETTINGS
from tests.support.stub import PATH, stub


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of 20 steps, made by a function."""
    return dino_vit.pretrain(output=tmp_path_factory.mktemp("runs") / "run", verbose=False, **SETTINGS)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A folder of two classes with a split."""
    folder = tmp_path_factory.mktemp("data") / "photos"
    generator = np.random.default_rng(0)
    for split, label, number in np.ndindex(2, 2, 6):
        path = folder / ("train", "val")[split] / f"class{label}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = generator.integers(100 * label, 100 * label + 100, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    return folder


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_a_function_that_says_what_it_takes(name):
    function, cls = getattr(dino_vit, name.replace("-", "_")), COMMANDS[name].config_class
    parameters = signature(function).parameters.values()
    taken = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    assert taken == [key.rpartition(".")[2] for key in cls.positional]
    assert [one.name for one in parameters][-2:] == ["config", "verbose"]
    assert {one.name for one in parameters} >= cls.model_fields.keys() - set(cls.positional) - {"data"}
    assert function.__doc__.startswith(cls.__doc__)
    assert all(f"{key}=" in function.__doc__ for key in settings_of(cls))


def test_editors_and_type_checkers_know_the_same_signatures():
    assert PATH.read_text() == stub(), "run `python -m tests.support.stub`"


@pytest.mark.slow
def test_mypy_understands_calls_and_finds_mistakes(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "from pathlib import Path\n"
        "import dino_vit\n"
        "run = dino_vit.pretrain('photos', budget={'minutes': 1}, model={'arch': 'vit_small'}, seed=3)\n"
        "percent: float = dino_vit.knn(Path('photos'), run, k=[5, 20], output=None).figure.value\n"
        "dino_vit.pretrain(budget={'minute': 1})\n"
        "dino_vit.pretrain(model='vit_small')\n"
        "dino_vit.pretrain(budget_minutes=1)\n"
        "dino_vit.knn('photos', run, resize_mode='cropped')\n"
    )
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", "pyproject.toml", str(program)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = sorted({int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error:" in line})
    assert lines == [5, 6, 7, 8], done.stdout


def test_pretrain_returns_its_run(run, tmp_path):
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert run.metrics() == [{k: v for k, v in line.items() if k in run.metrics()[0]} for line in lines]
    assert {*lines[0]} - {*run.metrics()[0]} == {"knn_answers", "levelled_knn_answers", "probe_answers"}
    texts = {name for line in run.metrics() for name, value in line.items() if isinstance(value, str)}
    assert texts <= {"diagnosis"}
    assert [line["step"] for line in run.metrics()] == list(range(1, 21))
    assert run.diagnosis == run.metrics()[-1]["diagnosis"]
    assert run.config == load(PretrainConfig, run.folder / "config.yaml")
    assert f"step 20 of 20; {run.diagnosis}" in repr(run)
    assert run.outcome in str(run)
    assert 3 <= len(str(run).splitlines()) <= 6
    assert f"{run.folder}: {run.config.model.title} on synthetic" in str(run)
    with contextlib.chdir(tmp_path):
        assert dino_vit.embed("synthetic:7:32", run).values.shape == (7, 32)
        assert dino_vit.knn("synthetic:60:16", run, k=3).figure.images == 60
        assert dino_vit.attention("synthetic:3:32", run, count=2).sheets[0].width > 100
        assert list(tmp_path.iterdir()) == []
    newest, before = (dino_vit.load_backbone(path) for path in (run, run.checkpoints[0]))
    assert (newest.provenance.step, before.provenance.step) == (20, 15)
    results = run.folder / "eval" / "copydays.json"  # of a program without a single figure
    write_results(results, {"command": "copydays", "settings": {"source": "copies"}, "map": 0.5})
    assert " % on " not in str(run)
    results.unlink()
    results.parent.rmdir()
    page = dino_vit.report(run, output=tmp_path / "page.html", images=20).path
    assert page.read_text().startswith("<!doctype html>")
    assert dino_vit.RunFolder(run.folder).metrics() == run.metrics()
    with pytest.raises(ValueError, match="is not the folder of a run"):
        dino_vit.RunFolder(tmp_path)


def test_pretrain_calls_back_with_readings_and_checkpoints(tmp_path):
    readings, checkpoints = [], []
    found = dino_vit.pretrain(
        "synthetic:64:32",
        tmp_path / "run",
        on_metrics=readings.append,
        on_checkpoint=lambda path: checkpoints.append((path.name, path.exists())),
        **{key: value for key, value in SETTINGS.items() if key != "data.source"},
    )
    assert [reading.figures() for reading in readings] == found.metrics()
    assert checkpoints == [(f"step-{step:08}.safetensors", True) for step in (5, 10, 15, 20)]


def test_what_a_callback_raises_ends_the_run(tmp_path):
    def stop(reading):
        if reading.step == 7:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        dino_vit.pretrain(output=tmp_path, on_metrics=stop, **SETTINGS)
    assert len(dino_vit.pretrain(output=tmp_path, **SETTINGS).metrics()) == 20


def test_verbose_logs_and_a_result_is_shown_once_as_the_command_prints_it(run, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(logging.root, "handlers", [])  # pytest's
    settings = {"weights": run.folder, "output": tmp_path / "a.json", "cache": tmp_path, "k": 3}
    found = dino_vit.knn("synthetic:60:16", **settings)
    shown = capfd.readouterr()
    assert shown.out == ""
    assert repr(found) == str(found)
    assert str(found).startswith("Accuracy (%), leave-one-out, on 60 images")
    assert f"{run.folder}" in shown.err
    dino_vit.knn("synthetic:60:16", verbose=False, overwrite=True, **settings)
    dino_vit.pretrain(output=tmp_path / "run", verbose=False, **SETTINGS)
    assert capfd.readouterr() == ("", "")


def test_figures_are_those_of_the_file(run, photos, tmp_path):
    for function, more in (
        (dino_vit.knn, {"k": [3, 5]}),
        (dino_vit.linear, {}),
    ):
        settings = {"cache": tmp_path, "verbose": False, **more}
        output = tmp_path / f"{function.__name__}.json"
        found = function(photos, run.folder, output=output, **settings)
        assert found.path == output
        assert found.details == json.loads(output.read_text())
        again = function(photos, run, **settings)
        assert (again.path, again.figure) == (None, found.figure)
        assert not (run.folder / "eval").exists(), "nothing is written unless output says so"
        assert found.figure.images == 12
        assert {name: one.images for name, one in found.per_class.items()} == {"class0": 6, "class1": 6}


def test_features_are_arrays_with_names(run, photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = dino_vit.embed(photos, run, cache=tmp_path, verbose=False)
    assert found.values.shape == (24, 32)
    assert found.names[0] == "train/class0/0.png"
    assert repr(found) == "24 × 32 in float32, with names, labels and metadata"
    patches = dino_vit.embed(image_of(photos), run, tokens="patches", blocks=2, verbose=False)
    assert patches.values.shape == (1, 16, 64)
    assert found.labels.count("class0") == 12
    assert [path.suffix for path in tmp_path.iterdir()] == [".safetensors"], "features in the cache only"
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert dino_vit.compare(photos, [run, "untrained"], cache=tmp_path, verbose=False).path is None
    dino_vit.attention(photos, run, count=1, verbose=False)
    assert not list(Path().iterdir()), "nothing is written unless output says so"


def image_of(photos):
    return next(iter(sorted(photos.rglob("*.png"))))


def test_files_are_returned_by_their_paths(run, photos, tmp_path):
    maps = dino_vit.attention(photos, weights=run.folder, output=tmp_path / "maps", count=3, verbose=False)
    assert [np.load(path).shape for path in maps.maps.values()] == [(2, 8, 8)] * 3
    assert all(path.exists() for path in maps.sheets)
    same = dino_vit.attention(photos, run.folder, count=3, verbose=False)
    for name, values in same.maps.items():
        assert np.array_equal(values, np.load(maps.maps[name]))
    with Image.open(maps.sheets[0]) as sheet:
        assert np.array_equal(np.asarray(sheet), np.asarray(same.sheets[0]))
    packed = dino_vit.pack(photos, tmp_path / "packed", verbose=False)
    assert packed.images == 24
    assert dino_vit.inspect_data(tmp_path / "packed", verbose=False).facts["images"] == 24
    written = dino_vit.export(run.folder, tmp_path / "vit.pth", format="timm", verbose=False)
    assert dino_vit.inspect_weights(written.path, verbose=False).facts["width"] == 32


def test_settings_come_from_a_file_an_object_and_by_name(run, tmp_path):
    file = run.folder / "config.yaml"
    resumed = dino_vit.pretrain(config=file, verbose=False)
    assert resumed.folder == run.folder
    changed = dino_vit.pretrain(config=run.config, output=tmp_path, verbose=False, budget={"steps": 10})
    assert (len(changed.metrics()), changed.config.optim) == (10, run.config.optim)
    with pytest.raises(ValueError, match=r"optim.lr = fast: must be a valid number"):
        dino_vit.pretrain(optim={"lr": "fast"})


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: dino_vit.pretrain(epochs=3), ValueError, r"did you mean budget\.epochs\?"),
        (lambda: dino_vit.pretrain(model="vit_small"), ValueError, r"did you mean model\.arch\?"),
        (lambda: dino_vit.pretrain(budget={"minute": 1}), ValueError, r"did you mean budget\.minutes\?"),
        (lambda: dino_vit.knn("photos", "a", "b"), TypeError, "too many positional arguments"),
        (lambda: dino_vit.knn("photos"), ValueError, "weights is missing: run folder, weights file, "),
        (lambda: dino_vit.knn(config=PretrainConfig()), TypeError, "must be a file or a KnnConfig"),
    ],
)
def test_mistakes_are_a_sentence(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.slow
def test_one_script_calls_several_functions_in_two_processes(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os\nimport dino_vit\n"
        f"settings = {SETTINGS}\n"
        f"run = dino_vit.pretrain(output={str(tmp_path / 'run')!r}, **settings)\n"
        "found = dino_vit.knn('synthetic:60:16', weights=run.folder, k=3)\n"
        "again = dino_vit.knn('synthetic:60:16', weights=run.folder, k=3, verbose=False)\n"
        "assert found.figure == again.figure\n"
        f"path = {str(tmp_path)!r} + '/' + os.environ['RANK']\n"
        "open(path, 'w').write(str(found.figure))\n"
    )
    command = [sys.executable, "-m", "accelerate.commands.launch", f"--config_file={CPU}", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "0").read_text() == (tmp_path / "1").read_text()
    assert done.stderr.count("one class for each of 60 images") == 1, "the first process logs"
