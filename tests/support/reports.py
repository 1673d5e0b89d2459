"""A run on a few image files, one of them with a name that looks like a script, and its page."""

import base64
import io
import json
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
from PIL import Image

from dino_vit.cli import main
from tests.support.images import write_synthetic
from tests.support.training import trained

HOSTILE = "<script>alert(1)</script>.png"  # a folder and a file, as far as a disk is concerned
IMAGES = 72


def write_images(folder: Path) -> None:
    """Write images of three classes below a folder; the hostile name is of a fourth."""
    for index in range(IMAGES):
        name = f"{['dots', 'nets', 'bricks'][index % 3]}/{index:03}.png" if index else HOSTILE
        write_synthetic(folder / name, 3 + index % 3 + 10 * (index // 3) if index else 0)


def make_run(folder: Path, settings: Mapping[str, object] = {}) -> Path:
    """Train for 20 steps on such images, and return the folder of the run."""
    write_images(folder / "images")
    output = folder / "run"
    source = {"data.source": folder / "images", "compute.eval_every": 1}
    trained(output, {**source, **settings})
    return output


class ParsedPage(HTMLParser):
    """A page as a browser reads it: its texts, its data, and everything that it would load or run."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self.texts, self.inside = [], [], [], ""
        self.raw = {"script": [], "style": []}
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attributes]
        self.inside = tag

    def handle_data(self, data):
        self.raw.get(self.inside, self.texts).append(data)

    def handle_endtag(self, tag):
        self.inside = ""

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())

    @property
    def data(self):
        return json.loads(self.raw["script"][0])


def picture_of(uri):
    """Return the pixels of a `data:` address."""
    return np.array(Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))).convert("RGB"))


def write_report(folder, *settings, images=12):
    """Have the command write the page, and return it; with few images it takes less than a second."""
    assert main(["report", str(folder), f"images={images}", *settings]) == 0
    return ParsedPage((folder / "report.html").read_text())
