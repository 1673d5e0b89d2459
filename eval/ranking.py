"""Average precision of a ranking, as published with retrieval of places and of copies."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def trapezoid_precision(ranks: NDArray[np.int64], relevant: int) -> float:
    """Return the area below the line through (recall, precision), which starts at precision 1.

    As published with Oxford and Paris, and with Copydays: by the ranks, from 0, of the relevant images.
    """
    place = np.arange(len(ranks))
    before = np.where(ranks == 0, 1.0, place / np.maximum(ranks, 1))
    return float(((before + (place + 1) / (ranks + 1)) / 2).sum() / relevant)


def micro_average_precision(cosines: Tensor, truth: Tensor) -> float:
    """Return the average precision of all pairs in one ranking; of equal cosines the wrong one is earlier."""
    order = (cosines.double() - 1e-12 * truth).flatten().argsort(descending=True, stable=True)
    relevant = truth.flatten()[order].double()
    precision = relevant.cumsum(0) / torch.arange(1, len(relevant) + 1)
    return float((precision * relevant).sum() / relevant.sum())
