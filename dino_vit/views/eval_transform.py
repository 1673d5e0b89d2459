"""The evaluation transform: an image is read, resized, cropped and normalised for a backbone."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from dino_vit.config.sections import Interpolation, ResizeMode
from dino_vit.core import Size, log
from dino_vit.data.image_set import ImageSet
from dino_vit.data.images.decode import read_given, read_image
from dino_vit.data.images.pixels import IMAGENET_NORMALISATION, RGB, Pixels, unit_scale
from dino_vit.models.backbone import Backbone

FAR = 2  # times the trained side, or a half of it, beyond which a size is said to be another


@dataclass(frozen=True, kw_only=True)
class EvalTransform:
    """The size, crop, pixels and normalisation of a backbone's images: `backbone(transform(image)[None])`."""

    size: Size
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resize_mode: ResizeMode = "crop"  # whole: resize to the size, ignoring the aspect ratio
    shorter_side: int | None = None  # of an image before the crop; None: 256/224 of the crop, as published
    interpolation: Interpolation = "bicubic"
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

    def read(self, source: ImageSet, index: int) -> Tensor:
        """Read an image of a source: (C, *size), uint8, or float32 from 0 to 1 if it is deeper."""
        return self.resize(read_image(source, index, self.pixels))

    def resize(self, image: Tensor) -> Tensor:
        """Resize and crop an image (C, H, W) of these pixels to the size."""
        resized, top, left = self._placement(*image.shape[1:])
        image = resize(image, resized, self.interpolation)
        return image[:, top : top + self.size[0], left : left + self.size[1]]

    def place_mask(self, mask: Tensor) -> Tensor:
        """Resize and crop the classes of pixels (H, W) as their image is, each pixel that of the nearest."""
        resized, top, left = self._placement(*mask.shape)
        return resize_mask(mask, resized)[top : top + self.size[0], left : left + self.size[1]]

    def resized_side(self, crop: int) -> int:
        """Return the side that an image is resized to before a side of the crop is cut out."""
        return self.shorter_side or crop + 2 * round(crop / 14)  # 256 for 224, as published

    def code(self) -> str | None:
        """Return lines of Python that prepare a photo by Pillow and NumPy alone, if these can do it."""
        mode, (h, w) = {1: "L", 3: "RGB"}.get(self.pixels.channels), self.size
        is_plain = self.pixels.bits == 8 and self.pixels.range is None
        if mode is None or not is_plain or (self.resize_mode == "crop" and h != w):
            return None
        kind = f"Image.Resampling.{self.interpolation.upper()}"
        lines = [f'photo = ImageOps.exif_transpose(Image.open("photo.jpg")).convert({mode!r})']
        if self.resize_mode == "whole":
            lines.append(f"photo = photo.resize(({w}, {h}), {kind})")
        else:
            sides = f"[{self.resized_side(h)} * side // min(photo.size) for side in photo.size]"
            lines += [
                f"photo = photo.resize({sides}, {kind})",
                f"left, top = (photo.width - {w}) // 2, (photo.height - {h}) // 2",
                f"photo = photo.crop((left, top, left + {w}, top + {h}))",
            ]
        mean, std = ([round(value, 6) for value in values] for values in (self.mean, self.std))
        lines += [
            f"pixels = np.asarray(photo).reshape({h}, {w}, {self.pixels.channels}) / 255",
            f"images = ((pixels - {mean}) / {std}).transpose(2, 0, 1)[None].astype(np.float32)",
        ]
        return "\n".join(["import numpy as np", "from PIL import Image, ImageOps", *lines])

    def _placement(self, height: int, width: int) -> tuple[Size, int, int]:
        """Return the size that an image is resized to, and the top left corner of the crop."""
        h, w = self.size
        if self.resize_mode == "whole":
            return self.size, 0, 0
        if height * w <= width * h:
            side = self.resized_side(h)
            resized = side, side * width // height
        else:
            side = self.resized_side(w)
            resized = side * height // width, side
        # Halves are rounded down as in transformers; torchvision rounds every second one up.
        return resized, (resized[0] - h) // 2, (resized[1] - w) // 2

    def normaliser(self, device: torch.device) -> Callable[[Tensor], Tensor]:
        """Return a function that normalises images from `read` on a device."""
        mean, std = (torch.tensor(values, device=device) for values in (self.mean, self.std))
        shift, scale = rearrange(mean, "c -> c 1 1"), rearrange(std, "c -> c 1 1")
        return lambda images: (unit_scale(images.to(device, non_blocking=True)) - shift) / scale


def eval_transform_of(
    model: Backbone, *, size: Size | None = None, resize_mode: ResizeMode | None = None, verbose: bool = True
) -> EvalTransform:
    """Return the transform stored with the weights of a backbone, by default that of ImageNet.

    `size` and `resize_mode` replace what is stored; `verbose` logs what is assumed and what is unusual.
    """
    origin = model.provenance
    mean, std = origin.mean, origin.std
    if mean is None or std is None:
        if model.channels != 3:
            raise ValueError(f"the weights contain no mean and std for images with {model.channels} channels")
        if verbose:
            log.info("the weights contain no mean and std; using those of ImageNet")
        mean, std = IMAGENET_NORMALISATION
    trained = origin.size or model.image_size
    size = size or trained
    model.grid_of(*size)  # raises if the size does not fit the patches
    if verbose:
        say_if_far(size, trained)
    stated = origin.preparation
    if size != trained or resize_mode == "whole":  # a side before the crop is that of the stated crop
        stated = {key: value for key, value in stated.items() if key != "shorter_side"}
    return EvalTransform(
        size=size,
        mean=tuple(mean),
        std=tuple(std),
        pixels=Pixels(channels=model.channels, bits=origin.bits or 8, range=origin.range),
        **{**stated, **({"resize_mode": resize_mode} if resize_mode else {})},
    )


def say_if_far(size: Size, trained: Size) -> None:
    """Warn if images of a size are far from those that a backbone was trained on."""
    ratio = math.sqrt(math.prod(size) / math.prod(trained))
    if not 1 / FAR <= ratio <= FAR:
        images, weights = (f"{height} × {width}" for height, width in (size, trained))
        log.warning(
            "images of %s pixels are far from the %s of the weights, which may give poor features",
            *(images, weights),
        )


def resize(image: Tensor, size: Size, interpolation: Interpolation = "bicubic") -> Tensor:
    """Resize (with antialias) an image (C, H, W) to (C, *size), ignoring its aspect ratio."""
    if image.shape[1:] == size:
        return image
    if tuple(size) == (1, 1) and image.dtype == torch.uint8:  # which torch cannot do
        return (255 * resize(image / 255, size, interpolation)).round_().to(torch.uint8)
    resized = F.interpolate(image[None], size=size, mode=interpolation, antialias=True)[0]
    return resized.clamp_(0, 1) if resized.is_floating_point() else resized  # bicubic overshoots


def resize_mask(mask: Tensor, size: Size) -> Tensor:
    """Resize the classes of pixels (H, W), each pixel that of the nearest."""
    return F.interpolate(mask[None, None].float(), size=size, mode="nearest-exact")[0, 0].to(mask.dtype)
