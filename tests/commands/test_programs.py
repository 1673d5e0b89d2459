"""The programs in eval/, launched in two processes on a checkpoint of the loop."""

import json

import numpy as np
import pytest

from dino_vit import load_backbone
from dino_vit.data.sources.synthetic import SyntheticSource
from dino_vit.eval.embeddings import read_embeddings
from dino_vit.eval.features import extract_features
from dino_vit.views.eval_transform import eval_transform_of
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
    options = {"transform": eval_transform_of(model), "batch_size": 100}
    expected = extract_features(model, SyntheticSource(length=100), range(100), **options)
    np.testing.assert_allclose(found.values, expected.values, atol=1e-5)


def test_attention(trained, tmp_path):
    settings = [f"weights={trained}", f"output={tmp_path / 'out'}", "source=synthetic:14:32", "count=null"]
    assert program("attention", *settings, processes=2).count("14 images on 2 sheets") == 1
    found = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"sheet-1.png", "sheet-2.png"} < found
    assert sum(name.endswith(".attention.npy") for name in found) == 14


def test_finetune(trained, tmp_path):
    settings = [f"weights={trained}", f"output={tmp_path / 'tuned'}", "epochs=2", "warmup_epochs=1"]
    settings += ["batch_size=16", "workers=0", "precision=no"]
    assert program("finetune", "synthetic:50:32", *settings, processes=2).count("after 2 epochs") == 1
    assert load_backbone(tmp_path / "tuned", num_classes=10).image_size == (32, 32)
