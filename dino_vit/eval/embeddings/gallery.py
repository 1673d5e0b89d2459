"""Sheets of images of a source: rows of pictures, each with a line below it."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from dino_vit.core.storage import write_bytes
from dino_vit.data.images.decode import UnreadableImage, read_image
from dino_vit.data.images.pixels import Pixels
from dino_vit.data.sources.open import Source, open_source
from dino_vit.eval.attention.pictures import DPI, as_picture, shortened
from dino_vit.eval.embeddings.files import Embeddings, printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CELL_INCHES, _GAP_INCHES, _CELL_PIXELS = 1.35, 0.15, 256


class Cell(NamedTuple):
    """A picture, if there is one, and what stands below it."""

    picture: Tensor | None
    text: str


def picture_of(source: Source, index: int, pixels: Pixels) -> Tensor | None:
    """Return an image as a picture of a size to look at, or nothing if it cannot be read."""
    try:
        image = as_picture(read_image(source, index, pixels))
    except UnreadableImage:
        return None
    shrink = _CELL_PIXELS / max(image.shape[1:])
    if shrink >= 1:
        return image
    height, width = (max(round(side * shrink), 1) for side in image.shape[1:])
    return F.interpolate(image[None], size=(height, width), mode="bilinear", antialias=True)[0]


class Images:
    """The images that embeddings are of, as far as they are still where they were."""

    def __init__(self, embeddings: Embeddings) -> None:
        metadata = embeddings.metadata
        self.embeddings = embeddings
        self.pixels = Pixels(**metadata["preparation"]["pixels"])
        self.missing: str | None = None
        try:
            self.source: Source | None = open_source(metadata["source"]["spec"])
        except (ValueError, OSError) as error:
            self.source, self.missing = None, str(error)

    def picture(self, row: int) -> Tensor | None:
        index, source = int(self.embeddings.indices[row]), self.source
        if source is None or index >= len(source):
            return None
        if printable(source.name(index)) != self.embeddings.names[row]:  # the source is another one by now
            return None
        return picture_of(source, index, self.pixels)


def write_gallery(rows: Sequence[Sequence[Cell | None]], path: Path) -> None:
    """Write a PNG of rows of pictures; what is not there is an empty frame, a column of None a gap."""
    from matplotlib.figure import Figure

    columns = list(zip_longest(*rows))
    widths = [_CELL_INCHES if any(column) else _GAP_INCHES for column in columns]
    size = (sum(widths), (_CELL_INCHES + 0.18) * len(rows))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(rows), len(columns), squeeze=False, width_ratios=widths)
    for line, cells in zip(axes, zip(*columns, strict=True), strict=True):
        for axis, cell in zip(line, cells, strict=True):
            if cell is None:
                axis.set_axis_off()
            else:
                _draw(axis, cell)
    buffer = BytesIO()
    figure.savefig(buffer, dpi=DPI, format="png")
    write_bytes(path, buffer.getvalue())


def _draw(axis: Axes, cell: Cell) -> None:
    picture = torch.full((3, 8, 8), 240, dtype=torch.uint8) if cell.picture is None else cell.picture
    axis.imshow(rearrange(picture, "c y x -> y x c").numpy(), interpolation="antialiased")
    axis.set_xlabel(shortened(cell.text, 30), fontsize=5.5, parse_math=False)
    axis.set_xticks([])
    axis.set_yticks([])
    for spine in axis.spines.values():
        spine.set_visible(False)
