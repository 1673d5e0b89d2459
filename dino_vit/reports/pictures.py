"""What a page shows of the images: views, attention, and a map of positions, neighbours and thumbnails.

n images, k neighbours, d features, y x rows and columns
"""

import base64
import io
import math
from collections import Counter
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from einops import rearrange
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from dino_vit.config.commands import MIN_IMAGES
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.core.text import progress
from dino_vit.data.image_set import ImageSet
from dino_vit.data.images.decode import UnreadableImage, read_image
from dino_vit.eval.features import FrozenBackbone
from dino_vit.eval.knn import nearest
from dino_vit.eval.maps.attention import (
    cls_attention,
    principal_components,
    whole_image,
    with_attention,
)
from dino_vit.eval.maps.pictures import as_picture, heat, overlay, resize_sides, shorten
from dino_vit.models.vit import VisionTransformer
from dino_vit.views.build import build_pixels, make_views
from dino_vit.views.eval_transform import FAR, resize
from dino_vit.views.sampler import Sampler, read_sampling_weights

NEIGHBOURS = 8
MAX_NAME = 120  # characters
ROWS, HEADS = 6, 12  # at most, of views and attention
TILE_SIDE = 192  # pixels of a picture in a row
THUMBNAIL_SIDE, PHOTO_SIDE = 64, 320  # longer side in pixels: on the map, and of a selected image
# Of all images: the page stays below 8 MB with 500 of them, which are as large as their sides allow.
THUMBNAIL_PIXELS, PHOTO_PIXELS = 5_000_000, 500 * PHOTO_SIDE**2
PATCHES = 24  # along the shorter side of an image whose attention is drawn: fewer show little
PERPLEXITY = 30  # of t-SNE: about how many neighbours of an image it tries to keep
TINY = 1e-30


class Tile(NamedTuple):
    """A picture and its caption."""

    uri: str
    caption: str


class Row(NamedTuple):
    """An image and the pictures that belong to it."""

    name: str
    tiles: list[Tile]


@dataclass(kw_only=True)
class Pictures:
    """The sections of a page that need the images or a checkpoint, empty where these are missing."""

    views: list[Row] = field(default_factory=list)
    attention: list[Row] = field(default_factory=list)
    map: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)


def view_rows(config: PretrainConfig, source: ImageSet, epoch: int) -> list[Row]:
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
            tiles.append(draw_tile(read_image(source, index, build_pixels(config)), "image"))
        except UnreadableImage as error:
            name += f": {error.reason}; replaced by another image"
        for kind, view in zip(kinds, views, strict=True):
            tiles.append(draw_tile(view, f"{kind}, {view.shape[-1]} × {view.shape[-2]} px"))
        rows.append(Row(name, tiles))
    return rows


def attention_rows(teacher: FrozenBackbone, source: ImageSet, indices: list[int]) -> list[Row]:
    """Draw the attention maps of a few whole images, by head of the last block."""
    rows = []
    for index in indices[:ROWS]:
        image, name = read_image(source, index, teacher.transform.pixels), source.name(index)
        picture, batch = whole_patches(teacher, image)
        heads = attention_of(teacher, batch)
        mean = overlay(as_picture(picture), heads.mean(dim=0), teacher.model.patch_size)
        tiles = [draw_tile(image, "image"), draw_tile(mean, "mean of heads")]
        tiles += [draw_patches(heat(head), f"head {n}") for n, head in enumerate(heads[:HEADS])]
        rows.append(Row(shorten(name, MAX_NAME), tiles))
    return rows


def draw_tile(image: Tensor, caption: str) -> Tile:
    """Draw an image, made smaller if it is large."""
    return Tile(data_uri(resize_sides(as_picture(image), None, TILE_SIDE)), caption)


def draw_patches(colours: Tensor, caption: str) -> Tile:
    """Draw the colours of patches (3, y, x) as squares of whole pixels, which have sharp edges."""
    side = max(1, TILE_SIDE // max(colours.shape))
    return Tile(data_uri(colours.repeat_interleave(side, 1).repeat_interleave(side, 2)), caption)


def build_map(
    teacher: FrozenBackbone, source: ImageSet, indices: list[int]
) -> tuple[list[int], dict[str, Any]]:
    """Return the images that can be read, and what a teacher makes of them as `page.js` reads it."""
    found = teacher.extract(source, indices)
    kept, features = found.indices.tolist(), F.normalize(found.values.cpu(), dim=-1)
    if len(kept) < MIN_IMAGES:
        raise ValueError(f"{len(kept)} of {len(indices)} images could be read; a map needs {MIN_IMAGES}")
    cosines, neighbours = nearest(features, features, k=min(NEIGHBOURS, len(kept) - 1), self_offset=0)
    positions = tsne(features) if find_spec("sklearn") else principal_components(features, 2)
    labels = [source.label(index) for index in kept]
    counts = Counter(label for label in labels if label is not None).most_common()  # the largest first
    numbers = {label: number for number, (label, _) in enumerate(counts)}
    return kept, {
        "names": [shorten(source.name(index), MAX_NAME) for index in kept],
        "classes": [(source.classes[label], count) for label, count in counts],
        "labels": [-1 if label is None else numbers[label] for label in labels],
        "positions": _on_unit_square(positions),
        "neighbours": neighbours.tolist(),
        "cosines": cosines.double().round(decimals=4).tolist(),
        **_draw_images(teacher, source, kept),
    }


def _draw_images(teacher: FrozenBackbone, source: ImageSet, indices: list[int]) -> dict[str, Any]:
    """Return the pictures of images: as thumbnails, as photos, and the attention to them."""
    side = min(THUMBNAIL_SIDE, math.isqrt(THUMBNAIL_PIXELS // len(indices)))
    photo_side = min(PHOTO_SIDE, math.isqrt(PHOTO_PIXELS // len(indices)))
    square = replace(teacher.transform, size=(side, side), shorter_side=side)
    thumbnails, photos, attention = list[Tensor](), list[str](), list[str]()
    with progress("Drawing images and attention", len(indices)) as advance:
        for index in indices:
            image = read_image(source, index, teacher.transform.pixels)
            thumbnails.append(square.resize(as_picture(image)))
            photos.append(data_uri(resize_sides(as_picture(image), None, photo_side), quality=60))
            if isinstance(teacher.model, VisionTransformer):
                mean = attention_of(teacher, whole_patches(teacher, image)[1]).mean(dim=0)
                attention.append(data_uri(heat(mean), quality=None))  # a pixel for each patch
            advance(1)
    return {"thumbnails": build_atlas(torch.stack(thumbnails)), "photos": photos, "attention": attention}


def whole_patches(frozen: FrozenBackbone, image: Tensor) -> tuple[Tensor, Tensor]:
    """Return a whole image (C, H, W) in whole patches, and as a batch for a network.

    It is larger than those of training, at most twice as large, if they have few patches.
    """
    patch, side = frozen.model.patch_size, min(frozen.transform.size)
    shorter = round(side * min(max(1.0, PATCHES * max(patch) / side), FAR))
    sides = resize_sides(image, shorter, 2 * shorter).shape[-2:]
    height, width = (max(1, round(side / step)) * step for side, step in zip(sides, patch, strict=True))
    image = resize(image, (height, width))
    return whole_image(frozen.model, image, frozen.transform, shorter=min(height, width))


def attention_of(frozen: FrozenBackbone, batch: Tensor) -> Tensor:
    """Return the attention of the CLS token to one image in the last block, by head: (heads, y, x)."""
    return cls_attention(with_attention(frozen.model), batch)[0].float().cpu()


def tsne(features: Tensor) -> Tensor:
    """Return the t-SNE of features (n, d) of unit length."""
    from sklearn.manifold import TSNE

    # Like init="pca", which divides by zero where a collapse has made all features equal.
    start = principal_components(features, 2).float()
    start *= 1e-4 / start.std().clamp_min(TINY)
    perplexity = min(PERPLEXITY, (len(features) - 1) / 3)
    method = TSNE(perplexity=perplexity, init=start.numpy(), random_state=0)
    return torch.from_numpy(method.fit_transform(features.numpy()))


def _on_unit_square(positions: Tensor) -> list[list[float]]:
    """Turn positions (n, 2), whose axes mean nothing, to lie along their principal axes, each from 0 to 1."""
    positions = principal_components(positions, 2)
    low, high = positions.amin(0), positions.amax(0)
    scaled = (positions - (low + high) / 2) / (high - low).clamp_min(TINY) + 0.5
    return [[round(x, 4), round(y, 4)] for x, y in scaled.tolist()]


def build_atlas(images: Tensor) -> dict[str, Any]:
    """Join pictures (n, 3, y, x), row by row, into one."""
    columns = math.ceil(math.sqrt(len(images)))
    cells = torch.cat([images, images.new_zeros(-len(images) % columns, *images.shape[1:])])
    picture = rearrange(cells, "(row column) c y x -> c (row y) (column x)", column=columns)
    return {"uri": data_uri(picture, quality=75), "columns": columns, "size": list(images.shape[-2:])}


def data_uri(picture: Tensor, *, quality: int | None = 80) -> str:
    """Return a picture (3, y, x) as a WebP inside a `data:` address; without loss if quality is None."""
    buffer = io.BytesIO()
    pixels = rearrange(picture, "c y x -> y x c").contiguous().numpy()
    Image.fromarray(pixels).save(buffer, "WEBP", quality=quality or 80, lossless=quality is None, method=4)
    return f"data:image/webp;base64,{base64.b64encode(buffer.getvalue()).decode()}"
