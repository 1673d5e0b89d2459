"""What is read of images: tokens of one backbone or of several side by side, as they are or levelled."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from dino_vit.data.image_set import ImageSet, evenly_spaced
from dino_vit.features.cache import cached_features
from dino_vit.features.frozen import FrozenBackbone
from dino_vit.models.backbone import CLS, Backbone, FeatureSpec
from dino_vit.models.classifiers import Levelling

LEVELLED = 0.5  # half-way between features as they are and white ones
FITTED_IMAGES = 20_000
RIDGE = 0.01  # of the mean variance, so that directions without any are not blown up


def levelled_spec(model: Backbone) -> FeatureSpec:
    """Return the tokens of the reading that runs are judged by: CLS and, with patches, 3 × 3 cells."""
    return FeatureSpec(tokens="cls+cells" if model.has_patches else "cls")


class Reading(NamedTuple):
    """Parts of an image's features that are read: as they are (`whiten` 0), levelled (0.5) or white (1)."""

    tokens: str
    whiten: float = 0.0

    def __str__(self) -> str:
        parts = self.tokens.replace("cls", "CLS").replace("mean", "mean patch").replace("+", " + ")
        return parts + (", levelled" if self.whiten else "")


def select_parts(features: Tensor, spec: FeatureSpec, model: Backbone, tokens: str) -> Tensor:
    """Return some parts (n, d) of features of a spec that has more."""
    found = dict(zip(spec.parts, torch.split(features, spec.widths(model), dim=1), strict=True))
    return torch.cat([found[part] for part in tokens.split("+")], dim=1)


def joined_features(
    frozen: FrozenBackbone,
    source: ImageSet,
    *,
    spec: FeatureSpec = CLS,
    title: str = "features",
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return the cached features of a backbone, and of those beside it, for the images that all can read."""
    specs = _with_specs(frozen, spec)
    found = [cached_features(each, source, spec=own, title=title) for each, own in specs]
    if len(found) == 1:
        return found[0]
    readable = reduce(np.intersect1d, [rows for _, rows in found])
    joined = np.concatenate([values[np.isin(rows, readable)] for values, rows in found], axis=1)
    return joined, found[0][1][np.isin(found[0][1], readable)]


def _with_specs(frozen: FrozenBackbone, spec: FeatureSpec) -> list[tuple[FrozenBackbone, FeatureSpec]]:
    """Return each backbone with its tokens; beside others, one without patches gives what it has."""
    if frozen.beside and spec.tokens in ("patches", "all"):
        raise ValueError(f"tokens={spec.tokens} are of one backbone; give weights without others beside them")
    if not frozen.beside:
        return [(frozen, spec)]
    return [
        (each, replace(spec, blocks=min(spec.blocks, each.model.depth)) if each.model.has_patches else CLS)
        for each in (frozen, *frozen.beside)
    ]


def fit_reading(
    frozen: FrozenBackbone, features: Tensor, spec: FeatureSpec, whiten: float
) -> Callable[[Tensor], Tensor]:
    """Return what makes a reading of features: levels them by these, or leaves them as they are.

    Those of several backbones are brought to unit length, so that each has the same say.
    """
    if not whiten and not frozen.beside:
        return nn.Identity()
    parts = [own.widths(each.model) for each, own in _with_specs(frozen, spec)]
    if whiten:
        return fit_levelling(features, [width for widths in parts for width in widths], whiten)
    sizes = [sum(widths) for widths in parts]
    return lambda values: torch.cat([*map(F.normalize, torch.split(values, sizes, dim=1))], dim=1)


def fit_levelling(
    features: Tensor, widths: Sequence[int], whiten: float = LEVELLED, images: int = FITTED_IMAGES
) -> Levelling:
    """Fit what brings each part of features (n, d) to unit length and level; at `whiten` 1 to white.

    On at most so many of the images, in float64, so that all processes get the same.
    """
    sample = features[evenly_spaced(len(features), images)]
    sample = (sample.cpu() if sample.device.type == "mps" else sample).double()  # which lacks float64
    mean = sample.mean(dim=0)
    matrices = [covariance_power(part, -whiten / 2) for part in torch.split(sample - mean, [*widths], dim=1)]
    return Levelling(mean.float(), [matrix.float() for matrix in matrices]).to(features.device)


def covariance_power(centred: Tensor, power: float) -> Tensor:
    """Return (C + ridge · 1) ** power, where C is the covariance of centred features (n, d)."""
    count, width = centred.shape
    ridge = (RIDGE * centred.square().mean()).clamp(min=1e-12)
    small = (centred.T @ centred if width <= count else centred @ centred.T) / count
    variances, axes = torch.linalg.eigh(small)
    variances = variances.clamp(min=1e-12 * ridge)
    if width > count:  # along all axes but these there is no variance
        axes = centred.T @ axes / (count * variances).sqrt()
    elsewhere = ridge**power
    scales = (variances + ridge) ** power - elsewhere
    return (axes * scales) @ axes.T + elsewhere * torch.eye(width, dtype=axes.dtype, device=axes.device)
