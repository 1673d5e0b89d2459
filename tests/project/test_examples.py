"""The examples, run as a user would, on few images."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.documents import ROOT
from tests.support.images import write_synthetic

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with photos of two classes and scenes of 13 bands, in which the examples are run in order."""
    folder = tmp_path_factory.mktemp("examples")
    for number in range(72):
        name = f"{('sky', 'grass')[number % 2]}/{number}.png"
        write_synthetic(folder / "photos" / name, number, size=48)
    (folder / "scenes").mkdir()
    generator = np.random.default_rng(0)
    for number in range(72):
        bands = generator.integers(0, 12_000, (40, 40, 13), dtype=np.uint16)
        np.savez(folder / "scenes" / f"{number}.npz", bands=bands)
    return folder


def run(name, folder, *arguments):
    command = [sys.executable, ROOT / "examples" / name, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_photos_are_searched_and_clustered(folder):
    said = run("search_photos.py", folder, "photos", "photos/sky/0.png", "--minutes", "0.1")
    assert "  1.000  sky/0.png" in said
    for made in ("similar.png", "runs/photos/report.html"):
        assert (folder / made).exists()
    said = run("scikit_features.py", folder, "photos", "runs/photos", "--groups", "3")
    assert [line.partition(",")[0] for line in said.splitlines()[:3]] == ["group 0", "group 1", "group 2"]
    assert "classified correctly: " in said


def test_scenes_of_13_bands_are_learned_from(folder):
    said = run("thirteen_bands.py", folder, "scenes", "--minutes", "0.1")
    assert "torch.Size([" in said
    assert "channels: 13" in (folder / "runs/scenes/config.yaml").read_text()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_short_and_says_how_it_is_run(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 40
    assert f"    python examples/{path.name} " in text
    assert Path(path.name).stem in (ROOT / "README.md").read_text()
