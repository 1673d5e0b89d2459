"""What an image costs in a worker and on the device."""

import pytest
import torch

from dino_vit.config.loading import load
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.data.sources.open import SyntheticSource
from dino_vit.views.costs import (
    OVERHEAD,
    Costs,
    advice_on_size,
    faster_photometry,
    measure_costs,
    repeat_images,
)
from dino_vit.views.geometry import View

CPU = torch.device("cpu")
SMALL = ["model.patch_size=8", "views.global_size=32", "views.local_size=16"]


@pytest.mark.parametrize(
    ("costs", "workers", "where"),
    [
        (Costs(2.0, 2.0, 2.0), 1, "device"),  # the only worker is as slow as this process
        (Costs(2.0, 2.0, 2.0), 3, "worker"),
        (Costs(2.0, 2.0, 2.0), 2, "device"),  # no slower than now, but no faster either
        (Costs(2.0, 2.0, 0.05), 16, "device"),  # an accelerator
    ],
)
def test_photometry_runs_where_the_slower_stage_is_faster(costs, workers, where):
    assert faster_photometry(costs, workers)[0] == where


def test_stages_are_measured_and_leave_no_trace():
    before = torch.get_rng_state(), torch.get_num_threads()
    costs = measure_costs(load(PretrainConfig, None, SMALL), SyntheticSource(length=20), CPU)
    assert min(costs) > 0
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.get_num_threads() == before[1]


def test_a_device_is_measured_with_as_much_as_it_trains_on():
    images, rows = torch.rand(6, 3, 8, 8), torch.rand(6, 4)
    assert torch.equal(repeat_images(images, 3), torch.cat([images] * 3))
    assert torch.equal(repeat_images(rows, 2), torch.cat([rows] * 2))
    assert repeat_images(images, 1) is images


def test_images_far_larger_than_their_views_get_advice():
    views = View(size=(224, 224), scale=(0.25, 1.0)), View(size=(96, 96), scale=(0.05, 0.25))
    sizes = [(3000, 4000), (400, 500), (4000, 3000)]
    advice = advice_on_size(sizes, views, "photos", scaled_decoding=False)
    now, then = 3000 * 4000 + OVERHEAD, 448 * 597 + OVERHEAD
    assert "3000 × 3000 pixels" in advice
    assert f"`dino-vit pack photos packed size=448` makes them about {now / then:.0f} times faster" in advice
    assert advice.endswith("data.scaled_decoding=true about 5 times")
    scaled = advice_on_size(sizes, views, "photos", scaled_decoding=True)
    assert "makes them about 8 times faster" in scaled
    assert "scaled_decoding" not in scaled
    assert advice_on_size([(375, 500)] * 3, views, "photos", scaled_decoding=False) is None
