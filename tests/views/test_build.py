"""What a run is told about images that cost it time."""

from dino_vit.config.loading import load
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.views.build import OVERHEAD, advice_on_size


def test_images_far_larger_than_their_views_get_advice():
    scales = ["views.global_scale=[0.25, 1.0]", "views.local_scale=[0.05, 0.25]"]
    plain = load(PretrainConfig, None, [*scales, "data.scaled_decoding=false"])
    sizes = [(3000, 4000), (400, 500), (4000, 3000)]
    advice = advice_on_size(plain, sizes, ["photos"])
    now, then = 3000 * 4000 + OVERHEAD, 448 * 597 + OVERHEAD
    assert "3000 × 3000 pixels" in advice
    assert f"`dino-vit pack photos packed size=448` makes them about {now / then:.0f} times faster" in advice
    assert advice.endswith("data.scaled_decoding=true about 5 times")
    scaled = advice_on_size(load(PretrainConfig, None, scales), sizes, ["photos"])
    assert "makes them about 8 times faster" in scaled
    assert "scaled_decoding" not in scaled
    assert advice_on_size(plain, [(375, 500)] * 3, ["photos"]) is None
