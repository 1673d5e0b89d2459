"""What the images of a source are, each looked at once: formats, sizes, channels, depths, values, damage."""

from __future__ import annotations

import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dino_vit.core.progress import progress
from dino_vit.data.images.decode import UnreadableImage, format_of
from dino_vit.data.images.pixels import MAX_PIXELS, Pixels
from dino_vit.data.sources.source import Source
from dino_vit.data.statistics import ImageInfo, inspect_image, moments


class Found(NamedTuple):
    """What is known of one image."""

    place: int  # in the source
    format: str
    size: int  # bytes of the file, 0 for an array
    digest: bytes
    sight: ImageInfo
    low: float
    high: float
    moments: Tensor | None  # (2, C): mean and mean square of values from 0 to 1, where they are


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What is known of some images of a source."""

    found: list[Found]
    unreadable: list[UnreadableImage]

    def count(self, key: Callable[[Found], str]) -> dict[str, int]:
        """Count images by something, most frequent first."""
        return dict(Counter(map(key, self.found)).most_common())

    def normalisation(self) -> tuple[list[float], list[float]] | None:
        """Return mean and std per channel of the most frequent channels, grey counting as RGB beside it."""
        channels = Counter(one.sight.channels for one in self.found)
        if not channels:
            return None
        wanted = 3 if channels[3] else channels.most_common(1)[0][0]
        usable = {wanted, 1} if wanted == 3 else {wanted}
        of_wanted = [one.moments for one in self.found if one.sight.channels in usable]
        moments = [m[:, :wanted].expand(2, wanted) for m in of_wanted if m is not None]
        if not moments:
            return None
        mean, square = torch.stack(moments).mean(dim=0)
        return mean.tolist(), (square - mean**2).clamp_min(0).sqrt().tolist()

    def identical(self) -> list[list[int]]:
        """Return the places of images that are the same byte for byte, a group each."""
        groups: defaultdict[bytes, list[int]] = defaultdict(list)
        for one in self.found:
            groups[one.digest].append(one.place)
        return [group for group in groups.values() if len(group) > 1]


def survey(source: Source, indices: Sequence[int], *, max_pixels: int = MAX_PIXELS) -> Survey:
    """Look at images by threads, with progress."""
    result = Survey(found=[], unreadable=[])
    with progress("Looking at images", len(indices)) as advance, ThreadPoolExecutor(os.cpu_count()) as pool:
        for one in pool.map(lambda index: _find(source, index, max_pixels), indices):
            advance(1)
            if isinstance(one, Found):
                result.found.append(one)
            else:
                result.unreadable.append(one)
    return result


def _find(source: Source, index: int, max_pixels: int) -> Found | UnreadableImage:
    name = source.name(index)
    try:
        item = source.read(index)
        sight, image = inspect_image(item, name, max_pixels=max_pixels)
    except UnreadableImage as error:
        return error
    except OSError as error:
        return UnreadableImage(name, error.strerror or str(error))
    data = item.contiguous().numpy().tobytes() if isinstance(item, Tensor) else item
    values = image.numpy()  # of which torch compares fewer types
    return Found(
        place=index,
        format="array" if isinstance(item, Tensor) else format_of(item),
        size=0 if isinstance(item, Tensor) else len(item),
        digest=hashlib.blake2b(data, digest_size=16).digest(),
        sight=sight,
        low=float(values.min()),
        high=float(values.max()),
        moments=_moments(image),
    )


def _moments(image: Tensor) -> Tensor | None:
    """Return mean and mean square per channel of an image from 0 to 1; None if its values lie elsewhere."""
    try:
        return moments(Pixels(channels=len(image), bits=16).conform(image))
    except ValueError:
        return None
