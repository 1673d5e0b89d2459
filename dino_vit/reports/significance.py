"""How sure it is that a share of images is so large, and that two shares of the same images differ."""

import math
from statistics import NormalDist

import torch
from torch import Tensor
from torch.distributions import Binomial

Z = NormalDist().inv_cdf(0.975)  # half the width of a 95 % confidence interval, in standard errors


def mcnemar(only_first: int, only_second: int) -> float:
    """Return the probability of so uneven a split of the images that only one of two gets right.

    McNemar's test in its exact form: if both were as good, each such image would fall to either with 1/2.
    """
    splits = Binomial(only_first + only_second, torch.tensor(0.5, dtype=torch.double), validate_args=False)
    fewer = torch.arange(min(only_first, only_second) + 1, dtype=torch.double)
    logs: Tensor = splits.log_prob(fewer)  # type: ignore[no-untyped-call]
    return min(1.0, 2 * float(logs.exp().sum()))


def wilson_interval(share: float, images: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of a share of images, which is valid near 0 and 1 too (1927)."""
    middle = (share + Z * Z / (2 * images)) / (1 + Z * Z / images)
    reach = Z / (1 + Z * Z / images) * math.sqrt(share * (1 - share) / images + (Z / (2 * images)) ** 2)
    # At the ends the bound is the share itself up to rounding.
    return 0.0 if share == 0 else middle - reach, 1.0 if share == 1 else middle + reach
