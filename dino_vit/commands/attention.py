"""Draw where a backbone looks, for each image of a source: overlays, maps as arrays, sheets to compare by.

y x rows and columns of patches
"""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from einops import rearrange
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from dino_vit.config.settings import Count, CountOrZero, Settings, setting
from dino_vit.core.distributed import all_gather, all_or_none, rank, world_size
from dino_vit.core.runtime import start_processes
from dino_vit.core.storage import write_bytes
from dino_vit.data.images.decode import UnreadableImage, read_image
from dino_vit.data.sources.open import Source, open_source
from dino_vit.eval.attention import maps, video
from dino_vit.eval.attention.pictures import (
    Panels,
    as_picture,
    enlarge,
    heat,
    overlay,
    side_by_side,
    spotlight,
    write_png,
    write_sheet,
)
from dino_vit.models.vit import VisionTransformer
from dino_vit.views.preparation import Preparation, preparation_of, squeeze
from dino_vit.weights import load_backbone

log = logging.getLogger("dino_vit")

SHEET_ROWS = 12  # images on a contact sheet; they share their principal components
Share = Annotated[float, Field(gt=0, lt=1)]


class AttentionConfig(Settings):
    """Draw the self-attention maps of images."""

    weights: str = Field(description="run folder or weights file")
    source: str = setting("synthetic", "image, folder, glob or any other source of images")
    output: str = setting("attention", "folder for pictures and maps")
    network: Literal["teacher", "student"] = setting("teacher", "of a checkpoint")
    count: Count | None = setting(12, "images, from all over the source; null: all")
    size: Count | None = setting(None, "pixels of the shorter side; null: each image as it is")
    longest: Count | None = setting(
        1024, "pixels of the longer side beyond which an image is shrunk; null: never"
    )
    block: int = setting(-1, "block whose attention is drawn; negative numbers count from the last")
    heads: tuple[CountOrZero, ...] | None = setting(None, "heads that get a picture of their own; null: all")
    mass: Share = setting(0.6, "share of the attention that the mask holds in the fewest patches")
    rollout: bool = setting(False, "also draw what reaches the CLS token through all blocks")
    pca: bool = setting(True, "also draw the patches' principal components as colours")

    positional: ClassVar = ("source",)
    also_known_as: ClassVar = {
        "weights": "checkpoint model run",
        "source": "images data input",
        "output": "output_dir out",
        "block": "layer",
        "mass": "threshold",
        "size": "image_size",
    }


class Seen(NamedTuple):
    """What a backbone makes of one image."""

    name: str
    file: str  # what its files are called
    picture: Tensor  # uint8 (3, H, W)
    heads: Tensor  # (heads, y, x)
    rolled: Tensor | None  # (y, x)
    tokens: Tensor | None  # (y, x, d)


def run(config: AttentionConfig) -> int:
    """Write pictures and maps of every image, and say where they are; processes share the sheets."""
    accelerator = start_processes(trackers=(), folder=Path())
    model = load_backbone(config.weights, network=config.network).to(accelerator.device)
    if video.is_video(config.source):
        return draw_video(model, config) if rank() == 0 else 0
    with all_or_none():
        sheets, images = draw_sheets(model, open_source(config.source), config)
    if rank() == 0:
        folder, block = Path(config.output), config.block % model.depth
        many = "1 sheet" if sheets == 1 else f"{sheets} sheets"
        print(f"{folder}/sheet-*.png: where block {block} looks, {images} images on {many}")
        print(f"{folder}/*.png: every image beside its maps; *.overlay.png and *.mask.png of its own size")
        print(f"{folder}/*.attention.npy: the raw maps, heads × rows × columns of patches")
    accelerator.end_training()
    return 0


def draw_sheets(model: VisionTransformer, source: Source, config: AttentionConfig) -> tuple[int, int]:
    """Draw this process's share of the sheets; return how many sheets and images there are of all."""
    heads, preparation = chosen_heads(config, model), preparation_of(model)
    places = range(len(source)) if config.count is None else spread(len(source), config.count)
    names = FileNames()
    files = [names.of(source.name(place)) for place in places]
    pages = range(0, len(places), SHEET_ROWS)
    drawn = torch.zeros(1, 2, dtype=torch.long, device=model.cls_token.device)
    for number in range(rank(), len(pages), world_size()):
        page = slice(pages[number], pages[number] + SHEET_ROWS)
        seen = list(see_all(model, preparation, source, places[page], files[page], config))
        if seen:
            sheet = Path(config.output) / f"sheet-{number + 1}.png"
            write_page(seen, sheet, model, heads, config.mass)
            drawn += torch.tensor([1, len(seen)], device=drawn.device)
        if len(pages) > 1:
            log.info("sheet %d of %d", number + 1, len(pages))
    sheets, images = all_gather(drawn).sum(0).tolist()
    if not sheets:
        raise ValueError(f"none of the {len(places)} images that were tried can be read; see the lines above")
    return sheets, images


def draw_video(model: VisionTransformer, config: AttentionConfig) -> int:
    """Write the video with the mean attention of the heads beside it."""
    heads = chosen_heads(config, model)
    normalise = preparation_of(model).normaliser(model.cls_token.device)

    def beside(frame: Tensor) -> Tensor:
        image = resized(frame, config.size, config.longest)
        padded = pad(normalise(image[None]), model.patch_size)
        attention = maps.cls_attention(model, padded, config.block)[0, heads].mean(0).cpu()
        size = image.shape[-2], image.shape[-1]
        return side_by_side([image, overlay(image, enlarge(attention, size, model.patch_size, smooth=True))])

    target = Path(config.output) / f"{Path(config.source).stem}.overlay.mp4"
    frames = video.redraw(Path(config.source), target, beside)
    print(f"{target}: {frames} frames beside where block {config.block % model.depth} looks")
    return 0


def chosen_heads(config: AttentionConfig, model: VisionTransformer) -> list[int]:
    """Return the heads that get a picture of their own; a block or head that does not exist is refused."""
    if not -model.depth <= config.block < model.depth:
        raise ValueError(
            f"block={config.block}: this backbone has blocks 0 to {model.depth - 1}; negative numbers count "
            "from the last"
        )
    heads = list(range(model.heads) if config.heads is None else config.heads)
    if unknown := [head for head in heads if head >= model.heads]:
        raise ValueError(f"heads={unknown}: this backbone has heads 0 to {model.heads - 1}")
    return heads


def spread(length: int, count: int) -> list[int]:
    """Return up to `count` different places all over a length, in no rhythm that a sorted source may have."""
    if count >= length:
        return list(range(length))
    golden = (5**0.5 - 1) / 2
    return sorted({int(length * (place * golden % 1)) for place in range(count)})


def see_all(
    model: VisionTransformer,
    preparation: Preparation,
    source: Source,
    places: Iterable[int],
    files: Iterable[str],
    config: AttentionConfig,
) -> Iterator[Seen]:
    """Yield what the backbone makes of each image; one that cannot be read is left out with a line."""
    normalise = preparation.normaliser(model.cls_token.device)
    for place, file in zip(places, files, strict=True):
        try:
            image = read_image(source, place, preparation.pixels)
        except UnreadableImage as error:
            log.warning("left out: %s", error)
        else:
            image = resized(image, config.size, config.longest)
            padded = pad(normalise(image[None]), model.patch_size)
            yield Seen(
                name=source.name(place),
                file=file,
                picture=as_picture(image),
                heads=maps.cls_attention(model, padded, config.block)[0].cpu(),
                rolled=maps.rollout(model, padded)[0].cpu() if config.rollout else None,
                tokens=maps.patch_tokens(model, padded)[0].cpu() if config.pca else None,
            )


def resized(image: Tensor, shorter: int | None, longest: int | None) -> Tensor:
    """Bring an image's shorter side to a length, then its longer side below another."""
    height, width = image.shape[-2:]
    factor = shorter / min(height, width) if shorter else 1.0
    if longest:
        factor = min(factor, longest / max(height, width))
    size = max(1, round(height * factor)), max(1, round(width * factor))
    return squeeze(image, size)


def pad(images: Tensor, patch: tuple[int, int]) -> Tensor:
    """Repeat the last row and column of images (B, C, H, W) up to a whole number of patches."""
    height, width = images.shape[-2:]
    return F.pad(images, (0, -width % patch[1], 0, -height % patch[0]), mode="replicate")


def write_page(
    seen: Sequence[Seen], sheet: Path, model: VisionTransformer, heads: Sequence[int], mass: float
) -> None:
    """Write the files of some images, and the sheet that shows them together."""
    tokens = [one.tokens for one in seen if one.tokens is not None]
    colours = maps.principal_colours(tokens) if tokens else [None] * len(seen)
    rows = []
    for one, colour in zip(seen, colours, strict=True):
        panels = draw(one, colour, model.patch_size, heads, mass)
        rows.append(Panels(one.name, list(panels.values())))
        titles = list(panels)
        write_png(side_by_side(panels.values()), sheet.with_name(f"{one.file}.png"))
        write_png(panels["mean of heads"], sheet.with_name(f"{one.file}.overlay.png"))
        write_png(panels["mask"], sheet.with_name(f"{one.file}.mask.png"))
        write_array(one.heads, sheet.with_name(f"{one.file}.attention.npy"))
        if one.rolled is not None:
            write_array(one.rolled, sheet.with_name(f"{one.file}.rollout.npy"))
    write_sheet(rows, titles, sheet)


def draw(
    seen: Seen, colours: Tensor | None, patch: tuple[int, int], heads: Sequence[int], mass: float
) -> dict[str, Tensor]:
    """Return the pictures of an image by their titles, each of the image's size."""
    size, picture = (seen.picture.shape[-2], seen.picture.shape[-1]), seen.picture
    mean = seen.heads.mean(0)
    panels = {"image": picture, "mean of heads": overlay(picture, enlarge(mean, size, patch, smooth=True))}
    held = enlarge(maps.mass_mask(mean, mass), size, patch, smooth=False) > 0
    panels["mask"] = spotlight(picture, held)
    for head in heads:
        panels[f"head {head}"] = heat(enlarge(seen.heads[head], size, patch, smooth=False))
    if seen.rolled is not None:
        panels["rollout"] = overlay(picture, enlarge(seen.rolled, size, patch, smooth=True))
    if colours is not None:
        spread_out = enlarge(rearrange(colours, "y x c -> c y x"), size, patch, smooth=False)
        panels["patches"] = as_picture(spread_out)
    return panels


def write_array(values: Tensor, path: Path) -> None:
    """Write an array as NumPy stores it."""
    buffer = io.BytesIO()
    np.save(buffer, values.numpy())
    write_bytes(path, buffer.getvalue())


class FileNames:
    """Give each image a file name of its own, made of letters, digits, dots and dashes of its name."""

    def __init__(self) -> None:
        self.taken: set[str] = set()

    def of(self, name: str) -> str:
        stem = re.sub(r"[^\w.-]+", "-", name.rpartition(".")[0] or name).strip("-.") or "image"
        stem, number = stem[-100:], 1
        chosen = stem
        while chosen.casefold() in self.taken or chosen.startswith("sheet-"):
            number += 1
            chosen = f"{stem.removeprefix('sheet-')}-{number}"
        self.taken.add(chosen.casefold())
        return chosen
