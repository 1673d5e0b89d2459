"""The evaluation transform: an image is read, resized, cropped and normalised for a backbone."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from dino_vit.config.commands import Fit
from dino_vit.core import Size, log
from dino_vit.data.images.decode import read_given, read_image
from dino_vit.data.images.pixels import IMAGENET_NORMALISATION, RGB, Pixels, resized_side, unit_scale
from dino_vit.data.sources.open import Source
from dino_vit.models.backbone import Backbone


@dataclass(frozen=True, kw_only=True)
class EvalTransform:
    """The size, crop, pixels and normalisation of a backbone's images: `backbone(transform(image)[None])`."""

    size: Size
    mean: tuple[float, ...]
    std: tuple[float, ...]
    fit: Fit = "crop"  # resize and centre-crop, or resize the whole image and ignore its aspect ratio
    pixels: Pixels = RGB

    def __call__(self, image: object) -> Tensor:
        """Return a path, Pillow image, array or tensor, prepared (C, height, width) for the backbone.

        Tensors are (channels, height, width); of an array the shorter of first and last axis has the
        channels. Values are those of the type, from 0 to 1 in floating point.
        """
        resized = self.resize(read_given(image, self.pixels))
        return self.normaliser(resized.device)(resized)

    def empty(self, images: int, *, pin: bool = False) -> Tensor:
        """Return an uninitialised batch for images as `read` returns them."""
        shape = images, self.pixels.channels, *self.size
        return torch.empty(shape, dtype=self.pixels.dtype, pin_memory=pin)

    def read(self, source: Source, index: int) -> Tensor:
        """Read an image of a source: (C, *size), uint8, or float32 from 0 to 1 if it is deeper."""
        return self.resize(read_image(source, index, self.pixels))

    def resize(self, image: Tensor) -> Tensor:
        """Resize and crop an image (C, H, W) of these pixels to the size."""
        return resize_and_center_crop(image, self.size) if self.fit == "crop" else resize(image, self.size)

    def place_mask(self, mask: Tensor) -> Tensor:
        """Resize and crop the classes of pixels (H, W) as their image is, each pixel that of the nearest."""
        height, width = mask.shape
        resized, top, left = _placement(height, width, self.size) if self.fit == "crop" else (self.size, 0, 0)
        nearest = F.interpolate(mask[None, None].float(), size=resized, mode="nearest-exact")[0, 0]
        return nearest.to(mask.dtype)[top : top + self.size[0], left : left + self.size[1]]

    def normaliser(self, device: torch.device) -> Callable[[Tensor], Tensor]:
        """Return a function that normalises images from `read` on a device."""
        mean, std = (torch.tensor(values, device=device) for values in (self.mean, self.std))
        shift, scale = rearrange(mean, "c -> c 1 1"), rearrange(std, "c -> c 1 1")
        return lambda images: (unit_scale(images.to(device, non_blocking=True)) - shift) / scale


def eval_transform_of(model: Backbone, *, size: Size | None = None, fit: Fit = "crop") -> EvalTransform:
    """Return the transform stored with the weights of a backbone, by default that of ImageNet."""
    origin = model.provenance
    mean, std = (origin.mean, origin.std) if origin is not None else (None, None)
    if mean is None or std is None:
        if model.channels != 3:
            raise ValueError(f"the weights contain no mean and std for images with {model.channels} channels")
        log.info("the weights contain no mean and std; using those of ImageNet")
        mean, std = IMAGENET_NORMALISATION
    size = size or (origin and origin.size) or model.image_size
    model.grid_of(*size)  # raises if the size does not fit the patches
    bits, range_ = (origin.bits or 8, origin.range) if origin is not None else (8, None)
    return EvalTransform(
        size=size,
        mean=tuple(mean),
        std=tuple(std),
        fit=fit,
        pixels=Pixels(channels=model.channels, bits=bits, range=range_),
    )


def resize_and_center_crop(image: Tensor, size: Size) -> Tensor:
    """Resize (bicubic, antialias) and centre-crop an image (C, H, W) to (C, *size).

    As published, the limiting side of every image is resized to about 256/224 of the crop first.
    """
    (_, height, width), (h, w) = image.shape, size
    resized, top, left = _placement(height, width, size)
    return resize(image, resized)[:, top : top + h, left : left + w]


def _placement(height: int, width: int, size: Size) -> tuple[Size, int, int]:
    """Return the size that an image is resized to, and the top left corner of the crop."""
    h, w = size
    if height * w <= width * h:
        target = resized_side(h)
        resized = target, target * width // height
    else:
        target = resized_side(w)
        resized = target * height // width, target
    return resized, round((resized[0] - h) / 2), round((resized[1] - w) / 2)


def resize(image: Tensor, size: Size) -> Tensor:
    """Resize (bicubic, antialias) an image (C, H, W) to (C, *size), ignoring its aspect ratio."""
    if image.shape[1:] == size:
        return image
    if tuple(size) == (1, 1) and image.dtype == torch.uint8:  # which torch cannot do
        return (255 * resize(image / 255, size)).round_().to(torch.uint8)
    resized = F.interpolate(image[None], size=size, mode="bicubic", antialias=True)[0]
    return resized.clamp_(0, 1) if resized.is_floating_point() else resized  # bicubic overshoots
