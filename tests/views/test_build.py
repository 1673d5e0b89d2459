"""What a run is told about images that cost it time."""

import pytest

from dino_vit.config.loading import load
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.views.build import OVERHEAD, advice_on_size, advice_on_waiting
from dino_vit.views.loader import LoadTimes

LARGE, USUAL = [(3000, 4000)] * 3, [(375, 500)] * 3
SECONDS = {"read": 0.4, "decode": 0.5, "crop": 0.6}  # for 100 images


def test_images_far_larger_than_their_views_get_advice():
    scales = ["views.global_scale=[0.25, 1.0]", "views.local_scale=[0.05, 0.25]"]
    plain = load(PretrainConfig, None, [*scales, "data.scaled_decoding=false"])
    sizes = [(3000, 4000), (400, 500), (4000, 3000)]
    advice = advice_on_size(plain, sizes, "photos")
    now, then = 3000 * 4000 + OVERHEAD, 448 * 597 + OVERHEAD
    assert "3000 × 3000 pixels" in advice
    assert f"`dino-vit pack photos packed size=448` makes them about {now / then:.0f} times faster" in advice
    assert advice.endswith("data.scaled_decoding=true about 5 times")
    scaled = advice_on_size(load(PretrainConfig, None, scales), sizes, "photos")
    assert "makes them about 8 times faster" in scaled
    assert "scaled_decoding" not in scaled
    assert advice_on_size(plain, USUAL, "photos") is None


@pytest.mark.parametrize(
    ("longest", "source", "workers", "advice"),
    [
        ("read", "photos", 3, "data.workers=8, or a faster disk, or shards instead of many"),
        ("read", "s3://photos", 3, "data.workers=8, or a copy of the images on a local disk"),
        ("decode", "photos", 3, "more cores. Images of 3000 × 4000 pixels"),
        ("crop", "photos", 0, "data.workers=3, or more cores, or a lower views.local_count. Images of"),
        ("augment", "photos", 3, "data.augment_on=device."),
    ],
)
def test_advice_on_waiting_is_about_what_takes_longest(longest, source, workers, advice):
    config = load(PretrainConfig, None, [f"data.source={source}"])
    times = LoadTimes(images=100, **{**SECONDS, longest: 9.0})
    text = advice_on_waiting(config, times, LARGE, workers=workers, cores=4)
    assert f"90 ms to {longest}" in text
    assert all(f"{10 * SECONDS[other]:.3g} ms to {other}" in text for other in SECONDS.keys() - {longest})
    who = "3 DataLoader workers" if workers else "this process alone"
    assert f"by {who} on 4 cores. Try {advice}" in text
    usual = advice_on_waiting(config, times, USUAL, workers=workers, cores=4)
    assert "Images of" not in usual
