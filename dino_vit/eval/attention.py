"""Where a backbone looks: the attention that its CLS token pays to the patches, as pictures.

b images, h heads, y x rows and columns of patches
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from einops import rearrange
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from dino_vit.data.decode import UnreadableImage, read_image
from dino_vit.data.sources import Source, open_source
from dino_vit.features import evaluating, fit
from dino_vit.settings import Count, Settings, knob
from dino_vit.vit import VisionTransformer
from dino_vit.weights import load_backbone
from dino_vit.weights.layouts import IMAGENET

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger("dino_vit")

SHOWN_PIXELS = 1.6  # inches of a picture on the sheet


class AttentionConfig(Settings):
    """Draw the self-attention maps of some images."""

    weights: str = Field(description="run folder or weights file")
    source: str = knob("synthetic", "folder of images, or `synthetic`")
    output: str = knob("attention.png", "PNG to write; the maps go beside it as .npy")
    count: Count = knob(6, "images, from all over the source")
    block: int = knob(-1, "block whose attention is drawn; negative numbers count from the last")

    also_known_as: ClassVar = {"weights": "checkpoint model run", "source": "images data", "block": "layer"}


def cls_attention(model: VisionTransformer, images: Tensor, block: int = -1) -> Tensor:
    """Return the attention of the CLS token to each patch in one block, (b, h, y, x)."""
    grid = model.grid_of(*images.shape[-2:])
    with evaluating(model):
        (weights,) = model.get_attention(images, [block], queries=slice(0, 1))
    patches = weights[:, :, 0, 1 + model.registers :]
    return rearrange(patches, "b h (y x) -> b h y x", y=grid[0])


def run(config: AttentionConfig) -> int:
    """Write the sheet and the maps, and say where they are."""
    model = load_backbone(config.weights)
    source = open_source(config.source)
    names, images = _read(source, spread(len(source), config.count), model)
    maps = cls_attention(model, _normalise(images, model), config.block)
    output = Path(config.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    np.save(output.with_suffix(".npy"), maps.numpy())
    draw(images, maps, names).savefig(output, dpi=120)
    print(f"{output}: {len(images)} images, {maps.shape[1]} heads of block {config.block % model.depth}")
    print(f"{output.with_suffix('.npy')}: the maps as {tuple(maps.shape)}, images × heads × rows × columns")
    return 0


def spread(length: int, count: int) -> list[int]:
    """Return up to `count` different places all over a length, in no rhythm that a sorted source may have."""
    golden = (5**0.5 - 1) / 2
    return sorted({int(length * (place * golden % 1)) for place in range(min(count, length))})


def _read(source: Source, indices: Sequence[int], model: VisionTransformer) -> tuple[list[str], Tensor]:
    names, images = [], []
    for index in indices:
        try:
            images.append(fit(read_image(source, index), model.image_size))
        except UnreadableImage as error:
            log.warning("left out: %s", error)
        else:
            names.append(source.name(index))
    if not images:
        raise ValueError(
            f"none of the {len(indices)} images that were tried can be read; see the lines above"
        )
    return names, torch.stack(images)


def _normalise(images: Tensor, model: VisionTransformer) -> Tensor:
    """Scale uint8 images as the backbone's own were, as ImageNet's where that was not recorded."""
    known = model.provenance
    mean: Sequence[float]
    std: Sequence[float]
    if known is not None and known.mean is not None and known.std is not None:
        mean, std = known.mean, known.std
    elif model.channels == 3:
        mean, std = IMAGENET
        log.info("the weights do not say how images were normalised; ImageNet's mean and std are used")
    else:
        raise ValueError(f"the weights do not say how images of {model.channels} channels were normalised")
    shift, scale = (rearrange(torch.tensor(values), "c -> c 1 1") for values in (mean, std))
    return (images / 255 - shift) / scale


def draw(images: Tensor, maps: Tensor, names: Sequence[str]) -> Figure:
    """Return a sheet with a row an image: the image, the mean of its heads, then head by head."""
    from matplotlib.figure import Figure

    shown = torch.cat((maps.mean(dim=1, keepdim=True), maps), dim=1)
    shown = F.interpolate(shown, size=images.shape[-2:], mode="nearest")
    titles = ["image", "mean of heads", *(f"head {head}" for head in range(maps.shape[1]))]
    aspect = images.shape[-2] / images.shape[-1]
    size = (SHOWN_PIXELS * len(titles), (SHOWN_PIXELS * aspect + 0.18) * len(images) + 0.3)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(images), len(titles), squeeze=False)
    for row, (image, heads, name) in enumerate(zip(images, shown, names, strict=True)):
        picture = rearrange(image[:3] if len(image) >= 3 else image[:1], "c y x -> y x c").numpy()
        axes[row][0].imshow(picture, cmap="gray")
        axes[row][0].set_ylabel(_short(name), fontsize=6, rotation=90)
        for axis, head in zip(axes[row][1:], heads, strict=True):
            axis.imshow(head.numpy(), cmap="inferno", vmin=0)
        for axis, title in zip(axes[row], titles, strict=True):
            axis.set_xticks([])
            axis.set_yticks([])
            if row == 0:
                axis.set_title(title, fontsize=8)
    return figure


def _short(name: str, length: int = 22) -> str:
    return name if len(name) <= length else f"…{name[1 - length :]}"
