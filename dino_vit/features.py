"""Features of a set of images: read, resized, cropped and sent through a backbone, in the order asked for."""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from dino_vit.data.decode import UnreadableImage, read_image
from dino_vit.data.sources import Source
from dino_vit.views import Size
from dino_vit.vit import VisionTransformer

# Threads suffice: decoding and resampling hold no lock. More would crowd out the other processes.
_THREADS = min(8, os.cpu_count() or 1)
_Read = Future[Tensor | UnreadableImage]


@dataclass(frozen=True)
class Features:
    """Features (n, D) in float32, which images they are of, and those left out as they cannot be read."""

    values: Tensor
    indices: Tensor  # int64 (n,), on the device of the values
    unreadable: tuple[UnreadableImage, ...]


def extract_features(
    model: VisionTransformer,
    source: Source,
    indices: Sequence[int],
    *,
    size: Size,
    mean: Sequence[float],
    std: Sequence[float],
    batch_size: int,
    autocast: torch.dtype | None = None,
) -> Features:
    """Return the normalised CLS token of the last block for each image, on the model's device.

    Leaves the model as it was: the mode of each module, its gradients, every random state.
    """
    device = model.cls_token.device
    shift, scale = (rearrange(torch.tensor(values, device=device), "c -> c 1 1") for values in (mean, std))

    def class_tokens(images: Tensor) -> Tensor:
        normalised = (images.to(device) / 255 - shift) / scale
        return model.forward_features(normalised)[:, 0].float()

    nothing = torch.empty(0, model.width, device=device)
    with evaluating(model), torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
        return _collect(class_tokens, nothing, source, indices, size=size, batch_size=batch_size)


def pixel_features(source: Source, indices: Sequence[int], *, size: Size) -> Features:
    """Return the pixels themselves, in a row: what any features must be better than."""

    def pixels(images: Tensor) -> Tensor:
        return images.flatten(1).float()

    return _collect(pixels, torch.empty(0, 0), source, indices, size=size, batch_size=256)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch every module to evaluation and gradients off, then each back to the mode it was in."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():  # not inference_mode: what a module caches must serve training too
            yield
    finally:
        for module, training in modes.items():
            module.training = training


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
    if resized != (height, width):
        image = F.interpolate(image[None], size=resized, mode="bicubic", antialias=True)[0]
    top, left = round((resized[0] - h) / 2), round((resized[1] - w) / 2)
    return image[:, top : top + h, left : left + w]


def _collect(
    network: Callable[[Tensor], Tensor],
    nothing: Tensor,
    source: Source,
    indices: Sequence[int],
    *,
    size: Size,
    batch_size: int,
) -> Features:
    """Join the network's output for each batch; `nothing` is the output for no image at all."""
    values: list[Tensor] = []
    kept: list[int] = []
    unreadable: list[UnreadableImage] = []
    for batch in _read_batches(source, indices, size, batch_size):
        images = [image for _, image in batch if isinstance(image, Tensor)]
        kept += [index for index, image in batch if isinstance(image, Tensor)]
        unreadable += [image for _, image in batch if isinstance(image, UnreadableImage)]
        if images:
            values.append(network(torch.stack(images)))
    joined = torch.cat(values) if values else nothing
    return Features(joined, torch.tensor(kept, dtype=torch.long, device=joined.device), tuple(unreadable))


def _read_batches(
    source: Source, indices: Sequence[int], size: Size, batch_size: int
) -> Iterator[list[tuple[int, Tensor | UnreadableImage]]]:
    """Yield images with their indices, reading the next batch while the caller works on one."""
    ahead: deque[list[tuple[int, _Read]]] = deque()
    with ThreadPoolExecutor(_THREADS) as pool:
        for start in range(0, len(indices), batch_size):
            batch = indices[start : start + batch_size]
            ahead.append([(index, pool.submit(_read, source, index, size)) for index in batch])
            if len(ahead) > 1:
                yield [(index, image.result()) for index, image in ahead.popleft()]
        for last in ahead:
            yield [(index, image.result()) for index, image in last]


def _read(source: Source, index: int, size: Size) -> Tensor | UnreadableImage:
    try:
        return fit(read_image(source, index), size)
    except UnreadableImage as error:
        return error
