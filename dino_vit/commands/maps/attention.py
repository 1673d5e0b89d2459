"""Draw the attention maps of a backbone: overlays, masks and sheets of images, or a video; save the maps.

y x rows and columns of patches
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from einops import rearrange
from pydantic import Field
from torch import Tensor

from dino_vit.commands import Result
from dino_vit.config.settings import Count, Dimension, FewOrZero, Settings, setting
from dino_vit.core import log
from dino_vit.core.distributed import all_gather, rank, world_size
from dino_vit.core.progress import plural
from dino_vit.core.runtime import start_processes
from dino_vit.core.sizes import Size
from dino_vit.core.storage import replacing
from dino_vit.data.images.decode import UnreadableImage, read_image
from dino_vit.data.sources.open import Source, open_source
from dino_vit.data.sources.source import spread
from dino_vit.eval.maps import pictures
from dino_vit.eval.maps.attention import (
    cls_attention,
    mass_mask,
    pad,
    patch_tokens,
    principal_colours,
    rollout,
    with_attention,
)
from dino_vit.eval.maps.pictures import Panel, resize, write_png, write_sheet
from dino_vit.eval.video.files import VideoFile, is_video, writing_video
from dino_vit.models.vit import VisionTransformer
from dino_vit.views.preparation import Preparation, preparation_of
from dino_vit.weights import load_backbone

SHEET_ROWS = 12  # images on a sheet; they share their principal components
Share = Annotated[float, Field(gt=0, lt=1)]


class AttentionConfig(Settings):
    """Draw the self-attention maps of images."""

    weights: str = Field(description="run folder or weights file")
    source: str = setting("synthetic", "image, video, folder, glob or any other source of images")
    output: str = setting("attention", "folder for pictures and maps")
    network: Literal["teacher", "student"] = setting("teacher", "of a checkpoint")
    count: Count | None = setting(12, "number of images, from all over the source; null: all")
    size: Dimension | None = setting(None, "pixels to resize the shorter side to; null: no resizing")
    longest: Dimension | None = setting(1024, "shrink images whose longer side has more pixels; null: never")
    block: Annotated[int, Field(ge=-1000, le=1000)] = setting(
        -1, "block whose attention is drawn; negative numbers count from the last"
    )
    heads: tuple[FewOrZero, ...] | None = setting(None, "heads that get a picture of their own; null: all")
    mass: Share = setting(0.6, "share of the attention that the mask holds in the fewest patches")
    rollout: bool = setting(False, "also draw what reaches the CLS token through all blocks")
    pca: bool = setting(True, "also draw the patches' principal components as colours")

    positional: ClassVar = ("source",)


class ImageMaps(NamedTuple):
    """An image and its maps."""

    picture: Tensor  # uint8 (3, H, W)
    heads: Tensor  # CLS attention (heads, y, x)
    rollout: Tensor | None  # (y, x)
    tokens: Tensor | None  # (y, x, d)


@dataclass(frozen=True, kw_only=True)
class AttentionMaps(Result):
    """The files that were drawn."""

    folder: Path
    sheets: list[Path]
    maps: dict[str, Path]  # by the name of the image: an array (heads, rows, columns), for numpy.load
    video: Path | None = None


def run(config: AttentionConfig) -> AttentionMaps:
    """Write pictures and maps of every image, or an overlay of a video; processes share the sheets."""
    accelerator = start_processes()
    model = with_attention(load_backbone(config.weights, network=config.network)).to(accelerator.device)
    heads = chosen_heads(config, model)
    folder, block = Path(config.output), config.block % model.depth
    if is_video(config.source):
        target = folder / f"{Path(config.source).stem}.overlay.mp4"
        frames = draw_video(model, heads, target, config) if rank() == 0 else 0
        text = f"{target}: {plural(frames, 'frame')} beside the attention of block {block}"
        return AttentionMaps(folder=folder, sheets=[], maps={}, video=target, text=text)
    sheets, maps = draw_sheets(model, heads, open_source(config.source), config)
    counts = f"{plural(len(maps), 'image')} on {plural(len(sheets), 'sheet')}"
    text = (
        f"{folder}/sheet-*.png: attention of block {block}, {counts}\n"
        f"{folder}/*.png: each image beside its maps; *.overlay.png and *.mask.png in the image's size\n"
        f"{folder}/*.attention.npy: the maps as arrays, heads × rows × columns of patches"
    )
    return AttentionMaps(folder=folder, sheets=sheets, maps=maps, text=text)


def chosen_heads(config: AttentionConfig, model: VisionTransformer) -> list[int]:
    """Return the heads to draw, after checking that they and the block exist."""
    if not -model.depth <= config.block < model.depth:
        raise ValueError(
            f"block={config.block}: this backbone has blocks 0 to {model.depth - 1}; negative numbers count "
            "from the last"
        )
    heads = list(range(model.heads) if config.heads is None else config.heads)
    if unknown := [head for head in heads if head >= model.heads]:
        raise ValueError(f"heads={unknown}: this backbone has heads 0 to {model.heads - 1}")
    return heads


def draw_sheets(
    model: VisionTransformer, heads: Sequence[int], source: Source, config: AttentionConfig
) -> tuple[list[Path], dict[str, Path]]:
    """Draw this process's share of the sheets; return the sheets and the maps by name of all processes."""
    preparation, folder = preparation_of(model), Path(config.output)
    indices = range(len(source)) if config.count is None else spread(len(source), config.count)
    stems = file_stems(source.name(index) for index in indices)
    drawn = torch.zeros(len(indices), dtype=torch.long, device=model.device)
    starts = range(0, len(indices), SHEET_ROWS)
    for number in range(rank(), len(starts), world_size()):
        rows = range(len(indices))[starts[number] : starts[number] + SHEET_ROWS]
        images: dict[str, ImageMaps] = {}  # by the stem of their files
        names = []
        for row in rows:
            index, stem = indices[row], stems[row]
            try:
                image = read_image(source, index, preparation.pixels)
            except UnreadableImage as error:
                log.warning("skipped %s", error)
            else:
                images[stem] = compute_maps(model, preparation, image, config)
                names.append(source.name(index))
                drawn[row] = number + 1
        if images:
            draw_sheet(sheet_path(folder, number + 1), images, names, model.patch_size, heads, config)
        if len(starts) > 1:
            log.info("sheet %d of %d", number + 1, len(starts))
    numbers = all_gather(drawn[None]).sum(0).tolist()
    if not any(numbers):
        raise ValueError(f"none of the images can be read ({len(indices)} tried); see the lines above")
    maps = {
        source.name(index): folder / f"{stem}.attention.npy"
        for index, stem, number in zip(indices, stems, numbers, strict=True)
        if number
    }
    return [sheet_path(folder, number) for number in sorted(set(numbers) - {0})], maps


def sheet_path(folder: Path, number: int) -> Path:
    """Return the file of a sheet."""
    return folder / f"sheet-{number}.png"


def compute_maps(
    model: VisionTransformer, preparation: Preparation, image: Tensor, config: AttentionConfig
) -> ImageMaps:
    """Resize an image as the settings say, pad it to whole patches, and compute its maps."""
    image = resize(image, config.size, config.longest)
    padded = pad(preparation.normaliser(model.device)(image[None]), model.patch_size)
    return ImageMaps(
        picture=pictures.as_picture(image),
        heads=cls_attention(model, padded, config.block)[0].cpu(),
        rollout=rollout(model, padded)[0].cpu() if config.rollout else None,
        tokens=patch_tokens(model, padded)[0].cpu() if config.pca else None,
    )


def draw_sheet(
    sheet: Path,
    images: dict[str, ImageMaps],
    names: Sequence[str],
    patch: Size,
    heads: Sequence[int],
    config: AttentionConfig,
) -> None:
    """Write the files of some images, and the sheet that shows them together."""
    tokens = [image.tokens for image in images.values() if image.tokens is not None]
    colours = principal_colours(tokens) if tokens else [None] * len(images)
    rows = []
    for (stem, image), colour in zip(images.items(), colours, strict=True):
        size, mean = (image.picture.shape[-2], image.picture.shape[-1]), image.heads.mean(0)
        mask = pictures.enlarge(mass_mask(mean, config.mass), size, patch) > 0
        panels = {
            "image": image.picture,
            "mean of heads": pictures.overlay(image.picture, mean, patch),
            "mask": torch.where(mask, image.picture, image.picture // 4),  # darker outside the mask
        }
        for head in heads:
            panels[f"head {head}"] = pictures.heat(pictures.enlarge(image.heads[head], size, patch))
        if image.rollout is not None:
            panels["rollout"] = pictures.overlay(image.picture, image.rollout, patch)
        if colour is not None:
            channels = rearrange(colour, "y x c -> c y x")
            panels["patches"] = pictures.as_picture(pictures.enlarge(channels, size, patch))
        rows.append([Panel(picture) for picture in panels.values()])
        write_png(pictures.side_by_side(panels.values()), sheet.with_name(f"{stem}.png"))
        write_png(panels["mean of heads"], sheet.with_name(f"{stem}.overlay.png"))
        write_png(panels["mask"], sheet.with_name(f"{stem}.mask.png"))
        for kind, values in (("attention", image.heads), ("rollout", image.rollout)):
            if values is not None:
                path = sheet.with_name(f"{stem}.{kind}.npy")
                with replacing(path) as partial, partial.open("wb") as file:
                    np.save(file, values.numpy())
    write_sheet(rows, sheet, names=names, titles=list(panels))


def file_stems(names: Iterable[str]) -> list[str]:
    """Return a different file name for each image, made of the letters, digits and dashes of its name."""
    stems: list[str] = []
    taken: set[str] = set()  # without case, as some file systems ignore it
    for name in names:
        stem = re.sub(r"[^\w-]+", "-", name.rpartition(".")[0] or name).strip("-")[-100:] or "image"
        if stem.casefold().startswith("sheet-"):
            stem = f"image-{stem}"
        number, unique = 1, stem
        while unique.casefold() in taken:
            number += 1
            unique = f"{stem}-{number}"
        taken.add(unique.casefold())
        stems.append(unique)
    return stems


def draw_video(model: VisionTransformer, heads: Sequence[int], target: Path, config: AttentionConfig) -> int:
    """Write a video with the mean attention of the heads beside each frame; return the number of frames."""
    preparation, video, frames = preparation_of(model), VideoFile(config.source), 0
    config = config.model_copy(update={"rollout": False, "pca": False})
    with writing_video(target, video.rate) as write:
        for frame in video:
            maps = compute_maps(model, preparation, frame, config)
            overlay = pictures.overlay(maps.picture, maps.heads[heads].mean(0), model.patch_size)
            write(pictures.side_by_side([maps.picture, overlay]))
            frames += 1
    return frames
