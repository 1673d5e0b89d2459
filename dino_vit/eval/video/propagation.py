"""Carry the masks of a video's first frame through the others, by the similarity of patches.

The protocol with which Caron et al. (2021) judge DINO on DAVIS 2017, after Jabri et al. (2020). On the same
features (random ones of 4 frames, radius 3 and 12) labels equal those of their `label_propagation` to 5e-7.

C classes, (h, w) patches, d channels
"""

from collections import deque
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from dino_vit.core.sizes import Size

TILE = 16  # rows and columns of the patches that are labelled together
SIMILARITIES = 1 << 23  # held at a time, at most


def propagate_labels(
    target: Tensor,
    sources: Sequence[Tensor],
    labels: Sequence[Tensor],
    *,
    radius: int,
    k: int,
    temperature: float,
) -> Tensor:
    """Return soft labels (C, h, w) for the patches of a frame from those of other frames.

    Each patch takes the mean label of the k patches with the largest cosine, among those at most `radius`
    rows and columns away in any of the frames, weighted by exp(cosine / temperature). Patches as near as the
    k-th count as well. Features (h, w, d) are L2-normalised.
    """
    height, width, _ = target.shape
    found = target.new_empty(len(labels[0]), height, width)
    for y, x in product(_parts(height), _parts(width)):
        near_y, near_x = _around(y, height, radius), _around(x, width, radius)
        tile, around = _slices(y, x), _slices(near_y, near_x)
        keys = torch.cat([source[around].flatten(0, 1) for source in sources])
        values = torch.cat([label[:, *around].flatten(1) for label in labels], dim=1)  # (C, keys)
        in_rows, in_columns = (
            _within(part, near, radius, target.device) for part, near in ((y, near_y), (x, near_x))
        )
        allowed = (in_rows[:, None, :, None] & in_columns[None, :, None, :]).flatten(2).flatten(0, 1)
        parts, size = [], max(1, SIMILARITIES // len(keys))
        queries = target[tile].flatten(0, 1)
        for part, within in zip(torch.split(queries, size), torch.split(allowed, size), strict=True):
            cosines = (part @ keys.T).masked_fill_(~within.repeat(1, len(sources)), -torch.inf)
            kth = cosines.topk(min(k, len(keys)), dim=1).values[:, -1:]
            weights = cosines.masked_fill_(cosines < kth, -torch.inf).div_(temperature).softmax(1)
            parts.append(values @ weights.T)
        found[:, *tile] = rearrange(torch.cat(parts, dim=1), "c (y x) -> c y x", y=len(y))
    return found


def _parts(length: int) -> list[range]:
    return [range(length)[start : start + TILE] for start in range(0, length, TILE)]


def _around(part: range, length: int, radius: int) -> range:
    return range(max(0, part.start - radius), min(length, part.stop + radius))


def _slices(y: range, x: range) -> tuple[slice, slice]:
    return slice(y.start, y.stop), slice(x.start, x.stop)


def _within(part: range, near: range, radius: int, device: torch.device) -> Tensor:
    ours, theirs = (torch.arange(one.start, one.stop, device=device) for one in (part, near))
    return (ours[:, None] - theirs).abs() <= radius


class Propagation:
    """Label frames in order, by the first frame and the last few."""

    def __init__(self, features: Tensor, labels: Tensor, *, last_frames: int, **how: Any) -> None:
        """Begin with features and labels of the first frame; `how` is given to `propagate_labels`."""
        self._first, self._how = (features, labels), how
        self._last: deque[tuple[Tensor, Tensor]] = deque(maxlen=last_frames)

    def label(self, features: Tensor) -> Tensor:
        """Return the soft labels (C, h, w) of the next frame by its features (h, w, d)."""
        sources, labels = zip(self._first, *self._last, strict=True)
        found = propagate_labels(features, sources, labels, **self._how)
        self._last.append((features, found))
        return found


def patch_labels(mask: Tensor, values: Tensor, grid: Size) -> Tensor:
    """Return the class of each patch's centre, one-hot (C, h, w), of a mask (H, W) with these values."""
    nearest = F.interpolate(mask[None, None].float(), size=grid, mode="nearest-exact")[0, 0]
    return (nearest == values[:, None, None]).float()


def classes_of_pixels(labels: Tensor, resized: Size, size: Size) -> Tensor:
    """Return the index of the class of every pixel of a frame (H, W), by soft labels of patches.

    As published: enlarged bilinearly to the size that the network saw, the values of each class scaled to go
    from 0 to 1, and the largest brought to the size of the frame, each pixel that of the nearest.
    """
    scores = F.interpolate(labels[None], size=resized, mode="bilinear")[0]
    low, high = scores.amin((1, 2), keepdim=True), scores.amax((1, 2), keepdim=True)
    # A class that is everywhere or nowhere stays as it is: scaling would make its rounding errors count.
    best = torch.where(high - low > 1e-6, (scores - low) / (high - low), scores).argmax(0)
    return F.interpolate(best[None, None].float(), size=size, mode="nearest-exact")[0, 0].long()


def frame_size(size: Size, shorter: int, patch: Size, *, published: bool = False) -> Size:
    """Return the size of a frame whose shorter side is resized to `shorter`, both cut to whole patches.

    The published code cuts the longer side to a multiple of 64: DAVIS' 480 × 854 become 480 × 832.
    """
    factor = shorter / min(size)
    sides = []
    for side, step in zip(size, patch, strict=True):
        wanted = round(side * factor)
        if published and wanted > shorter and not 64 % step:
            step = 64
        sides.append(max(step, wanted // step * step))
    return sides[0], sides[1]
