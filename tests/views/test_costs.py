"""What a run that waits for images is told."""

import pytest

from dino_vit.config.loading import load
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.views.costs import OVERHEAD, advice_on_size, advice_on_waiting
from dino_vit.views.geometry import View
from dino_vit.views.loader import LoadTimes


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


LARGE, USUAL = [(3000, 4000)] * 3, [(375, 500)] * 3
FAST = {"read": 0.4, "decode": 0.5, "crop": 0.6}  # seconds for 100 images


@pytest.mark.parametrize(
    ("seconds", "source", "sizes", "advice"),
    [
        ({"read": 9.0}, "photos", USUAL, "data.workers=8, or a faster disk, or shards instead of many"),
        ({"read": 9.0}, "s3://photos", USUAL, "data.workers=8, or a copy of the images on a local disk"),
        ({"decode": 9.0}, "photos", USUAL, "more cores."),
        ({"crop": 9.0}, "photos", USUAL, "more cores, or a lower views.local_count."),
        ({"augment": 9.0}, "photos", LARGE, "data.augment_on=device."),
    ],
)
def test_advice_on_waiting_is_about_what_takes_longest(seconds, source, sizes, advice):
    config = load(PretrainConfig, None, [f"data.source={source}"])
    times = LoadTimes(images=100, **{**FAST, **seconds})
    found = advice_on_waiting(config, times, sizes, workers=3, cores=4)
    name = next(iter(seconds))
    assert f"90 ms to {name}" in found
    assert all(f"{10 * FAST[other]:.3g} ms to {other}" in found for other in FAST.keys() - {name})
    assert "by 3 DataLoader workers on 4 cores. " in found
    assert f"Try {advice}" in found


@pytest.mark.parametrize("longest", ["decode", "crop"])
def test_large_images_that_a_run_waits_for_should_be_packed(longest):
    config = load(PretrainConfig, None, ["data.source=photos"])
    times = LoadTimes(images=100, **{**FAST, longest: 9.0})
    busy = advice_on_waiting(config, times, LARGE, workers=3, cores=4)
    assert ". Images of 3000 × 4000 pixels" in busy
    assert "`dino-vit pack photos packed size=" in busy
    assert "Try" not in busy
    idle = advice_on_waiting(config, times, LARGE, workers=0, cores=4)
    assert "by this process alone on 4 cores. Try data.workers=3. Images of 3000" in idle
