import math

import numpy as np
import pytest
import torch

from dino_vit.data.sources.open import open_source
from dino_vit.eval.features import extract_features
from dino_vit.eval.frozen import BackboneConfig, frozen_backbone
from dino_vit.eval.online import random_indices
from dino_vit.reports import explorer
from dino_vit.reports.record import read_run
from tests.support.reports import picture_of


def test_the_map_holds_the_features_and_neighbours_of_the_teacher(made):
    teacher = frozen_backbone(BackboneConfig(source="synthetic", weights=str(made)))
    source = open_source(read_run(made).config.data.source)
    images = explorer.build_map(teacher, source, random_indices(source, seed=0)[:40])
    features = extract_features(
        teacher.model, source, images.indices, transform=teacher.transform, batch_size=7
    ).values
    unit = features / features.norm(dim=1, keepdim=True)
    assert torch.allclose(images.features, unit, atol=1e-5)
    for row in range(40):
        cosines = {other: float(unit[row] @ unit[other]) for other in range(40) if other != row}
        nearest = sorted(cosines, key=cosines.get, reverse=True)[: explorer.NEIGHBOURS]
        near = images.neighbours[row].tolist()
        assert [cosines[other] for other in near] == pytest.approx([cosines[n] for n in nearest], abs=1e-5)
        assert row not in near
    assert [source.classes[source.label(index)] for index in images.indices] == images.labels
    assert images.attention.shape == (40, 8, 8)  # of images of 64 px, although it was trained on 32
    data = explorer.to_json(images)
    assert np.array(data["positions"]).min() >= 0
    assert np.ptp(data["positions"], axis=0).max() == pytest.approx(1, abs=1e-3)
    assert picture_of(data["attention"]["uri"]).shape == (6 * 8, 7 * 8, 3)


def test_tsne_keeps_groups_together_and_stands_a_collapse():
    middles = torch.nn.functional.normalize(torch.randn(4, 16), dim=1)
    group = torch.arange(80) % 4
    features = torch.nn.functional.normalize(middles[group] + 0.05 * torch.randn(80, 16), dim=1)
    positions = explorer.tsne(features)
    nearest = torch.cdist(positions, positions).fill_diagonal_(math.inf).argmin(dim=1)
    assert (group[nearest] == group).float().mean() > 0.95
    assert explorer.tsne(features[:1].expand(4, -1)).isfinite().all()
