"""RankMe: how many directions features really use, a figure that needs no labels."""

import torch
from torch import Tensor


def rankme(features: Tensor) -> float:
    """Return the effective rank, exp(entropy of the singular values over their sum), from 1 to the width."""
    singular = torch.linalg.svdvals(features.cpu().double())  # the host has float64 everywhere
    shares = singular / singular.sum().clamp(min=torch.finfo(torch.float64).tiny)
    return float(torch.special.entr(shares).sum().exp())
