"""One vector per image to search with: at one scale or several, whitened or not."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dino_vit.data.sources.open import Source
from dino_vit.eval.features.extraction import FeatureSpec
from dino_vit.eval.features.frozen import FrozenBackbone
from dino_vit.eval.retrieval.whitening import Whitening

_ROWS = 16_384  # whitened at a time


def descriptors(
    frozen: FrozenBackbone,
    source: Source,
    indices: Sequence[int] | None,
    *,
    spec: FeatureSpec,
    scales: Sequence[float],
    title: str,
) -> tuple[Tensor, NDArray[np.int64]]:
    """Return a vector of each readable image, and their indices: the mean of the features at all scales.

    The scales are cached apart. Each image is resized from its own pixels; in the 2021 code the input of the
    network is. A scaled size is rounded to whole patches.
    """
    size, patch = frozen.preparation.size, frozen.model.patch_size
    total: Tensor | None = None
    for scale in scales:
        scaled = tuple(max(1, round(a * scale / p)) * p for a, p in zip(size, patch, strict=True))
        preparation = replace(frozen.preparation, size=(size if scale == 1 else (scaled[0], scaled[1])))
        at_scale = title if len(scales) == 1 else f"{title}, scale {scale:.3g}"
        stored = replace(frozen, preparation=preparation).features(
            source, spec=spec, indices=indices, title=at_scale
        )
        values = torch.from_numpy(stored.values)
        total = values if total is None else total + values
    assert total is not None
    return (total if len(scales) == 1 else total / len(scales)), stored.indices


def whitened(features: Tensor, whitening: Whitening) -> Tensor:
    """Return features whitened in blocks, where they were."""
    blocks = (features[start : start + _ROWS] for start in range(0, len(features), _ROWS))
    return torch.cat([whitening(rows).to(features.device) for rows in blocks])
