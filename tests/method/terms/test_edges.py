import math
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from dino_vit.method.term import Seen, Sizes
from dino_vit.method.terms.edges import KEPT, PREDICTED, Edges, edges_around
from dino_vit.models.edges import orientation_histograms


@pytest.mark.parametrize("kept", [None, [[0, 5], [3, 1]]])
def test_patches_predict_the_edges_around_them(kept):
    """Of a grid of 2 × 3 patches of 4 × 8 pixels, as loops over patches and neighbours."""
    views = torch.rand(2, 3, 8, 24)
    cells = orientation_histograms(views, (4, 8))
    around = torch.zeros(2, 6, 81)
    for image, y, x in product(range(2), range(2), range(3)):
        values = []
        for orientation, dy, dx in product(range(9), (-1, 0, 1), (-1, 0, 1)):
            within = 0 <= y + dy < 2 and 0 <= x + dx < 3
            values.append(cells[image, orientation, y + dy, x + dx].item() if within else 0.0)
        clipped = [min(value / math.hypot(*values), 0.3) for value in values]
        around[image, 3 * y + x] = torch.tensor([value / math.hypot(*clipped) for value in clipped])
    assert_close(edges_around(views, (2, 3)), around)

    patches = kept or [list(range(6))] * 2
    predicted = torch.randn(2, len(patches[0]), 81)
    cosines = []
    for image, row in enumerate(patches):
        for predicting, patch in zip(predicted[image], row, strict=True):
            expected = around[image, patch] - around.mean((0, 1))
            cosines.append(F.cosine_similarity(predicting, expected, dim=0))
    term = Edges(2.0, Sizes(views=1, global_views=1, size=(8, 24), grid=(2, 3)))
    seen = Seen(images=2, views=views, original=views, weights=None, teacher_temperature=0.04)
    outputs = {PREDICTED: predicted.flatten(0, 1)} | ({KEPT: torch.tensor(kept)} if kept else {})
    loss = term.loss(outputs, term.target({}, seen), seen)
    assert_close(loss, 1 - torch.stack(cosines).mean())
