"""A file that says how often images are drawn, and runs that draw by it."""

import json

import numpy as np
import pytest

import dino_vit
from dino_vit.core.storage import read_tensors
from dino_vit.data.sources.open import open_source
from dino_vit.data.sources.synthetic import make_textures
from dino_vit.views.sampler import read_sampling_weights, sampling_fingerprint
from tests.support.runs import SETTINGS, assert_same_end, pretrain_until

SOURCE = make_textures(length=64)
NAMES = [SOURCE.name(index) for index in range(64)]
SHORT = {"budget.steps": 10, "optim.warmup_epochs": 0}


def written(path, weights, header="name,weight"):
    path.write_text("".join(f"{line}\n" for line in [header, *(f"{n},{w}" for n, w in weights.items())]))
    return path


def of_classes(path, scale=1.0):
    """Weigh the images of three classes, and the others with 0."""
    return written(path, {name: scale * max(0, index % 10 - 6) for index, name in enumerate(NAMES)})


@pytest.mark.parametrize("name", ["weights.csv", "weights.tsv", "weights.json", "three.csv"])
def test_weights_meet_images_by_name(tmp_path, name):
    path, weights = tmp_path / name, dict(zip(NAMES[::-1], range(64), strict=True))
    if name.endswith("json"):
        path.write_text(json.dumps(weights))
    elif name.startswith("three"):
        written(path, {f"{key},cat": value for key, value in weights.items()}, "name,class,weight")
    else:
        separator = "\t" if name.endswith("tsv") else ","
        written(path, weights).write_text(path.read_text().replace(",", separator))
    found = read_sampling_weights(SOURCE, path)
    assert found.dtype == np.float64
    assert found.tolist() == list(range(63, -1, -1))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({NAMES[3]: "", NAMES[5]: ""}, rf"no weight for 2 of 64 images, such as '{NAMES[3]}' \(None\)"),
        *(
            ({NAMES[3]: value}, rf"for 1 of 64 images, such as '{NAMES[3]}' \('{value}'\); it must be a")
            for value in (-1, "nan", "inf", "often")
        ),
        (dict.fromkeys(NAMES, 0), "add up to 0.0, so no image can be drawn"),
        (dict.fromkeys(NAMES, 1e308), "add up to inf"),
    ],
)
def test_weights_that_cannot_be_meant_are_refused(tmp_path, changed, said):
    path = written(tmp_path / "w.csv", dict.fromkeys(NAMES, 1) | changed)
    with pytest.raises(ValueError, match=said):
        read_sampling_weights(SOURCE, path)


def test_a_weighted_run_resumes_bit_for_bit_and_only_with_its_weights(tmp_path, capsys):
    settings = {**SETTINGS, **SHORT, "data.weights": str(of_classes(tmp_path / "w.csv"))}
    dino_vit.pretrain(output=tmp_path / "whole", **settings)
    text = "sampling weights: as varied as 15 of 64 images drawn equally often; 46 are never drawn"
    assert text in "".join(capsys.readouterr())
    pretrain_until(8, output=tmp_path / "run", **settings)
    wrong = {**settings, "data.weights": str(of_classes(tmp_path / "other.csv", scale=2))}
    with pytest.raises(ValueError, match="the sampling weights have changed"):
        dino_vit.pretrain(output=tmp_path / "run", **wrong)
    moved = (tmp_path / "w.csv").rename(tmp_path / "moved.csv")
    dino_vit.pretrain(output=tmp_path / "run", **{**settings, "data.weights": str(moved)})
    assert "resuming after step 5" in "".join(capsys.readouterr())
    assert_same_end(tmp_path / "run", tmp_path / "whole", 10)
    metadata = read_tensors(tmp_path / "run" / "checkpoints" / "step-00000010.safetensors")[1]["dino_vit"]
    weights = read_sampling_weights(open_source("synthetic:64:32"), moved)
    assert json.loads(metadata)["weights"] == sampling_fingerprint(weights)
