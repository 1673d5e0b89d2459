"""The measures of DAVIS: how well the objects of a video's frames are found (Perazzi et al., 2016).

n masks (H, W)
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BOUND = 0.008  # of the diagonal: how far a boundary may be from the true one


def region_similarity(predicted: Tensor, true: Tensor) -> Tensor:
    """Return J, Jaccard's index of masks (n, H, W) of bool; 1 where both are empty."""
    common, either = ((predicted & true).sum((1, 2)), (predicted | true).sum((1, 2)))
    return torch.where(either > 0, common / either.clamp_min(1), 1.0)


def boundary_accuracy(predicted: Tensor, true: Tensor) -> Tensor:
    """Return F, the harmonic mean of precision and recall of the boundaries of masks (n, H, W) of bool.

    A pixel of one boundary is right if the other boundary has one within 0.008 of the diagonal, rounded up.
    """
    radius = math.ceil(BOUND * math.hypot(*true.shape[1:]))
    found, wanted = boundaries(predicted), boundaries(true)
    box = _box((found | wanted).any(0))  # all that matters lies in it, and dilations take their time
    found, wanted = found[:, *box], wanted[:, *box]
    precision = _share(found & dilate(wanted, radius), found)
    recall = _share(wanted & dilate(found, radius), wanted)
    # DAVIS' values where a boundary is missing: nothing found is precise, nothing wanted is recalled.
    both = precision + recall
    return torch.where(both > 0, 2 * precision * recall / both.clamp_min(1e-12), 0.0)


def _box(marked: Tensor) -> tuple[slice, slice]:
    """Return the rows and columns from the first marked pixel to the last, or of one pixel without any."""
    y, x = torch.nonzero(marked, as_tuple=True)
    if not len(y):
        return slice(1), slice(1)
    return slice(int(y.min()), int(y.max()) + 1), slice(int(x.min()), int(x.max()) + 1)


def _share(right: Tensor, all_of: Tensor) -> Tensor:
    count = all_of.sum((1, 2))
    return torch.where(count > 0, right.sum((1, 2)) / count.clamp_min(1), 1.0)


def boundaries(masks: Tensor) -> Tensor:
    """Mark the pixels of masks (n, H, W) that differ from the next one to the right, below or across."""
    # The last row and column are repeated, so that nothing differs beyond the image.
    next_to = F.pad(masks[:, None].float(), (0, 1, 0, 1), mode="replicate")[:, 0].bool()
    right, below, across = next_to[:, :-1, 1:], next_to[:, 1:, :-1], next_to[:, 1:, 1:]
    return (masks ^ right) | (masks ^ below) | (masks ^ across)


def dilate(masks: Tensor, radius: int) -> Tensor:
    """Mark the pixels of masks (n, H, W) that are at most `radius` from a marked one.

    A disk is a stack of rows, so sums along the rows tell for each of its rows whether it has a marked pixel.
    """
    _, height, width = masks.shape
    sums = F.pad(masks.float().cumsum(2), (radius + 1, 0))
    sums = F.pad(sums, (0, radius), mode="replicate")
    near = torch.zeros_like(masks)
    for shift in range(min(radius, height - 1) + 1):
        reach = math.isqrt(radius**2 - shift**2)
        right, left = (sums[..., start : start + width] for start in (radius + reach + 1, radius - reach))
        row = right > left
        near[:, : height - shift] |= row[:, shift:]
        near[:, shift:] |= row[:, : height - shift]
    return near


class Statistics(NamedTuple):
    """A measure over the frames of a video, as DAVIS summarises it, in per cent."""

    mean: float
    recall: float  # share of the frames above a half
    decay: float  # mean of the first quarter of the frames less that of the last


def statistics(values: Tensor) -> Statistics:
    """Summarise a measure (frames,) of one object, from 0 to 1."""
    last = len(values) - 1
    # Quarters overlap by a frame, and a half is rounded up, as in DAVIS' own code.
    first, before = (math.floor(last * share + 0.5) for share in (0.25, 0.75))
    decay = values[: first + 1].mean() - values[before:].mean()
    recall = (values > 0.5).to(values.dtype).mean()
    return Statistics(*(100 * float(one) for one in (values.mean(), recall, decay)))


class Figures(NamedTuple):
    """What DAVIS reports of an object, or the mean of several, in per cent."""

    j: Statistics
    f: Statistics
    unmoved: float  # J&F of the first mask, had it been taken for each frame

    @property
    def j_and_f(self) -> float:
        """The mean of J and F."""
        return (self.j.mean + self.f.mean) / 2

    def to_json(self) -> dict[str, Any]:
        """Return them as plain values."""
        return {
            "j_and_f": self.j_and_f,
            "j": self.j._asdict(),
            "f": self.f._asdict(),
            "unmoved": self.unmoved,
        }


def measures(predicted: Tensor, true: Tensor, objects: Tensor, ignored: int | None = None) -> Tensor:
    """Return J and F of objects in a frame (objects, 2), by the values (H, W) of its pixels."""
    known = torch.ones_like(true, dtype=torch.bool) if ignored is None else true != ignored
    of_objects = [(values == objects[:, None, None]) & known for values in (predicted, true)]
    return torch.stack([region_similarity(*of_objects), boundary_accuracy(*of_objects)], dim=1)


def figures(measured: Tensor) -> Figures:
    """Summarise an object's J and F in each frame, and those of the first mask (frames, 4)."""
    return Figures(
        statistics(measured[:, 0]), statistics(measured[:, 1]), 100 * float(measured[:, 2:].mean())
    )


def mean_over_objects(of_objects: Sequence[Figures]) -> Figures:
    """Return the mean figures of some objects."""
    rows = [[*one.j, *one.f, one.unmoved] for one in of_objects]
    means = torch.tensor(rows, dtype=torch.double).mean(0).tolist()
    return Figures(Statistics(*means[:3]), Statistics(*means[3:6]), means[6])
