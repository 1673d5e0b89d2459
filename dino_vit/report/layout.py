"""Places of features on a plane: their two widest directions and, if scikit-learn is there, t-SNE."""

from __future__ import annotations

import logging
from importlib.util import find_spec

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

log = logging.getLogger("dino_vit")

Places = NDArray[np.float32]  # (n, 2)

TINY = 1e-30
PERPLEXITY = 30  # neighbours that t-SNE tries to keep about every image
FEWEST = 8  # images below which keeping neighbours means nothing


def pca(features: Tensor) -> Places:
    """Return the two widest directions of features (n, d), with signs that do not depend on the machine."""
    centred = features.double() - features.double().mean(dim=0)
    _, directions = torch.linalg.eigh(centred.T @ centred)
    places = centred @ directions[:, -2:].flip(1)
    signs = places.gather(0, places.abs().argmax(dim=0, keepdim=True)).sign()
    return (places * signs).float().numpy()


def keeping_neighbours(features: Tensor) -> Places | str:
    """Return the t-SNE of features (n, d) of unit length, or why there is none."""
    if len(features) < FEWEST:
        return f"a map that keeps neighbours needs {FEWEST} images or more"
    if find_spec("sklearn") is None:
        return "for a map that keeps neighbours, run `pip install scikit-learn` and make the report again"
    from sklearn.manifold import TSNE

    log.info("placing %d images with t-SNE ...", len(features))
    start = pca(features)
    start *= 1e-4 / max(float(start.std()), TINY)  # as small as its authors advise
    tsne = TSNE(perplexity=min(PERPLEXITY, (len(features) - 1) / 3), init=start, random_state=0)
    places: Places = tsne.fit_transform(features.numpy())
    return places


def quantised(places: Places) -> NDArray[np.uint16]:
    """Return places on a grid of 65536 x 65536, with the aspect of the map kept."""
    low, high = places.min(axis=0), places.max(axis=0)
    span = max(float((high - low).max()), TINY)
    centred = (places - (low + high) / 2) / span + 0.5
    return np.rint(np.clip(centred, 0, 1) * 65535).astype(np.uint16)
