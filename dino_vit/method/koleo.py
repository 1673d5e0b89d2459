"""KoLeo: push each image's features away from those of its nearest neighbour, so that they fill the space."""

import torch
import torch.nn.functional as F
from torch import Tensor

from dino_vit.core.distributed import all_gather_equal, rank, world_size

EPSILON = 1e-8


def koleo_loss(features: Tensor) -> Tensor:
    """Return minus the mean logarithm of the distance of features (n, d) to the nearest others.

    The features are L2-normalised first. Neighbours are searched among the rows of all processes, and all
    processes return the same value. DistributedDataParallel averages gradients, so those of this process's
    rows are multiplied by the number of processes, which gives the gradient of a single process.
    """
    with torch.autocast(features.device.type, enabled=False):
        mine = F.normalize(features.float(), dim=1, eps=EPSILON)
        rows = mine
        if world_size() > 1:
            rows, start = all_gather_equal(mine), rank() * len(mine)
            mine = mine.detach() + world_size() * (mine - mine.detach())
            rows = torch.cat([rows[:start], mine, rows[start + len(mine) :]])
        with torch.no_grad():
            cosines = rows @ rows.T
            nearest = cosines.fill_diagonal_(-1).argmax(dim=1)
        distances = F.pairwise_distance(rows, rows[nearest], eps=EPSILON)
        return -(distances + EPSILON).log().mean()
