"""Draw the attention maps of a backbone: overlays, masks and sheets of images; save the maps.

b images, h heads, y x rows and columns of patches, n tokens, d channels
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from einops import rearrange
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from dino_vit.config.commands import AttentionConfig
from dino_vit.config.outputs import check_outputs
from dino_vit.core import Size, height_width, log
from dino_vit.core.runtime import start_processes
from dino_vit.core.storage import write_bytes
from dino_vit.core.text import Result, plural
from dino_vit.data.image_set import ImageSet, evenly_spaced
from dino_vit.data.images.decode import UnreadableImage, read_image
from dino_vit.data.labels import NO_LABELS
from dino_vit.data.open import open_source
from dino_vit.features.frozen import FrozenBackbone, check_finite
from dino_vit.models.backbone import Backbone, eval_mode
from dino_vit.models.vit import VisionTransformer
from dino_vit.views import pictures
from dino_vit.views.eval_transform import FAR, EvalTransform, eval_transform_of, resize, say_if_far
from dino_vit.views.pictures import principal_colours, resize_sides
from dino_vit.weights import load_backbone

MASS = 0.6  # of the attention, in the mask of a head


def pad(images: Tensor, patch: Size) -> Tensor:
    """Repeat the last row and column of images (b, c, H, W) up to a whole number of patches."""
    height, width = images.shape[-2:]
    return F.pad(images, (0, -width % patch[1], 0, -height % patch[0]), mode="replicate")


def whole_image(
    model: Backbone, image: Tensor, transform: EvalTransform, *, shorter: int, longest: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return a whole image (C, H, W) at some size, and the same normalised and padded to whole patches.

    Positions are interpolated where that size is not the one of training.
    """
    image = resize_sides(image, shorter, longest)
    return image, pad(transform.normaliser(model.device)(image[None]), model.patch_size)


def with_attention(model: Backbone) -> VisionTransformer:
    """Return a backbone whose attention can be shown, or raise."""
    if isinstance(model, VisionTransformer):
        return model
    name = model.architecture["name"]
    raise ValueError(f"timm:{name} does not support attention maps")


def cls_attention(model: VisionTransformer, images: Tensor, block: int = -1) -> Tensor:
    """Return the attention of the CLS token to each patch in one block, (b, h, y, x)."""
    with eval_mode(model):
        (weights,) = model.get_attention(images, [block], queries=slice(0, 1))
    weights = weights[:, :, 0, model.first_patch :]  # without the CLS token and the registers
    return rearrange(weights, "b h (y x) -> b h y x", y=model.grid_of(*images.shape[-2:])[0])


def mass_mask(maps: Tensor, share: float) -> Tensor:
    """Mark the fewest patches of each map (..., y, x) that hold at least a share of its mass."""
    flat = maps.flatten(-2).double()
    values, indices = flat.sort(dim=-1, descending=True, stable=True)
    mass_before = values.cumsum(-1) - values
    marked = mass_before < share * flat.sum(-1, keepdim=True)
    return torch.zeros_like(marked).scatter(-1, indices, marked).reshape(maps.shape)


def patch_tokens(model: Backbone, images: Tensor) -> Tensor:
    """Return the patch tokens after the final LayerNorm, (b, y, x, d)."""
    with eval_mode(model):
        tokens = model.forward_features(images)[:, model.first_patch :]
    return rearrange(tokens, "b (y x) d -> b y x d", y=model.grid_of(*images.shape[-2:])[0])


FILES = (
    "{0}/NUMBER-NAME.png: each image beside its maps; *.overlay.png and *.mask.png in its size\n"
    "{0}/*.attention.npy: the maps as arrays, heads × rows × columns of patches"
)
Maps = dict[str, Path | NDArray[np.float32]]  # (heads, rows, columns) by the name of the image
SHEET_ROWS = 12  # images on a sheet; they share their principal components


class ImageMaps(NamedTuple):
    """An image and its maps."""

    name: str
    picture: Tensor  # uint8 (3, H, W)
    heads: Tensor  # CLS attention (heads, y, x)
    tokens: Tensor  # of the patches (y, x, d)


@dataclass(frozen=True, kw_only=True, repr=False)
class AttentionMaps(Result):
    """What was drawn: files if there is an output, otherwise pictures and arrays."""

    sheets: Sequence[Path | Image.Image]
    maps: Maps


def run(config: AttentionConfig) -> AttentionMaps | None:
    """Draw every image and its maps; only rank 0 does."""
    accelerator = start_processes()
    if not accelerator.is_main_process:
        return None
    model = with_attention(load_backbone(config.weights, network=config.network)).to(accelerator.device)
    folder, block = config.output and Path(config.output), config.block % model.depth
    which = "the last block" if block == model.depth - 1 else f"block {block} of 0 to {model.depth - 1}"
    sheets, maps = draw_sheets(model, open_source(config.source, NO_LABELS), config)
    counts = f"{plural(len(maps), 'image')} on {plural(len(sheets), 'sheet')}"
    text = f"attention of {which}, {counts}"
    if folder:
        text = f"{folder}/sheet-*.png: {text}\n{FILES.format(folder)}"
    return AttentionMaps(sheets=sheets, maps=maps, text=text)


def draw_sheets(
    model: VisionTransformer, source: ImageSet, config: AttentionConfig
) -> tuple[list[Path | Image.Image], Maps]:
    """Draw the images that can be read; return the sheets, and the arrays of maps by name of image."""
    transform, sheets, maps = eval_transform_of(model), list[Path | Image.Image](), Maps()
    indices = evenly_spaced(len(source), len(source) if config.count is None else config.count)
    folder, starts = config.output and Path(config.output), range(0, len(indices), SHEET_ROWS)
    if folder:  # what could not be written is said before hours of work
        files = (path for index in indices for path in files_of(folder, index, source.name(index)))
        check_outputs(config, *(folder / sheet_name(start) for start in starts), *files)
    for start in starts:
        images: dict[int, ImageMaps] = {}
        for index in indices[start : start + SHEET_ROWS]:
            try:
                image = read_image(source, index, transform.pixels)
                picture, padded = prepare(model, image, transform, config)
            except UnreadableImage as error:
                log.warning("skipped %s", error)
                continue
            size = height_width(padded.shape[-2:])
            is_chosen = config.size or math.prod(size) < math.prod(transform.size)  # not shrunk by default
            if is_chosen and not (images or sheets):  # once
                say_if_far(size, transform.size)
            heads = cls_attention(model, padded, config.block)[0].cpu()
            tokens = patch_tokens(model, padded)[0].cpu()
            check_finite(torch.cat([heads.flatten(), tokens.flatten()]), model)
            images[index] = ImageMaps(source.name(index), picture, heads, tokens)
        if images:
            sheet, drawn = draw_sheet(model, images, folder / sheet_name(start) if folder else None)
            sheets.append(sheet)
            maps |= drawn
    if not sheets:
        raise ValueError(f"none of the images can be read ({len(indices)} tried); see the lines above")
    return sheets, maps


def sheet_name(start: int) -> str:
    """Return the name of the sheet that begins with the image of some place."""
    return f"sheet-{start // SHEET_ROWS + 1}.png"


def prepare(
    model: VisionTransformer, image: Tensor, transform: EvalTransform, config: AttentionConfig
) -> tuple[Tensor, Tensor]:
    """Return a resized image as a picture, and normalised and padded to whole patches."""
    side = config.size or min(*image.shape[-2:], FAR * min(transform.size))
    image, padded = whole_image(model, image, transform, shorter=side, longest=config.longest)
    return pictures.as_picture(image), padded


def draw_sheet(
    model: VisionTransformer, images: Mapping[int, ImageMaps], path: Path | None
) -> tuple[Path | Image.Image, Maps]:
    """Return a sheet of images and the arrays of their maps by name of image; with a path, as files."""
    panels, maps = [], Maps()
    colours = principal_colours([image.tokens for image in images.values()])
    for (index, image), colour in zip(images.items(), colours, strict=True):
        row = draw_maps(image, colour, model)
        panels.append(list(row.values()))
        files = files_of(path.parent, index, image.name) if path else []
        maps[image.name] = write_maps(image, row, files) if files else image.heads.numpy()
    names = [image.name for image in images.values()]
    sheet = pictures.draw_sheet(panels, names=names, titles=list(row))
    if path is None:
        return Image.open(BytesIO(sheet)), maps
    write_bytes(path, sheet)
    return path, maps


def write_maps(image: ImageMaps, row: Mapping[str, Tensor], files: Sequence[Path]) -> Path:
    """Write the files of an image, and return that of its maps."""
    whole, overlay, mask, path = files
    pictures.write_png(pictures.side_by_side(row.values()), whole)
    pictures.write_png(row["mean of heads"], overlay)
    pictures.write_png(row["mask"], mask)
    array = BytesIO()
    np.save(array, image.heads.numpy())
    write_bytes(path, array.getvalue())
    return path


def files_of(folder: Path, index: int, name: str) -> list[Path]:
    """Return the files of an image: all its pictures in a row, overlay, mask, maps."""
    endings = ("png", "overlay.png", "mask.png", "attention.npy")
    return [folder / f"{file_stem(index, name)}.{ending}" for ending in endings]


def draw_maps(image: ImageMaps, colours: Tensor, model: VisionTransformer) -> dict[str, Tensor]:
    """Return the pictures of an image and its maps, by their titles."""
    picture, patch, mean = image.picture, model.patch_size, image.heads.mean(0)
    size = picture.shape[-2], picture.shape[-1]
    mask = pictures.enlarge(mass_mask(mean, MASS), size, patch) > 0
    heads = [pictures.heat(pictures.enlarge(head, size, patch)) for head in image.heads]
    channels = rearrange(colours, "y x c -> c y x")
    return {
        "image": picture,
        "mean of heads": pictures.overlay(picture, mean, patch),
        "mask": torch.where(mask, picture, picture // 4),  # darker outside the mask
        **{f"head {number}": head for number, head in enumerate(heads)},
        "patches": pictures.as_picture(pictures.enlarge(channels, size, patch)),
    }


def file_stem(index: int, name: str) -> str:
    """Return how the files of an image begin: its number in the source, as names in folders may be equal."""
    letters = re.sub(r"[^\w-]+", "-", name.rpartition(".")[0] or name).strip("-")
    return f"{index}-{letters[-100:]}"


PATCHES = 24  # along the shorter side of an image whose attention is drawn: fewer show little


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
