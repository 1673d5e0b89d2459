"""What is done to an image before a frozen backbone sees it: read, resized, cropped, normalised."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from dino_vit.data.images.decode import read_image
from dino_vit.data.images.pixels import RGB, Pixels, unit_scale
from dino_vit.data.sources.open import Source
from dino_vit.models.vit import VisionTransformer
from dino_vit.views.geometry import Size
from dino_vit.weights.layouts import IMAGENET

log = logging.getLogger("dino_vit")

Fit = Literal["crop", "whole"]


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """What is done to an image before a backbone sees it."""

    size: Size
    mean: tuple[float, ...]
    std: tuple[float, ...]
    fit: Fit = "crop"  # resize and cut off the border, or squeeze the whole image
    pixels: Pixels = RGB

    def empty(self, images: int, *, pin: bool = False) -> Tensor:
        """Return a place for images as `read` returns them."""
        shape = images, self.pixels.channels, *self.size
        return torch.empty(shape, dtype=self.pixels.dtype, pin_memory=pin)

    def read(self, source: Source, index: int) -> Tensor:
        """Return an image of a source, (C, *size) in uint8, or from 0 to 1 if it is deeper."""
        image = read_image(source, index, self.pixels)
        return fit(image, self.size) if self.fit == "crop" else squeeze(image, self.size)

    def normaliser(self, device: torch.device) -> Callable[[Tensor], Tensor]:
        """Return a function that makes what the backbone takes of what `read` returned, on a device."""
        mean, std = (torch.tensor(values, device=device) for values in (self.mean, self.std))
        shift, scale = rearrange(mean, "c -> c 1 1"), rearrange(std, "c -> c 1 1")
        return lambda images: (unit_scale(images.to(device, non_blocking=True)) - shift) / scale


def preparation_of(model: VisionTransformer, *, size: Size | None = None, fit: Fit = "crop") -> Preparation:
    """Return how images are prepared for a backbone: as its weights say, else as ImageNet's were."""
    known = model.provenance
    mean, std = (known.mean, known.std) if known is not None else (None, None)
    if mean is None or std is None:
        if model.channels != 3:
            raise ValueError(
                f"the weights do not say how images of {model.channels} channels were normalised"
            )
        log.info("the weights do not say how images were normalised; ImageNet's mean and std are used")
        mean, std = IMAGENET
    model.grid_of(*(size or model.image_size))  # or the size is refused
    bits, range_ = (known.bits or 8, known.range) if known is not None else (8, None)
    return Preparation(
        size=size or model.image_size,
        mean=tuple(mean),
        std=tuple(std),
        fit=fit,
        pixels=Pixels(channels=model.channels, bits=bits, range=range_),
    )


def fit(image: Tensor, size: Size) -> Tensor:
    """Resize (bicubic, antialias) and centre-crop an image (C, H, W) to (C, *size).

    The published protocol: the side that limits becomes 256/224 of the crop's, then the border is cut off.
    An image no larger than the crop is not enlarged for that; it keeps its border.
    """
    (_, height, width), (h, w) = image.shape, size
    if height * w <= width * h:
        target = round(h * 256 / 224) if height > h else h
        resized = target, target * width // height
    else:
        target = round(w * 256 / 224) if width > w else w
        resized = target * height // width, target
    image = squeeze(image, resized)
    top, left = round((resized[0] - h) / 2), round((resized[1] - w) / 2)
    return image[:, top : top + h, left : left + w]


def squeeze(image: Tensor, size: Size) -> Tensor:
    """Resize (bicubic, antialias) a whole image (C, H, W) to (C, *size), whatever its aspect."""
    if image.shape[1:] == size:
        return image
    resized = F.interpolate(image[None], size=size, mode="bicubic", antialias=True)[0]
    return resized.clamp_(0, 1) if resized.is_floating_point() else resized  # bicubic overshoots
