"""The examples, run from the first to the last line, on few images."""

import runpy
import shutil
import sys

import numpy as np
import pytest
from PIL import Image

import dino_vit
from dino_vit import VisionTransformer, save_backbone
from tests.support.documents import ROOT
from tests.support.images import write_synthetic


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with photos of two classes and scenes of 13 bands, in which the examples are run in order."""
    folder = tmp_path_factory.mktemp("examples")
    for number in range(64):
        name = f"{('sky', 'grass')[number % 2]}/{number}.png"
        write_synthetic(folder / "photos" / name, number, size=32)
    (folder / "scenes").mkdir()
    generator = np.random.default_rng(0)
    for number in range(64):
        bands = generator.integers(0, 12_000, (32, 32, 13), dtype=np.uint16)
        np.savez(folder / "scenes" / f"{number}.npz", bands=bands)
    return folder


@pytest.fixture
def run(folder, monkeypatch, capsys):
    """Return a function that runs an example in this process, and returns what it prints."""

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
        return capsys.readouterr().out

    monkeypatch.chdir(folder)
    return run


@pytest.fixture(scope="module")
def embedded(folder):
    """The features of the photos, of which two have a copy."""
    model = VisionTransformer(image_size=32, patch_size=8, width=32, depth=2, heads=2)
    save_backbone(model, folder / "vit.safetensors", mean=(0.5,) * 3, std=(0.5,) * 3)
    (folder / "copies" / "sky").mkdir(parents=True)
    for path in sorted((folder / "photos").rglob("*.png"))[:12]:
        shutil.copy(path, folder / "copies" / f"{path.parent.name}-{path.name}")
    shutil.copy(folder / "photos/sky/0.png", folder / "copies" / "sky" / "again.png")
    shutil.copy(folder / "photos/grass/11.png", folder / "copies" / "sky" / "grass.png")
    output = folder / "copies.parquet"
    return dino_vit.embed(folder / "copies", folder / "vit.safetensors", output=output, verbose=False)


def test_photos_are_found_by_photos(run, folder, embedded):
    said = run(
        "search_photos.py", "copies.parquet", "copies/grass-1.png", "copies/sky/grass.png", "-k", "3"
    ).splitlines()
    unit = embedded.values / np.linalg.norm(embedded.values, axis=1, keepdims=True)
    for title, found in (said[0], said[1:4]), (said[4], said[5:]):
        row = embedded.names.index(title.removeprefix("copies/"))
        cosines = np.delete(unit @ unit[row], row)
        assert [float(line.split()[0]) for line in found] == pytest.approx(sorted(cosines)[:-4:-1], abs=6e-4)
    assert said[5] == "  1.000  grass-11.png"
    with Image.open(folder / "similar.png") as sheet:
        assert sheet.size == (4 * 200, 2 * 200)


def test_near_duplicates_are_grouped(run, folder, embedded):
    said = run("near_duplicates.py", "copies.parquet", "--cosine", "0.99999")
    groups = [set(part.split("\n  ")[1:]) for part in said.strip().split("\n2 photos:")]
    assert {"grass-11.png", "sky/grass.png  sky"} in groups
    everything = run("near_duplicates.py", "copies.parquet", "--cosine", "-1")
    assert everything.startswith(f"{len(embedded.names)} photos:")
    assert run("near_duplicates.py", "copies.parquet", "--cosine", "1.1") == ""
    with Image.open(folder / "nearest.png") as histogram:
        assert np.asarray(histogram.convert("L")).std() > 10


@pytest.mark.slow
def test_scenes_of_13_bands_are_learned_from(run, folder):
    said = run("thirteen_bands.py", "scenes", "--minutes", "0.02")
    assert "torch.Size([" in said
    assert "channels: 13" in (folder / "runs/scenes/config.yaml").read_text()


@pytest.mark.slow
def test_a_loop_of_ones_own_and_a_head_on_its_backbone(run, folder):
    said = run("own_loop.py", "photos", "--steps", "2")
    assert said.startswith("step 0: loss ")
    for number in range(20):
        mask = np.kron(np.random.default_rng(number).integers(0, 4, (2, 2)), np.ones((16, 16))).astype(
            np.uint8
        )
        for name, pixels in (("images", np.stack([60 * mask] * 3, -1)), ("masks", mask)):
            (folder / name).mkdir(exist_ok=True)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    said = run("segmentation_head.py", "images", "masks", "own.safetensors", "--steps", "20")
    assert said.endswith(" % of the pixels of 4 photos are right\n")
