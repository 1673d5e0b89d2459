"""Images of every kind through pretraining and the online evaluation, by the real command."""

import json

import numpy as np
import pytest
import tifffile
from PIL import Image

from dino_vit import load_backbone
from dino_vit.cli import main
from dino_vit.core.storage import read_tensors
from dino_vit.data.images.pixels import Pixels
from dino_vit.data.synthetic import make_textures
from dino_vit.views.eval_transform import eval_transform_of
from tests.support.runs import history, run

SOURCE = make_textures(length=32)
NO_COLOUR = {"augment.saturation": 0, "augment.hue": 0, "augment.grey": 0}
MEASURED = {"data.mean": "null", "data.std": "null"}
SETTINGS = {
    "budget.steps": 3,
    "optim.warmup_epochs": 0,
    "optim.freeze_last_layer_epochs": 0,
    "compute.eval_every": 1,
    "compute.checkpoint_every": 3,
}
LENGTH = len(SOURCE)
PLANES = {SOURCE.name(number): SOURCE.read(number)[0].numpy() for number in range(LENGTH)}


def fill(folder, write):
    for number, (name, plane) in enumerate(PLANES.items()):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write(number, path, plane)
    return folder


def sixteen_bits(number, path, plane):
    Image.fromarray(plane.astype(np.uint16) * 16 + 7).save(path.with_suffix(".png"))


def five_channels(number, path, plane):
    bands = np.stack([plane.astype(np.uint16) * band for band in range(1, 6)], axis=-1)
    tifffile.imwrite(path.with_suffix(".tif"), bands, photometric="minisblack", planarconfig="contig")


def described(output):
    return json.loads(read_tensors(output / "checkpoints" / "step-00000003.safetensors")[1]["dino_vit"])


def check_knn(output, source, *labels):
    assert main(["knn", str(source), f"weights={output}", "precision=no", *labels]) == 0
    (path,) = (output / "eval").glob("*.knn-*.json")
    assert json.loads(path.read_text())["results"]
    path.unlink()


@pytest.mark.parametrize(
    ("write", "kind", "limits", "channels"),
    [
        (sixteen_bits, "grey (uint16)", (0.0, 4095.0), lambda planes: [(16 * planes + 7) / 4095]),
        (five_channels, "5-channel (uint16)", None, lambda planes: [n * planes / 65535 for n in range(1, 6)]),
    ],
)
def test_deep_images_keep_their_bits_from_the_file_to_the_weights(
    tmp_path, capsys, write, kind, limits, channels
):
    folder, output = fill(tmp_path / "images", write), tmp_path / "run"
    assert main(["inspect-data", str(folder), f"sheet={tmp_path / 'views.png'}", "count=200"]) == 0
    assert f"{kind}: {LENGTH}" in capsys.readouterr().out
    expected = channels(np.stack(list(PLANES.values())).astype(np.float64))
    settings = {**SETTINGS, **MEASURED, **NO_COLOUR, "data.source": folder, "data.channels": len(expected)}
    said = run(output, {**settings, "data.range": "null" if limits is None else list(limits)})
    assert f"{LENGTH} images inspected: {LENGTH} {kind}" in said
    assert "data.bits=16: as the images have" in said
    metadata, model = described(output), load_backbone(output)
    assert metadata["mean"] == pytest.approx([channel.mean() for channel in expected], rel=1e-3)
    assert metadata["std"] == pytest.approx([channel.std() for channel in expected], rel=1e-3)
    assert metadata["bits"] == 16
    assert eval_transform_of(model).pixels == Pixels(channels=len(expected), bits=16, range=limits)
    assert eval_transform_of(model).mean == tuple(metadata["mean"])
    assert history(output)[-1]["knn"] is not None
    check_knn(output, folder)


def test_a_resumed_run_keeps_what_it_measured(tmp_path):
    folder = fill(tmp_path / "images", sixteen_bits)
    settings = {**SETTINGS, **MEASURED, "data.source": folder, "compute.checkpoint_every": 1}
    said = run(tmp_path / "run", settings)
    assert "repeated from grey to RGB" in said
    assert "no value is above 6" in said
    assert "data.range=[low, high]" in said
    before = described(tmp_path / "run")["mean"]
    fill(folder, lambda number, path, plane: sixteen_bits(number, path, plane * 0))
    said = run(tmp_path / "run", {**settings, "budget.steps": 4, "compute.resume": "changed"})
    assert "measured on" not in said
    (last,) = (tmp_path / "run" / "checkpoints").glob("*4.safetensors")
    assert json.loads(read_tensors(last)[1]["dino_vit"])["mean"] == before


def test_float_images_beyond_one_say_what_to_do(tmp_path):
    def write(number, path, plane):
        np.save(path.with_suffix(".npy"), plane.astype(np.float32))

    folder = fill(tmp_path / "images", write)
    said = run(tmp_path / "run", {**SETTINGS, "data.source": folder}, code=2)
    assert "none of 32 images can be used" in said
    assert "set data.range=[low, high], the values that become 0 and 1" in said
    run(tmp_path / "run", {**SETTINGS, "data.source": folder, "data.range": "[0, 255]"})
