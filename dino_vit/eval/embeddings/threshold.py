"""Choose the cosine above which two images count as copies, by the features at hand.

Mild copies of some images are made: cropped, re-encoded and reduced, as copies on a disk are. A threshold
should let them pass, and no image that is merely similar to another one.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import simplejpeg
import torch
from einops import rearrange
from torch import Tensor

from dino_vit.core.randomness import RngPurpose, random_uniform
from dino_vit.core.text import progress
from dino_vit.data.image_set import ImageSet, spread
from dino_vit.data.images.decode import read_image
from dino_vit.eval.embeddings.embed import Array, Embeddings
from dino_vit.eval.features import FrozenBackbone
from dino_vit.eval.neighbours import nearest, unit
from dino_vit.eval.reading import in_batches
from dino_vit.views.eval_transform import EvalTransform, resize

COPIED, COMPARED = 200, 2000  # images of which copies are made, and the nearest other image is found
CROP, QUALITY, SCALE = 0.95, 60, 0.8  # share of a side that is kept, of JPEG, and times a side
COPIES = 0.1  # the share of images that are expected to have a copy
LEAST = 0.1  # copies that must pass, as the share of fewer is mostly noise
MOST_REAL = 0.5  # images that may have a real copy: more cannot be told from features that say nothing
TOLD = 0.5  # if fewer copies pass, the features do not tell them from other images
FIXED = 0.95  # where the features cannot be computed again


@dataclass(frozen=True)
class Threshold:
    """The cosine of a copy, and how it was chosen."""

    value: float
    origin: Literal["given", "features", "fixed"]
    copies: float = math.nan  # the share of mild copies that pass, of the features
    others: float = math.nan  # the share of images with another image that passes, be it a copy or not

    @property
    def is_weak(self) -> bool:
        """Whether the features do not tell copies from similar images."""
        return self.origin == "features" and not (self.copies >= TOLD and self.others <= MOST_REAL)

    def to_json(self) -> dict[str, Any]:
        """Return how it was chosen, for the JSON file."""
        shares = {"copies_that_pass": self.copies, "images_near_another": self.others}
        return {"by": self.origin, **(shares if self.origin == "features" else {})}

    def __str__(self) -> str:
        """Return how it was chosen, for a person."""
        if self.origin == "given":
            return f"threshold={self.value:g}, as given"
        if self.origin == "fixed":
            return f"threshold={self.value:g}, which is not chosen for these features"
        return (
            f"threshold={self.value:g}, chosen for these features: {100 * self.copies:.0f} % of mild "
            f"copies pass it, and {100 * self.others:.1f} % of the images have another image above it"
        )


@dataclass(frozen=True, kw_only=True)
class CopyTransform(EvalTransform):
    """Prepare a copy of an image in the place of it."""

    alter: Callable[[Tensor, int], Tensor]  # the image and its index

    def read(self, source: ImageSet, index: int) -> Tensor:
        return self.resize(self.alter(read_image(source, index, self.pixels), index))


def crop(image: Tensor, index: int) -> Tensor:
    """Cut an image at a place that depends on its index."""
    places = random_uniform(0, RngPurpose.EVALUATION, index, np.arange(2))
    (top, height), (left, width) = (
        (int(place * (side + 1 - (kept := max(1, round(CROP * side))))), kept)
        for place, side in zip(places.tolist(), image.shape[1:], strict=True)
    )
    return image[:, top : top + height, left : left + width]


def reduce(image: Tensor, index: int) -> Tensor:
    """Reduce an image."""
    height, width = (max(1, round(SCALE * side)) for side in image.shape[1:])
    return resize(image, (height, width))


def recompress(image: Tensor, index: int) -> Tensor:
    """Encode an image of bytes as JPEG, which has grey and RGB only, and decode it."""
    space = {1: "GRAY", 3: "RGB"}[len(image)]
    pixels = rearrange(image, "c h w -> h w c").contiguous().numpy()
    data = simplejpeg.encode_jpeg(pixels, quality=QUALITY, colorspace=space, colorsubsampling="420")
    return rearrange(torch.from_numpy(simplejpeg.decode_jpeg(data, space)), "h w c -> c h w")


def choose_threshold(embeddings: Embeddings, frozen: FrozenBackbone) -> Threshold:
    """Return the threshold that tells mild copies from other images the best (`best_threshold`)."""
    rows = spread(len(embeddings.names), COPIED)
    copies = cosines_of_copies(embeddings, frozen, rows)
    others = cosines_of_others(embeddings.values, frozen.device)
    value = best_threshold(copies, others)
    shares = ((cosines >= value).float().mean().item() for cosines in (copies, others))
    return Threshold(value, "features", *shares)


def cosines_of_copies(embeddings: Embeddings, frozen: FrozenBackbone, rows: Sequence[int]) -> Tensor:
    """Return the cosines of images with their copies, of each kind."""
    source, spec = embeddings.open_source(), embeddings.spec
    row_of = {index: row for row, index in embeddings.indices_in(source, rows).items()}
    if not row_of:
        raise ValueError("none of the embedded images is there any more")
    pixels, parts = frozen.transform.pixels, list[Tensor]()
    compressible = pixels.bits == 8 and pixels.range is None and pixels.channels in (1, 3)
    kinds = [crop, reduce, *([recompress] if compressible else [])]
    with progress("Comparing images with copies of them", len(kinds) * len(row_of)) as advance:
        for alter in kinds:
            copying = replace(frozen, transform=CopyTransform(**vars(frozen.transform), alter=alter))
            for batch in copying.features(source, in_batches(list(row_of), frozen.batch_size), spec):
                kept = [row_of[index] for index in batch.indices.tolist()]
                originals = unit(torch.as_tensor(embeddings.values[kept], device=frozen.device))
                parts.append((unit(batch.values) * originals).sum(1).cpu())
                advance(len(kept))
    if not (cosines := torch.cat(parts)).numel():
        raise ValueError("none of the embedded images can be read any more")
    return cosines


def cosines_of_others(values: Array, device: torch.device) -> Tensor:
    """Return the cosine of images with the nearest other image, of some images."""
    rows = torch.tensor(spread(len(values), COMPARED))
    queries = torch.as_tensor(values[rows.numpy()], device=device)
    cosines, found = nearest(values, queries, k=2)
    itself = found == rearrange(rows.to(found.device), "q -> q 1")
    return cosines.masked_fill(itself, -1).amax(1).cpu()


def best_threshold(copies: Tensor, others: Tensor) -> float:
    """Return the cosine with the fewest mistakes, missed copies and false alarms, if COPIES is right.

    Some of the nearest other images are real copies, and so no false alarms: as many as make their share, at
    every cosine that most copies pass, no less than that of the copies that were made.
    """
    cosines = torch.unique(torch.cat([copies, others]))
    passing, alarms = (
        1 - torch.searchsorted(each.sort().values, cosines) / len(each) for each in (copies, others)
    )
    enough = passing >= LEAST
    real = min((alarms / passing)[passing >= TOLD].min().item(), MOST_REAL)
    mistakes = COPIES * (1 - passing) + (alarms - real * passing)
    best = cosines[enough][mistakes[enough].argmin()].item()
    return math.floor(1e4 * best) / 1e4
