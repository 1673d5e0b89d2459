"""Draw the attention maps of a backbone: overlays, masks and sheets of images; save the maps.

b images, h heads, y x rows and columns of patches, n tokens, d channels
"""

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
from dino_vit.core import Size, log
from dino_vit.core.runtime import start_processes
from dino_vit.core.storage import write_bytes
from dino_vit.core.text import Result, plural
from dino_vit.data.image_set import ImageSet, evenly_spaced
from dino_vit.data.images.decode import UnreadableImage, read_image
from dino_vit.data.labels import NO_LABELS
from dino_vit.data.open import open_source
from dino_vit.eval.mask import object_mask
from dino_vit.features.frozen import FrozenBackbone, check_finite
from dino_vit.models.backbone import eval_mode
from dino_vit.models.vit import VisionTransformer
from dino_vit.views import pictures
from dino_vit.views.eval_transform import FAR, EvalTransform, eval_transform_of, resize, say_if_far
from dino_vit.weights import load_backbone

PATCHES = 24  # along the shorter side of an image: fewer show little
SHEET_ROWS = 12  # images on a sheet; they share their principal components
FILES = (
    "{0}/NUMBER-NAME.png: each image beside its maps\n"
    "{0}/*.mask.png: what stands out, in white: look before you use it\n"
    "{0}/*.attention.npy: the maps as arrays, heads × rows × columns of patches"
)
Maps = dict[str, Path | NDArray[np.float32]]  # (heads, rows, columns) by the name of the image


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
    model = load_backbone(config.weights, network=config.network).to(accelerator.device)
    if not isinstance(model, VisionTransformer):
        raise ValueError(f"timm:{model.architecture['name']} does not support attention maps")
    folder, block = config.output and Path(config.output), config.block % model.depth
    which = "the last block" if block == model.depth - 1 else f"block {block} of 0 to {model.depth - 1}"
    source = open_source(config.source, NO_LABELS)
    sheets, maps = draw_sheets(model, source, config)
    counts = f"{plural(len(maps), 'image')} on {plural(len(sheets), 'sheet')}"
    text = f"attention of {which}, {counts}"
    if folder:
        text = f"{folder}/sheet-*.png: {text}\n{FILES.format(folder)}"
    if config.count and config.count < len(source):
        others = "an image, or a glob in quotes, in place of the source draws those"
        text += f"\ncount=null draws all {len(source):,} images; {others}"
    return AttentionMaps(sheets=sheets, maps=maps, text=text)


def draw_sheets(
    model: VisionTransformer, source: ImageSet, config: AttentionConfig
) -> tuple[list[Path | Image.Image], Maps]:
    """Draw the images that can be read; return the sheets, and the arrays of maps by name of image."""
    transform, sheets, maps = eval_transform_of(model), list[Path | Image.Image](), Maps()
    indices = evenly_spaced(len(source), len(source) if config.count is None else config.count)
    folder, starts = config.output and Path(config.output), range(0, len(indices), SHEET_ROWS)
    paths = [folder / f"sheet-{number}.png" if folder else None for number in range(1, 1 + len(starts))]
    if folder:  # what could not be written is said before hours of work
        files = (path for index in indices for path in files_of(folder, index, source.name(index)))
        check_outputs(config, *filter(None, paths), *files)
    if config.size:
        say_if_far((config.size, config.size), transform.size)
    for start, path in zip(starts, paths, strict=True):
        images: dict[int, ImageMaps] = {}
        for index in indices[start : start + SHEET_ROWS]:
            try:
                image = read_image(source, index, transform.pixels)
            except UnreadableImage as error:
                log.warning("skipped %s", error)
                continue
            side = config.size or drawn_side(model, transform, min(image.shape[-2:]))
            image = pictures.resize_sides(image, side, config.longest)
            batch = as_batch(model, image, transform)
            heads = cls_attention(model, batch, config.block)[0].cpu()
            tokens = patch_tokens(model, batch)[0].cpu()
            check_finite(torch.cat([heads.flatten(), tokens.flatten()]), model)
            images[index] = ImageMaps(source.name(index), pictures.as_picture(image), heads, tokens)
        if images:
            sheet, drawn = draw_sheet(model, images, path)
            sheets.append(sheet)
            maps |= drawn
    if not sheets:
        raise ValueError(f"none of the images can be read ({len(indices)} tried); see the lines above")
    return sheets, maps


def drawn_side(model: VisionTransformer, transform: EvalTransform, side: int) -> int:
    """Return the shorter side to draw: the image's, in enough patches, at most twice that of training."""
    return min(max(side, PATCHES * max(model.patch_size)), FAR * min(transform.size))


def as_batch(model: VisionTransformer, image: Tensor, transform: EvalTransform) -> Tensor:
    """Normalise an image (C, H, W) and pad it to whole patches, by its last row and column."""
    height, width = model.patch_size
    padding = 0, -image.shape[2] % width, 0, -image.shape[1] % height
    return F.pad(transform.normaliser(model.device)(image[None]), padding, mode="replicate")


def cls_attention(model: VisionTransformer, images: Tensor, block: int = -1) -> Tensor:
    """Return the attention of the CLS token to each patch in one block, (b, h, y, x)."""
    with eval_mode(model):
        (weights,) = model.get_attention(images, [block], queries=slice(0, 1))
    weights = weights[:, :, 0, model.first_patch :]  # without the CLS token and the registers
    return rearrange(weights, "b h (y x) -> b h y x", y=model.grid_of(*images.shape[-2:])[0])


def patch_tokens(model: VisionTransformer, images: Tensor) -> Tensor:
    """Return the patch tokens after the final LayerNorm, (b, y, x, d)."""
    with eval_mode(model):
        tokens = model.forward_features(images)[:, model.first_patch :]
    return rearrange(tokens, "b (y x) d -> b y x d", y=model.grid_of(*images.shape[-2:])[0])


def draw_sheet(
    model: VisionTransformer, images: Mapping[int, ImageMaps], path: Path | None
) -> tuple[Path | Image.Image, Maps]:
    """Return a sheet of images and the arrays of their maps by name of image; with a path, as files."""
    rows, maps = [], Maps()
    colours = pictures.principal_colours([image.tokens for image in images.values()])
    for (index, image), colour in zip(images.items(), colours, strict=True):
        mask = object_mask(image.tokens, image.picture, model.patch_size)
        rows.append(draw_maps(image, colour, mask, model.patch_size))
        maps[image.name] = image.heads.numpy()
        if path:
            picture, mask_file, array = files_of(path.parent, index, image.name)
            pictures.write_png(pictures.side_by_side(rows[-1].values()), picture)
            pictures.save_png(Image.fromarray(mask.numpy()), mask_file)
            content = BytesIO()
            np.save(content, image.heads.numpy())
            write_bytes(array, content.getvalue())
            maps[image.name] = array
    panels, names = [list(row.values()) for row in rows], [image.name for image in images.values()]
    sheet = pictures.draw_sheet(panels, names=names, titles=list(rows[-1]))
    if path is None:
        return Image.open(BytesIO(sheet)), maps
    write_bytes(path, sheet)
    return path, maps


def files_of(folder: Path, index: int, name: str) -> tuple[Path, Path, Path]:
    """Return the files of an image: its pictures in a row, the mask of its object, and its maps.

    They begin with its number in the source, as names in folders may be equal.
    """
    letters = re.sub(r"[^\w-]+", "-", name.rpartition(".")[0] or name).strip("-")
    stem = folder / f"{index}-{letters[-100:]}"
    return Path(f"{stem}.png"), Path(f"{stem}.mask.png"), Path(f"{stem}.attention.npy")


def draw_maps(image: ImageMaps, colours: Tensor, mask: Tensor, patch: Size) -> dict[str, Tensor]:
    """Return the pictures of an image and its maps, by their titles."""
    picture, mean = image.picture, image.heads.mean(0)
    size = picture.shape[-2], picture.shape[-1]
    heads = [pictures.heat(pictures.enlarge(head, size, patch)) for head in image.heads]
    channels = rearrange(colours, "y x c -> c y x")
    return {
        "image": picture,
        "mean of heads": pictures.overlay(picture, mean, patch),
        "object": torch.where(mask, picture, picture // 4),  # darker outside
        **{f"head {number}": head for number, head in enumerate(heads)},
        "patches": pictures.as_picture(pictures.enlarge(channels, size, patch)),
    }


def attention_of(frozen: FrozenBackbone, image: Tensor) -> tuple[Tensor, Tensor]:
    """Return a whole image (C, H, W), and the attention to it by the heads of the last block, (h, y, x).

    It is larger than those of training, at most twice as large, if they have few patches.
    """
    model, side = frozen.model, min(frozen.transform.size)
    assert isinstance(model, VisionTransformer)
    shorter = drawn_side(model, frozen.transform, side)
    sides = pictures.resize_sides(image, shorter, 2 * shorter).shape[-2:]
    height, width = (
        max(1, round(side / step)) * step for side, step in zip(sides, model.patch_size, strict=True)
    )
    image = resize(image, (height, width))
    return image, cls_attention(model, as_batch(model, image, frozen.transform))[0].float().cpu()
