"""Edges: patches predict, after half of the blocks, the edges in the image around them.

g global views, b images, n patches
"""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from dino_vit.core import Size
from dino_vit.core.distributed import all_reduce_mean
from dino_vit.method.cross_entropy import compile_kernel
from dino_vit.method.term import Seen, Term
from dino_vit.models.edges import ORIENTATIONS, normalise_block, orientation_histograms
from dino_vit.models.student_teacher import Need, Outputs

# Numbers that a patch predicts: the histograms of itself and of its eight neighbours.
AROUND = 3 * 3 * ORIENTATIONS
CLIP = 0.3
PREDICTED, KEPT = Need("middle", "edges_head"), Need("kept")


class Edges(Term):
    """1 minus the cosine of the edges around patches and what a linear layer predicts of them."""

    name, setting, head_name = "edges", "edge_weight", "edges_head"
    title, caption = "Edges around patches", "Part of the loss: 1 minus the cosine to true edges."
    needs = (PREDICTED, KEPT)

    @staticmethod
    def build_head(in_dim: int) -> nn.Module:
        return nn.Sequential(nn.LayerNorm(in_dim), nn.Linear(in_dim, AROUND))

    def target(self, outputs: Outputs, seen: Seen) -> Tensor:
        function = compile_kernel(edges_around) if self.compiled else edges_around
        with torch.autocast(seen.views.device.type, enabled=False):
            around = function(seen.views, self.sizes.grid)
            # What is the same everywhere teaches nothing.
            return around - all_reduce_mean(around.mean((0, 1)))

    def loss(self, outputs: Outputs, target: Tensor, seen: Seen) -> Tensor:
        (views, patches), kept = target.shape[:2], outputs.get(KEPT)
        if kept is not None:
            kept, patches = kept[:views], kept.shape[1]
        predicted = rearrange(outputs[PREDICTED][: views * patches], "(b n) d -> b n d", b=views)
        return edge_loss(predicted, target, kept)


def edge_loss(predicted: Tensor, target: Tensor, kept: Tensor | None = None) -> Tensor:
    """Return 1 minus the mean cosine of predictions (g·b, n, 81) with the target (g·b, N, 81).

    `kept` (g·b, n) are the indices of the patches that predict, by default all.
    """
    with torch.autocast(predicted.device.type, enabled=False):
        if kept is not None:
            target = target.gather(1, kept[..., None].expand(-1, -1, AROUND))
        return 1 - F.cosine_similarity(predicted.float(), target, dim=2).mean()


def edges_around(views: Tensor, grid: Size) -> Tensor:
    """Return histograms of the edges in each patch and its neighbours, (g·b, n, 81); 0 beyond the view."""
    (height, width), (rows, columns) = views.shape[-2:], grid
    cells = orientation_histograms(views, (height // rows, width // columns))
    return normalise_block(F.unfold(cells, 3, padding=1).mT, 2, CLIP)
