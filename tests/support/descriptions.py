"""What the five descriptions of a vision transformer have beside what all share, as keywords."""

import pytest

from dino_vit import VisionTransformer

TINY = {"image_size": 32, "patch_size": 8, "width": 32, "depth": 2, "heads": 2}
RESNET = {"stem": "hybrid", "patch_size": 16, "resnet_layers": (1, 2, 1), "resnet_width": 32}
PARTS = {
    "patches": {},
    "early convolutions": {"stem": "conv"},
    "a ResNet": RESNET,
    "sinusoidal positions": {"positions": "sinusoidal"},
    "another scale": {"qk_scale": 0.7},
    "dropouts": {"dropout": 0.2, "attention_dropout": 0.1},
    "stochastic depth": {"drop_path": 0.4},
}
each_part = pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
STEMS = {"patch": {}, "conv": {"stem": "conv"}, "hybrid": RESNET}
each_stem = pytest.mark.parametrize("stem", STEMS.values(), ids=STEMS)
OTHERS = {name: part for name, part in PARTS.items() if name != "patches"}
each_setting = pytest.mark.parametrize("part", OTHERS.values(), ids=OTHERS)


def build(**changes):
    return VisionTransformer(**{**TINY, **changes})
