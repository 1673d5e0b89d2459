"""Files of results: each command line has its own, and the list of those of a run is read from them."""

import json

import numpy as np
import pytest

from dino_vit.config.commands import KnnConfig, LinearConfig
from dino_vit.data.open import open_source
from dino_vit.eval.results import default_output, evaluation
from dino_vit.eval.sets import LabelledSubset
from dino_vit.eval.statistics import Figure, accuracy
from dino_vit.reports.record import read_evaluations

GIVEN = {"source": "photos/test", "weights": "runs/first"}


def labelled(*targets, classes="ab"):
    images = open_source("synthetic:4:16")
    return LabelledSubset("images", images, np.arange(4), np.array(targets), tuple(classes))


SETS = (labelled(0, 1, 1, 0),) * 2


def default(loaded="runs/first", sets=SETS, **settings):
    return default_output(KnnConfig(**{**GIVEN, **settings}), str(loaded), sets)


def test_results_lie_with_the_weights(tmp_path):
    run = tmp_path / "run"
    path = default(run / "checkpoints" / "step-00000005.safetensors", weights=str(run))
    assert path.parent == run / "eval"
    assert path.name.startswith("step-00000005.knn-photos-test-")
    checkpoint = str(run / "checkpoints" / "step-00000005.safetensors")
    path = default_output(LinearConfig(source="photos", weights=checkpoint), checkpoint, SETS)
    assert path.parent == run / "eval"
    assert path.name.startswith("step-00000005.linear-photos-")
    run.mkdir()  # without checkpoints, as one of fine-tuning
    path = default(run / "backbone.safetensors", weights=str(run))
    assert path.parent == run / "eval"
    assert path.name.startswith("knn-photos-test-")
    path = default(tmp_path / "dino.pth", source="synthetic:60:16", weights=str(tmp_path / "dino.pth"))
    assert path.parent == tmp_path
    assert path.name.startswith("dino.knn-synthetic-60-16-")
    secret = "https://user:word@host/photos/a.tar?token=word"
    assert "word" not in default("hf:owner/name", source=secret, weights="hf:owner/name").name
    path = default("hf:owner/name", source="a", weights="hf:owner/name")
    assert path.name.startswith("hf-owner-name.knn-a-")


@pytest.mark.parametrize(
    "changes",
    [
        {"train": "photos/train"},
        {"k": (5,)},
        {"labels": "a.csv"},
        {"size": 64},
        {"source": "other/photos/test"},
        {"sets": (SETS[0], labelled(0, 1, 1, 1))},
        {"sets": (labelled(0, 1, 1, 0, classes="ac"), SETS[1])},
    ],
)
def test_another_command_and_other_labels_have_another_file(changes):
    assert default() == default()
    assert default(**changes) != default()


def test_figures_in_files_are_rounded_and_hold_what_is_known():
    assert Figure(100 / 3, 20.123456, 50.0, 9).as_json() == {
        "value": 33.3333,
        "low": 20.1235,
        "high": 50.0,
        "images": 9,
    }
    assert accuracy(1, 3).as_json()["correct"] == 1


def test_the_list_is_read_from_the_files(tmp_path, caplog):
    folder = tmp_path / "eval"
    config = KnnConfig(**GIVEN, train="photos/train", k=(5, 20), output="new.json")
    settings = config.model_dump(mode="json")
    given = config.model_dump(mode="json", exclude_unset=True)
    details = {"weights": {"step": 1200}, "settings": settings, "given": given}
    evaluation("knn", folder / "new.json", "top-1, k=5", accuracy(3, 4), details)
    (folder / "copydays.json").write_text('{"version": 2, "settings": {"source": "photos"}}')  # of a program
    (folder / "other-version.json").write_text('{"version": 1, "command": "knn"}')
    (folder / "damaged.json").write_text('{"command": "kn')
    (folder / "other.json").write_text("[1]")
    knn, copydays = read_evaluations(tmp_path)
    assert (knn.command, knn.data) == ("knn, step 1,200", "photos/test by photos/train")
    assert (knn.figure, knn.percent) == ("top-1, k=5", "75.00 (30.06 to 95.44)")
    assert (knn.settings, knn.file) == ("k=[5, 20]", "new.json")
    assert json.loads((folder / "new.json").read_text())["written"].startswith(knn.written.replace(" ", "T"))
    assert (copydays.command, copydays.data) == ("copydays", "photos")
    assert (copydays.figure, copydays.percent) == ("", "")
    assert caplog.text.count("is not listed") == 3
    assert "holds no results: its version is 1, but this dino-vit reads 2" in caplog.text
    assert read_evaluations(tmp_path / "elsewhere") == []
