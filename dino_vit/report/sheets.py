"""Pictures of single images: the views that were cut from them, where heads look, what lies nearest."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dino_vit.config.pretrain import PretrainConfig
from dino_vit.data.images.decode import UnreadableImage, read_image
from dino_vit.data.images.pixels import Pixels
from dino_vit.data.sampling_weights import read_weights
from dino_vit.data.sources.open import Source
from dino_vit.eval.pictures import as_picture, heat
from dino_vit.report.explorer import Explored, shortened
from dino_vit.report.network import Teacher
from dino_vit.report.pictures import data_uri, resized, within
from dino_vit.training.feeding import build_pixels, make_views
from dino_vit.views.sampler import Sampler

SIDE = 96  # pixels of a picture on a sheet
ROWS = 6
NEIGHBOURS = 8
HEADS = 12  # more of them are not drawn


@dataclass(frozen=True)
class Tile:
    """A picture and the words under it."""

    uri: str
    title: str


@dataclass(frozen=True)
class Row:
    """An image and what belongs to it."""

    name: str
    tiles: list[Tile]


def view_rows(config: PretrainConfig, source: Source, epoch: int) -> list[Row]:
    """Make the views of a few images of an epoch again, as the networks saw them."""
    weights = read_weights(source, config.data.weights) if config.data.weights else None
    sampler = Sampler(length=len(source), batch_size=1, seed=config.seed, weights=weights)
    samples = sampler.order(epoch)[:ROWS].tolist()
    titles = [f"global {n + 1}" for n in range(config.views.global_count)]
    titles += [f"local {n + 1}" for n in range(config.views.local_count)]
    return [
        _with_original(
            source,
            sample,
            [_tile(view, f"{title}, {_size(view)}") for view, title in zip(views, titles, strict=True)],
            build_pixels(config),
        )
        for sample, views in zip(samples, make_views(config, source, samples, epoch, weights), strict=True)
    ]


def _size(view: Tensor) -> str:
    return f"{view.shape[-1]} × {view.shape[-2]} px"


def _with_original(source: Source, sample: int, tiles: list[Tile], pixels: Pixels) -> Row:
    name = shortened(source.name(sample))
    try:
        return Row(name, [_tile(read_image(source, sample, pixels), "image"), *tiles])
    except UnreadableImage as error:
        return Row(f"{name}: {error.reason}; another image stood in for it", tiles)


def _tile(image: Tensor, title: str) -> Tile:
    visible = as_picture(image)
    size = within((visible.shape[-2], visible.shape[-1]), SIDE)
    return Tile(data_uri(resized(visible, size)), title)


def attention_rows(teacher: Teacher, source: Source, explored: Explored) -> list[Row]:
    """Draw the attention of the last block's heads for a few images."""
    rows = _varied(explored)
    images = torch.stack([teacher.preparation.read(source, explored.indices[row]) for row in rows])
    maps = teacher.attention(images)
    found = []
    for row, image, heads in zip(rows, images, maps, strict=True):
        titles = ["mean of heads", *(f"head {head}" for head in range(len(heads)))][: HEADS + 1]
        drawn = [
            Tile(data_uri(_enlarged(heat(values))), title)
            for values, title in zip((heads.mean(dim=0), *heads), titles, strict=False)
        ]
        found.append(Row(explored.names[row], [_tile(image, "image"), *drawn]))
    return found


def neighbour_rows(teacher: Teacher, source: Source, explored: Explored) -> list[Row]:
    """Show a few images beside those whose features are nearest."""
    found = []
    for row in _varied(explored):
        near = explored.neighbours[row, :NEIGHBOURS].tolist()
        cosines = explored.similarities[row].tolist()
        tiles = [_framed(teacher, source, explored, row, "image")]
        for place, cosine in zip(near, cosines, strict=False):
            tiles.append(_framed(teacher, source, explored, place, f"{cosine:.4f}"))
        found.append(Row(explored.names[row], tiles))
    return found


def _framed(teacher: Teacher, source: Source, explored: Explored, row: int, said: str) -> Tile:
    label = explored.labels[row]
    title = said if label is None else f"{said}, {explored.classes[label]}"
    return _tile(teacher.preparation.read(source, explored.indices[row]), title)


def _varied(explored: Explored) -> list[int]:
    """Return a few rows, of as many labels as there are."""
    first: dict[int | None, int] = {}
    for row, label in enumerate(explored.labels):
        first.setdefault(label, row)
    others = [row for row in range(len(explored.labels)) if row not in first.values()]
    return [*first.values(), *others][:ROWS]


def _enlarged(image: Tensor) -> Tensor:
    """Enlarge a picture (c, y, x) whose pixels are patches, which are to stay squares."""
    factor = max(1, SIDE // max(image.shape[-2:]))
    return image.repeat_interleave(factor, dim=-2).repeat_interleave(factor, dim=-1)
