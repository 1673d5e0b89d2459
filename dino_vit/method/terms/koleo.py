"""KoLeo: keep images apart from their nearest neighbours."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dino_vit.core.distributed import all_gather_equal, rank, world_size
from dino_vit.method.objective import Seen, Term
from dino_vit.models.student_teacher import Need, Outputs

EPSILON = 1e-8  # as in DINOv2
CLS = Need("cls")


class Koleo(Term):
    """The KoLeo loss of the CLS tokens of each global view, summed over these."""

    name, setting = "koleo", "koleo_weight"
    title = "KoLeo"
    caption = "Part of the loss: minus the mean log distance of an image to the most similar one."
    needs = (CLS,)

    def loss(self, outputs: Outputs, target: Any, seen: Seen) -> Tensor:
        views = torch.split(outputs[CLS], seen.images)[: self.sizes.global_views]
        return torch.stack([koleo_loss(features) for features in views]).sum()


def koleo_loss(features: Tensor) -> Tensor:
    """Return minus the mean logarithm of the distance of features (n, d) to the nearest others (KoLeo).

    It pushes images away from their nearest neighbours. The features are L2-normalised first. Neighbours are
    searched among the rows of all processes, and all processes return the same value.
    DistributedDataParallel averages gradients, so those of the rows here are multiplied by the number of
    processes, which gives the gradient of a single process.
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
