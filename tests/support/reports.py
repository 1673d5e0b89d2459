"""A run on a few image files, one of them with a name that a page must not take for its own."""

from collections.abc import Mapping
from pathlib import Path

from PIL import Image

from dino_vit.data.sources.synthetic import SyntheticSource
from tests.support.runs import run

HOSTILE = "<script>alert(1)</script>.png"  # a folder and a file, as far as a disk is concerned
IMAGES = 72


def write_images(folder: Path) -> None:
    """Write images of three classes below a folder; the hostile name is of a fourth."""
    source = SyntheticSource(length=10 * IMAGES, size=32)
    for index in range(IMAGES):
        name = f"{['dots', 'nets', 'bricks'][index % 3]}/{index:03}.png" if index else HOSTILE
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        image = source.read(3 + index % 3 + 10 * (index // 3) if index else 0)
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)


def make_run(folder: Path, settings: Mapping[str, object] = {}) -> Path:
    """Train for 20 steps on such images, and return the folder of the run."""
    write_images(folder / "images")
    output = folder / "run"
    source = {"data.source": folder / "images", "run.eval_every": 1}
    run(output, {**source, **settings})
    return output
