"""The map of a run's images: features, places in the plane, neighbours, clusters, thumbnails, attention.

n images, d features, y x rows and columns of patches
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from dino_vit.core.progress import progress
from dino_vit.core.randomness import RngPurpose, random_bits
from dino_vit.data.sources.open import Source
from dino_vit.eval.features.extraction import Extraction, in_batches
from dino_vit.eval.knn.neighbours import nearest
from dino_vit.eval.pictures import as_picture
from dino_vit.report.layout import Places, keeping_neighbours, pca, quantised
from dino_vit.report.network import BATCH, Teacher
from dino_vit.report.pictures import THUMBNAILS, Atlas, atlas, packed, resized, within

T = TypeVar("T")

NEIGHBOURS = 12
MOST_IMAGES = 6000
# What of a page of 5 MB is for all names, for thumbnails as text, and for attention before it becomes text,
# a third longer. The rest is for curves, sheets, and what each image needs beside.
NAME_BYTES, THUMBNAIL_BYTES, ATTENTION_BYTES = 350_000, 2_400_000, 400_000
LONGEST_NAME = 120
FINEST_ATTENTION = 16  # rows of an attention map in the page


@dataclass(frozen=True, kw_only=True)
class Explored:
    """Images of a source as a teacher sees them; rows belong together."""

    indices: list[int]
    names: list[str]
    labels: list[int | None]
    classes: dict[int, str]  # names of the labels that occur
    features: Tensor  # (n, d) of unit length
    clusters: Tensor  # (n,)
    neighbours: Tensor  # (n, k) rows, the nearest first
    similarities: Tensor  # (n, k) cosines
    layouts: dict[str, Places]
    missing_layout: str
    thumbnails: Atlas
    attention: NDArray[np.uint8]  # (n, y, x), 255 where a map is brightest
    unreadable: int


def chosen(source: Source, count: int, seed: int) -> list[int]:
    """Return the images that online evaluation looks at first: any, in an order that the seed gives."""
    bits = random_bits(seed, RngPurpose.EVALUATION, np.arange(len(source)))
    order: list[int] = np.argsort(bits, kind="stable")[:count].tolist()
    return order


def explore(teacher: Teacher, source: Source, indices: list[int]) -> Explored:
    """Look at images with a teacher."""
    extraction = Extraction(teacher.backbone, source, preparation=teacher.preparation)
    found = list(_counted("Computing features", extraction(in_batches(indices, BATCH)), len(indices)))
    kept = [index for part in found for index in part.indices.tolist()]
    if len(kept) < 3:
        raise ValueError(f"{len(kept)} of {len(indices)} images can be read, and a map needs three")
    values = torch.cat([part.values for part in found])
    features = F.normalize(values.float().cpu(), dim=-1)
    cosines, rows = nearest(features, features, k=min(NEIGHBOURS, len(kept) - 1), own=0)
    layouts, missing = {"PCA": pca(features)}, ""
    places = keeping_neighbours(features)
    if isinstance(places, str):
        missing = places
    else:
        layouts = {"t-SNE": places, **layouts}
    looked = list(_counted("Drawing images and attention", _look(teacher, source, kept), len(kept)))
    labels = [source.label(index) for index in kept]
    return Explored(
        indices=kept,
        names=[shortened(source.name(index), NAME_BYTES // len(kept)) for index in kept],
        labels=labels,
        classes=label_names(source, labels),
        features=features,
        clusters=teacher.clusters(values),
        neighbours=rows,
        similarities=cosines,
        layouts=layouts,
        missing_layout=missing,
        thumbnails=atlas(torch.cat([thumbnails for thumbnails, _ in looked]), THUMBNAIL_BYTES),
        attention=_compact(torch.cat([maps for _, maps in looked])),
        unreadable=sum(len(part.unreadable) for part in found),
    )


def shortened(name: str, length: int = LONGEST_NAME) -> str:
    """Return a name that a page has room for; its end tells more than its beginning."""
    length = min(length, LONGEST_NAME)
    return name if len(name) <= length else f"…{name[1 - length :]}"


def label_names(source: Source, labels: list[int | None]) -> dict[int, str]:
    """Return what the labels that occur are called."""
    names = source.classes
    return {label: names[label] for label in sorted({label for label in labels if label is not None})}


def _counted(what: str, parts: Iterable[T], total: int) -> Iterator[T]:
    """Pass on parts of a batch each, and show how far they have come."""
    with progress(what, total) as advance:
        for number, part in enumerate(parts):
            yield part
            advance(min(BATCH, total - number * BATCH))


def _look(teacher: Teacher, source: Source, indices: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield thumbnails (uint8) and attention (mean of the heads) of a few images at a time."""
    for start in range(0, len(indices), BATCH):
        images = [teacher.preparation.read(source, index) for index in indices[start : start + BATCH]]
        maps = teacher.attention(torch.stack(images)).mean(dim=1)
        size = within(teacher.preparation.size, THUMBNAILS[0][0])
        yield torch.stack([resized(as_picture(image), size) for image in images]), maps


def _compact(maps: Tensor) -> NDArray[np.uint8]:
    """Return maps (n, y, x) as bytes, averaged over neighbouring patches if they are too many for a page."""
    rows = min(FINEST_ATTENTION, max(2, math.isqrt(ATTENTION_BYTES // len(maps))))
    size = (min(rows, maps.shape[-2]), min(rows, maps.shape[-1]))
    smaller = F.adaptive_avg_pool2d(maps[:, None].float(), size)[:, 0]
    scaled = smaller / smaller.amax(dim=(-2, -1), keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    return (255 * scaled).round().to(torch.uint8).numpy()


def page_data(explored: Explored) -> dict[str, Any]:
    """Return what the page's map is drawn from, as JSON."""
    places = explored.thumbnails
    order = list(explored.classes)
    labels = [-1 if label is None else order.index(label) for label in explored.labels]
    count, k = explored.neighbours.shape
    return {
        "count": count,
        "names": explored.names,
        "classes": list(explored.classes.values()),
        "labels": labels,
        "clusters": explored.clusters.tolist(),
        "layouts": [
            {"name": name, "places": packed(quantised(where))} for name, where in explored.layouts.items()
        ],
        "k": k,
        "neighbours": packed(explored.neighbours.numpy().astype(np.uint16)),
        "similarities": packed((explored.similarities.clamp(0, 1) * 65535).round().numpy().astype(np.uint16)),
        "thumbnails": {"uri": places.uri, "columns": places.columns, "size": places.size},
        "attention": {"maps": packed(explored.attention), "size": explored.attention.shape[1:]},
    }
