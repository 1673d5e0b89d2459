"""What stands out in an image: a mask, by the tokens of its patches and then by its colours.

y x: rows and columns of patches; d channels
"""

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from dino_vit.core import Size, height_width
from dino_vit.views.pictures import enlarge

CUT_SIDE = 32  # patches along a side of what is cut into object and background, at most
CUT_SHARE = 1 / 7  # of the standard deviation of all similarities: what counts as alike
UNLIKE = 1e-5  # how near patches are that are not alike, so that all hang together
ROUNDS = 3  # of colours by the mask, and of the mask by colours
NOISE = 25.0  # variance of a colour of 0 to 255 that is there in any case
MOST = 5.0  # that the colour of one pixel says for a side, as a difference of logarithms


def object_mask(tokens: Tensor, picture: Tensor, patch: Size) -> Tensor:
    """Mark the pixels of an object in a picture (3, H, W), by the tokens of its patches (y, x, d).

    Patches are coarse, and those without structure tell little. So the colours of both parts of their cut,
    as normal distributions, say of each pixel and those around it to which part it belongs. The object is
    the part with less border.
    """
    size = height_width(picture.shape[-2:])
    mask = enlarge(cut(tokens), size, patch) > 0
    colours, around = rearrange(picture.double(), "c y x -> (y x) c"), [side | 1 for side in patch]
    for _ in range(ROUNDS):
        if not 0 < mask.sum() < mask.numel():
            break
        inside, outside = (_log_density(colours, colours[side.flatten()]) for side in (mask, ~mask))
        found = (inside - outside).clamp(-MOST, MOST).view(1, 1, *size)
        mask = F.avg_pool2d(found, around, 1, [side // 2 for side in around])[0, 0] > 0
    border = torch.ones_like(mask)
    border[1:-1, 1:-1] = False
    return ~mask if mask[border].double().mean() > 0.5 else mask


def _log_density(colours: Tensor, of: Tensor) -> Tensor:
    """Return the log density of colours (n, 3) by the normal distribution of some, but for a constant."""
    spread = of.T.cov(correction=0) + NOISE * torch.eye(3, dtype=of.dtype)
    apart = colours - of.mean(dim=0)
    return -((apart @ spread.inverse() * apart).sum(dim=1) + spread.logdet()) / 2


def cut(tokens: Tensor) -> Tensor:
    """Cut an image in two by the tokens of its patches (y, x, d), and mark one part (y, x).

    The normalised cut of Shi and Malik (2000) separates few of those that are alike, as in TokenCut (Wang
    et al., 2022).
    """
    height, width = tokens.shape[:2]
    channels = rearrange(tokens.double(), "y x d -> 1 d y x")
    small = F.adaptive_avg_pool2d(channels, (min(height, CUT_SIDE), min(width, CUT_SIDE)))[0]
    units = F.normalize(small.flatten(1), dim=0)
    cosines = units.T @ units
    far = CUT_SHARE * cosines.std(correction=0).clamp(min=1e-6)
    alike = ((cosines - 1) / far).exp() + UNLIKE
    roots = alike.sum(dim=1).sqrt()
    _, vectors = torch.linalg.eigh(-alike / (roots[:, None] * roots))
    sides = (vectors[:, min(1, len(roots) - 1)] / roots).view(small.shape[1:])
    mask = (sides > sides.mean()).double()
    return F.interpolate(mask[None, None], (height, width))[0, 0] > 0.5
