"""Images of every kind through pretraining and the online evaluation, by the real command."""

import json
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from dino_vit import load_backbone
from dino_vit.cli import main
from dino_vit.core.storage import read_metadata
from dino_vit.data.images.decode import read_image
from dino_vit.data.images.pixels import Pixels
from dino_vit.data.sources.open import open_source
from dino_vit.data.sources.synthetic import SyntheticSource
from dino_vit.views.preparation import preparation_of
from tests.support.runs import readings, run

NO_COLOUR = {"photometry.saturation": 0, "photometry.hue": 0, "photometry.grey": 0}
MEASURED = {"data.mean": "null", "data.std": "null"}
SETTINGS = {
    "budget.steps": 3,
    "optim.warmup_epochs": 0,
    "optim.freeze_last_layer_epochs": 0,
    "run.eval_every": 1,
    "run.checkpoint_every": 3,
}
LENGTH = 32


@pytest.fixture(scope="module")
def planes():
    source = SyntheticSource(length=LENGTH)
    return {source.name(number): source.read(number)[0].numpy() for number in range(LENGTH)}


def fill(folder, planes, write):
    for number, (name, plane) in enumerate(planes.items()):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write(number, path, plane)
    return folder


def sixteen_bits(number, path, plane):
    Image.fromarray(plane.astype(np.uint16) * 16 + 7).save(path.with_suffix(".png"))


def five_channels(number, path, plane):
    bands = np.stack([plane.astype(np.uint16) * band for band in range(1, 6)], axis=-1)
    tifffile.imwrite(path.with_suffix(".tif"), bands, photometric="minisblack", planarconfig="contig")


def mixed(number, path, plane):
    image = Image.fromarray(plane).convert("RGB")
    ways = [
        lambda: image.quantize(32).save(path.with_suffix(".png")),
        lambda: image.quantize(32).save(path.with_suffix(".gif")),
        lambda: image.convert("CMYK").save(path.with_suffix(".jpg")),
        lambda: image.convert("CMYK").save(path.with_suffix(".tif")),
        lambda: image.convert("RGBA").save(path.with_suffix(".webp")),
        lambda: Image.fromarray(plane).save(path.with_suffix(".bmp")),
        lambda: np.save(path.with_suffix(".npy"), plane),
    ]
    ways[number % len(ways)]()


def described(output):
    return json.loads(read_metadata(output / "checkpoints" / "step-00000003.safetensors")["dino_vit"])


CIFAR = Path(__file__).parents[3] / "shared" / "data" / "cifar10" / "test.parquet"
OF_CIFAR = pytest.mark.skipif(
    not CIFAR.exists(), reason="needs CIFAR-10 as Parquet in ../shared/data/cifar10"
)


@pytest.mark.parametrize(
    ("write", "settings", "said"),
    [
        (sixteen_bits, {**MEASURED, **NO_COLOUR, "data.channels": 1}, "grey (uint16) 32"),
        (five_channels, {**MEASURED, **NO_COLOUR, "data.channels": 5}, "5-channel (uint16) 32"),
        (mixed, {"data.bits": 8}, "RGB (uint8) "),
        pytest.param(None, {"data.batch_size": 64}, "RGB (uint8) 200", marks=OF_CIFAR),
    ],
)
def test_inspection_pretraining_and_knn(tmp_path, planes, capsys, write, settings, said):
    source = fill(tmp_path / "images", planes, write) if write else CIFAR
    assert main(["inspect-data", str(source), f"sheet={tmp_path / 'views.png'}", "count=200"]) == 0
    assert said in capsys.readouterr().out
    evaluation = {"run.eval_every": 1 if write else "null"}
    run(tmp_path / "run", {**SETTINGS, **settings, **evaluation, "data.source": source})
    if write is None:
        source = open_source(str(source))
        some = range(0, len(source), len(source) // 100)  # the set is in the order of its classes
        np.save(tmp_path / "images.npy", np.stack([read_image(source, i).numpy() for i in some]))
        rows = [f"{n:09d},{source.classes[source.label(i)]}\n" for n, i in enumerate(some)]
        (tmp_path / "labels.csv").write_text("".join(rows))
        source = tmp_path / "images.npy"
    labels = [] if write else [f"labels={tmp_path / 'labels.csv'}"]
    assert main(["knn", str(source), f"weights={tmp_path / 'run'}", "precision=no", *labels]) == 0
    found = json.loads((tmp_path / "run" / "eval" / "knn.json").read_text())
    assert found


def test_sixteen_bit_grey_keeps_its_bits_from_the_file_to_the_weights(tmp_path, planes):
    folder = fill(tmp_path / "images", planes, sixteen_bits)
    settings = {**SETTINGS, **MEASURED, **NO_COLOUR, "data.source": folder, "data.channels": 1}
    said = run(tmp_path / "run", {**settings, "data.range": "[0, 4095]"})
    assert f"{LENGTH} images inspected: {LENGTH} grey (uint16)" in said
    assert "data.bits=16: as the images have" in said
    values = np.stack(list(planes.values())).astype(np.float64) * 16 + 7
    metadata = described(tmp_path / "run")
    assert metadata["mean"] == pytest.approx([(values / 4095).mean()], rel=1e-3)
    assert metadata["std"] == pytest.approx([(values / 4095).std()], rel=1e-3)
    assert (metadata["bits"], metadata["range"]) == (16, [0, 4095])
    model = load_backbone(tmp_path / "run")
    assert preparation_of(model).pixels == Pixels(channels=1, bits=16, range=(0.0, 4095.0))
    assert preparation_of(model).mean == tuple(metadata["mean"])
    assert readings(tmp_path / "run")[-1]["knn"] is not None


def test_a_resumed_run_keeps_what_it_measured(tmp_path, planes):
    folder = fill(tmp_path / "images", planes, sixteen_bits)
    settings = {**SETTINGS, **MEASURED, "data.source": folder, "run.checkpoint_every": 1}
    said = run(tmp_path / "run", settings)
    assert "repeated from grey to RGB" in said
    assert "no value is above 6" in said
    assert "data.range=[low, high]" in said
    before = described(tmp_path / "run")["mean"]
    fill(folder, planes, lambda number, path, plane: sixteen_bits(number, path, plane * 0))
    said = run(tmp_path / "run", {**settings, "budget.steps": 4, "run.resume": "changed"})
    assert "measured on" not in said
    (last,) = (tmp_path / "run" / "checkpoints").glob("*4.safetensors")
    assert json.loads(read_metadata(last)["dino_vit"])["mean"] == before


def test_five_channels_in_a_tiff(tmp_path, planes):
    folder = fill(tmp_path / "images", planes, five_channels)
    settings = {**SETTINGS, **MEASURED, **NO_COLOUR, "data.source": folder, "data.channels": 5}
    said = run(tmp_path / "run", settings)
    assert f"{LENGTH} 5-channel (uint16)" in said
    metadata = described(tmp_path / "run")
    values = np.stack(list(planes.values())) / 65535
    assert metadata["mean"] == pytest.approx([values.mean() * band for band in range(1, 6)], rel=1e-3)
    assert load_backbone(tmp_path / "run")(torch.rand(1, 5, 32, 32)).shape == (1, 32)
    assert readings(tmp_path / "run")[-1]["knn"] is not None


def test_five_channels_are_not_taken_for_three(tmp_path, planes):
    folder = fill(tmp_path / "images", planes, five_channels)
    said = run(tmp_path / "run", {**SETTINGS, "data.source": folder}, code=2)
    assert "data.channels=3, but the images of" in said
    said = run(tmp_path / "run", {**SETTINGS, **NO_COLOUR, "data.source": folder, "data.channels": 5}, code=2)
    assert (
        "data.mean has 3 values, but data.channels=5; give one value per channel, or data.mean=null" in said
    )


def test_palettes_cmyk_grey_and_transparency_in_one_set(tmp_path, planes):
    folder = fill(tmp_path / "images", planes, mixed)
    said = run(tmp_path / "run", {**SETTINGS, "data.source": folder, "data.bits": 8})
    assert "repeated from grey to RGB" in said
    assert "unreadable" not in said
    assert not (tmp_path / "run" / "unreadable.txt").exists()
    assert readings(tmp_path / "run")[-1]["knn"] is not None


def test_recipe_auto_takes_the_channels_of_the_images_and_measures_them(tmp_path, planes):
    folder = fill(
        tmp_path / "images", planes, lambda n, path, plane: np.save(path.with_suffix(".npy"), plane)
    )
    said = run(tmp_path / "run", {**SETTINGS, "recipe": "auto", "data.source": folder})
    assert "data.channels=1: as the images have" in said
    assert f"measured on {LENGTH} images" in said
    assert said.count("data.mean=") == 1
    assert load_backbone(tmp_path / "run").channels == 1


def test_float_images_beyond_one_say_what_to_do(tmp_path, planes):
    def write(number, path, plane):
        np.save(path.with_suffix(".npy"), plane.astype(np.float32))

    folder = fill(tmp_path / "images", planes, write)
    said = run(tmp_path / "run", {**SETTINGS, "data.source": folder}, code=2)
    assert "none of 32 images can be used" in said
    assert "set data.range=[low, high], the values that become 0 and 1" in said
    run(tmp_path / "run", {**SETTINGS, "data.source": folder, "data.range": "[0, 255]"})
