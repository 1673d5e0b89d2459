"""Convert images to the same channels, depth and scale."""

from dataclasses import dataclass
from math import inf
from typing import Literal

import torch
from torch import Tensor

MAX_PIXELS = 200_000_000  # of an image
NOT_FINITE = "it contains infinite or NaN values; replace them first"
IMAGENET_NORMALISATION = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # mean and std of RGB


@dataclass(frozen=True, kw_only=True)
class Pixels:
    """The channels, depth and scale that images are converted to, and the largest size to decode.

    - Channels: grey is repeated to RGB; an alpha channel is dropped unless `channels` is 2 or 4. Any other
      conversion is an error.
    - Depth: `bits` 8 gives uint8, 16 gives float32 in [0, 1].
    - Scale: `range` holds the values that become 0 and 1; values beyond are clipped. The default is 0 and the
      largest value of the type (1 for floating point); values beyond are an error. Integers of 32 and
      64 bits, which lists become, go to the largest value of so many `bits`: 255 or 65,535.

    An error is a ValueError, and makes an image unreadable.
    """

    channels: int = 3
    bits: Literal[8, 16] = 8
    range: tuple[float, float] | None = None
    max_pixels: int = MAX_PIXELS  # height × width, for up to four channels

    @property
    def keeps_alpha(self) -> bool:
        """Tell whether an alpha channel is one of the channels."""
        return self.channels in (2, 4)

    def conform(self, image: Tensor) -> Tensor:
        """Return an image (C, H, W) of any type as uint8 or as float32 in [0, 1], as `bits` says."""
        image = self.with_channels(image)
        if image.dtype == torch.uint8 and self.bits == 8 and self.range is None:
            return image
        low, high = self._ends(image)
        is_narrow = image.dtype.itemsize <= 2 or image.dtype == torch.float32  # all its values are a float32
        values = image.to(torch.float32 if is_narrow else torch.float64, copy=True)
        lowest, highest = (float(value) for value in values.aminmax())
        if not -inf < lowest <= highest < inf:
            raise ValueError(NOT_FINITE)
        if self.range is None and (lowest < low or highest > high):
            kind = str(image.dtype).removeprefix("torch.")
            raise ValueError(
                f"its {kind} values go from {lowest:g} to {highest:g}, beyond {low:g} to {high:g}; "
                "set data.range=[low, high], the values that become 0 and 1"
            )
        scaled = values.sub_(low).div_(high - low).clamp_(0, 1)
        return (scaled.mul_(255).round_() if self.bits == 8 else scaled).to(self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of converted images."""
        return torch.uint8 if self.bits == 8 else torch.float32

    def with_channels(self, image: Tensor) -> Tensor:
        """Return an image with the wanted channels, or raise an error if it has others."""
        if image.ndim != 3 or not image.numel():
            raise ValueError(f"an array of shape {tuple(image.shape)} is not an image: (C, H, W)")
        if len(image) == 1 and self.channels == 3:
            return image.expand(3, -1, -1).contiguous()
        if len(image) != self.channels:
            raise ValueError(f"the number of channels is {len(image)}, but must be {self.channels}")
        return image

    def _ends(self, image: Tensor) -> tuple[float, float]:
        """Return the values that become 0 and 1: a function of the type, never of the values of one image."""
        if self.range:
            if image.dtype == torch.uint8 and self.range[1] > 255:
                low, high = self.range
                raise ValueError(f"its 8 bits cannot reach data.range=[{low:g}, {high:g}]; use one depth")
            return self.range
        if image.dtype.is_floating_point or image.dtype == torch.bool:
            return 0.0, 1.0
        if image.dtype.itemsize <= 2:
            return 0.0, float(torch.iinfo(image.dtype).max)
        return 0.0, float(2**self.bits - 1)


RGB = Pixels()


def unit_scale(images: Tensor) -> Tensor:
    """Return the output of `conform` as new float32 values in [0, 1]."""
    return images / 255 if images.dtype == torch.uint8 else images.to(torch.float32, copy=True)
