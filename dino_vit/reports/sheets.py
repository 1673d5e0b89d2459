"""Rows of pictures for a few images: their augmented views, attention maps and nearest neighbours."""

from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F

from dino_vit.config.pretrain import PretrainConfig
from dino_vit.data.images.decode import UnreadableImage, read_image
from dino_vit.data.labels import read_sampling_weights
from dino_vit.data.sources.open import Source
from dino_vit.eval.features import FrozenBackbone
from dino_vit.eval.maps.pictures import as_picture, enlarge, heat, resize_sides, shorten
from dino_vit.reports.explorer import MAX_NAME, ImageMap, attention_of, data_uri
from dino_vit.views.build import build_pixels, make_views
from dino_vit.views.sampler import Sampler

SIDE = 144  # pixels of a picture
ATTENTION_SIDE = 512  # pixels of the longer side of an image whose attention is drawn, at most
ROWS, HEADS = 6, 12  # at most


class Tile(NamedTuple):
    """A picture and its caption."""

    uri: str
    caption: str


class Row(NamedTuple):
    """An image and the pictures that belong to it."""

    name: str
    tiles: list[Tile]


def view_rows(config: PretrainConfig, source: Source, epoch: int) -> list[Row]:
    """Recreate the views of a few images in an epoch, as the networks saw them."""
    weights = read_sampling_weights(source, config.data.weights) if config.data.weights else None
    sampler = Sampler(length=len(source), batch_size=1, seed=config.seed, weights=weights)
    indices = sampler.order(epoch)[:ROWS].tolist()
    kinds = [f"global {n + 1}" for n in range(config.views.global_count)]
    kinds += [f"local {n + 1}" for n in range(config.views.local_count)]
    rows = []
    for index, views in zip(indices, make_views(config, source, indices, epoch, weights), strict=True):
        name, tiles = shorten(source.name(index), MAX_NAME), []
        try:
            tiles.append(_tile(read_image(source, index, build_pixels(config)), "image"))
        except UnreadableImage as error:
            name += f": {error.reason}; replaced by another image"
        for kind, view in zip(kinds, views, strict=True):
            tiles.append(_tile(view, f"{kind}, {view.shape[-1]} × {view.shape[-2]} px"))
        rows.append(Row(name, tiles))
    return rows


def attention_rows(teacher: FrozenBackbone, source: Source, images: ImageMap) -> list[Row]:
    """Draw the attention maps of a few whole images, by head of the last block."""
    rows = []
    for row in _varied(images):
        image = read_image(source, images.indices[row], teacher.transform.pixels)
        image = resize_sides(image, None, ATTENTION_SIDE)
        (heads,) = attention_of(teacher, image[None])
        picture = resize_sides(as_picture(image), None, SIDE)
        maps = {"mean of heads": heads.mean(dim=0)}
        maps |= {f"head {number}": values for number, values in enumerate(heads[:HEADS])}
        tiles = [Tile(data_uri(picture), "image")]
        for caption, values in maps.items():
            squares = enlarge(values, (image.shape[-2], image.shape[-1]), teacher.model.patch_size)
            # Not smoothed, so that patches stay squares with sharp edges.
            squares = F.interpolate(squares[None, None], size=picture.shape[-2:], mode="nearest-exact")
            tiles.append(Tile(data_uri(heat(squares[0, 0])), caption))
        rows.append(Row(images.names[row], tiles))
    return rows


def neighbour_rows(teacher: FrozenBackbone, source: Source, images: ImageMap) -> list[Row]:
    """Draw the nearest neighbours of a few images."""
    rows = []
    for row in _varied(images):
        cosines = [f"{cosine:.4f}" for cosine in images.cosines[row].tolist()]
        tiles = []
        for other, caption in zip([row, *images.neighbours[row].tolist()], ["image", *cosines], strict=True):
            label = images.labels[other]
            caption += "" if label is None else f", {label}"
            tiles.append(_tile(teacher.transform.read(source, images.indices[other]), caption))
        rows.append(Row(images.names[row], tiles))
    return rows


def _tile(image: Tensor, caption: str) -> Tile:
    return Tile(data_uri(resize_sides(as_picture(image), None, SIDE)), caption)


def _varied(images: ImageMap) -> list[int]:
    """Return a few rows of a map, with as many labels as possible."""
    labels = images.labels
    return sorted(range(len(labels)), key=lambda row: labels.index(labels[row]) != row)[:ROWS]
