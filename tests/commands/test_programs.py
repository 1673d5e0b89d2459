"""The programs in eval/, launched in two processes on a checkpoint of the loop."""

import json

import numpy as np
import pytest

from dino_vit import load_backbone
from dino_vit.data.sources.synthetic import SyntheticSource
from dino_vit.eval.embeddings import read_embeddings
from dino_vit.eval.features.extraction import extract_features
from dino_vit.views.preparation import preparation_of
from tests.support.moving_scenes import moving_scene, write_scene
from tests.support.runs import command, program

GRID = ["grid.rates=[0.001, 0.1]", "grid.steps=40", "grid.batch=32", "grid.blocks=[1, 2]"]


@pytest.mark.parametrize(("name", "settings"), [("knn", ["k=[5]"]), ("linear", GRID)])
def test_two_processes_judge_a_run_as_the_command_does(trained, tmp_path, name, settings):
    """Of k-NN leave-one-out, where a share of the queries must know which rows of the bank they are."""
    settings = ["synthetic:61:32", f"weights={trained}", "precision=no", *settings]
    said = program(name, *settings, processes=2)
    path = trained / "eval" / ("knn-leave-one-out.json" if name == "knn" else "linear.json")
    assert said.splitlines()[-1] == str(path)
    two = json.loads(path.read_text())
    assert (two["weights"]["step"], two["weights"]["network"]) == (5, "teacher")
    assert two["images"] == (61 if name == "knn" else {"train": 49, "val": 12})
    command(tmp_path / "log", name, *settings)
    assert json.loads(path.read_text()) == two


def test_embed(trained, tmp_path):
    paths = [f"weights={trained}", f"output={tmp_path / 'e.parquet'}", f"cache={tmp_path / 'cache'}"]
    said = program("embed", "synthetic:100:32", *paths, "precision=no", "batch_size=16", processes=2)
    assert said.count("100 × 32 in float32") == 1
    found, model = read_embeddings(tmp_path / "e.parquet"), load_backbone(trained)
    assert (found.metadata["weights"]["step"], found.metadata["weights"]["network"]) == (5, "teacher")
    options = {"preparation": preparation_of(model), "batch_size": 100}
    expected = extract_features(model, SyntheticSource(length=100), range(100), **options)
    np.testing.assert_allclose(found.values, expected.values, atol=1e-5)


def test_attention(trained, tmp_path):
    settings = [f"weights={trained}", f"output={tmp_path / 'out'}", "source=synthetic:14:32", "count=null"]
    assert program("attention", *settings, processes=2).count("14 images on 2 sheets") == 1
    found = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"sheet-1.png", "sheet-2.png"} < found
    assert sum(name.endswith(".attention.npy") for name in found) == 14


def test_video(trained, tmp_path):
    """Two videos in the layout of DAVIS: two processes take one each, and find what one process does."""
    root, names = tmp_path / "DAVIS", ["bear", "car"]
    for seed, name in enumerate(names):
        write_scene(
            tmp_path / name, *moving_scene(5 + seed, height=48, width=64, objects=1 + seed, seed=seed)
        )
        for kind, folder in (("frames", "JPEGImages"), ("masks", "Annotations")):
            (root / folder / "480p").mkdir(parents=True, exist_ok=True)
            (tmp_path / name / kind).rename(root / folder / "480p" / name)
    (root / "ImageSets/2017").mkdir(parents=True)
    (root / "ImageSets/2017/val.txt").write_text("\n".join(names) + "\n")
    settings = [root, f"weights={trained}", "size=64", "precision=no"]
    said = program("video", *settings, f"output={tmp_path / 'two'}", processes=2)
    assert said.count("masks of 11 frames") == 1
    two = json.loads((tmp_path / "two/propagate.json").read_text())
    lengths = {
        (name, value): len(one["j_by_frame"])
        for name in names
        for value, one in two["videos"][name]["objects"].items()
    }
    assert lengths == {("bear", "1"): 3, ("car", "1"): 4, ("car", "2"): 4}, "without the first and the last"
    assert two["mean"]["interval"]["low"] <= two["mean"]["j_and_f"] <= two["mean"]["interval"]["high"]
    command(tmp_path / "log", "propagate", *settings, f"output={tmp_path / 'one'}")
    one = json.loads((tmp_path / "one/propagate.json").read_text())
    assert (one["videos"], one["mean"]) == (two["videos"], two["mean"])


def test_finetune(trained, tmp_path):
    settings = [f"weights={trained}", f"output={tmp_path / 'tuned'}", "epochs=2", "warmup_epochs=1"]
    settings += ["batch_size=16", "workers=0", "precision=no"]
    assert program("finetune", "synthetic:50:32", *settings, processes=2).count("after 2 epochs") == 1
    assert load_backbone(tmp_path / "tuned", num_classes=10).image_size == (32, 32)
