"""From the bytes of a file to a uint8 tensor (C, H, W).

Calls torchvision's decoder below its Python function, which since 0.29 warns at every call that torchcodec
shall replace it one day. Pillow decodes to the same pixels, but takes a third longer.
"""

import torch
from torch import Tensor
from torchvision.io import ImageReadMode

from dino_vit.data.sources import Source


class UnreadableImage(Exception):
    """An image that cannot be read, with its name and the reason."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name = name
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def decode(data: bytes, name: str) -> Tensor:
    """Decode an image file to RGB, turned upright as EXIF says; of an animation the first frame."""
    if not data:
        raise UnreadableImage(name, "the file is empty")
    try:
        encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        image: Tensor = torch.ops.image.decode_image(encoded, ImageReadMode.RGB.value, True)  # True: EXIF
    except (RuntimeError, ValueError) as error:
        raise UnreadableImage(name, str(error).partition("\n")[0]) from error
    if image.dtype != torch.uint8:
        raise UnreadableImage(name, f"{image.dtype} pixels; only 8 bits a channel are read")
    if image.ndim == 4:
        image = image[0]
    if not image.numel():
        raise UnreadableImage(name, "the image has no pixels")
    return image


def read_image(source: Source, index: int) -> Tensor:
    """Return item `index` of a source as a uint8 tensor (C, H, W)."""
    try:
        item = source.read(index)
    except OSError as error:
        raise UnreadableImage(source.name(index), error.strerror or str(error)) from error
    return item if isinstance(item, Tensor) else decode(item, source.name(index))
