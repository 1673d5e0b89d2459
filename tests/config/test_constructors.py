"""Constructors of networks refuse what the settings refuse."""

import inspect
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter

from dino_vit import VisionTransformer
from dino_vit.config.sections import Head, Model
from dino_vit.config.settings import ConfigError, Settings
from dino_vit.models.head import DINOHead, HeadConfig
from dino_vit.models.timm_backbone import TimmBackbone
from dino_vit.models.vit import ViTConfig

ODD = {
    "image_size": (-1, 0, "224", 10**9, (32, 0), (32, 32, 32)),
    "patch_size": (0, 10**9),
    "width": (0, -1, 10**9, 1.5),
    "mlp_ratio": (0, -1.0, float("nan")),
    "mlp": ("relu", None),
    "num_classes": (-1, 10**12),
    "qkv_bias": ("yes", 3),
    "norm_eps": (0, -1e-6, "1e-6"),
    "drop_path": (2, 1.0, -0.1),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in ODD for value in ODD[name]])
def test_what_no_network_has_is_a_sentence_about_the_argument(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{name} = .* must be"):
        VisionTransformer(**{name: value})


@pytest.mark.parametrize(("ratio", "width"), [(0.01, "0"), (1000.0, "384,000")])
def test_a_ratio_that_makes_no_width_is_refused(ratio: float, width: str) -> None:
    with pytest.raises(ValueError, match=rf"mlp_ratio={ratio:g} makes MLPs of width {width} with width="):
        VisionTransformer(width=8 if ratio < 1 else 384, heads=2, mlp_ratio=ratio)


def test_other_constructors_are_checked_alike() -> None:
    with pytest.raises(ConfigError, match=r"^prototypes = 1: must be greater than or equal to 2"):
        DINOHead(in_dim=8, prototypes=1)
    with pytest.raises(ConfigError, match=r"^channels = 0: must be greater than or equal to 1"):
        TimmBackbone(name="test_vit", channels=0)


def test_numbers_of_other_libraries_are_taken_as_settings_take_them() -> None:
    taken: dict[str, Any] = {"depth": np.int64(1), "width": 64.0, "image_size": [16, 32], "patch_size": 8}
    model = VisionTransformer(heads=1, **taken)
    assert (model.depth, model.width, model.image_size) == (1, 64, (16, 32))
    assert [type(model.architecture[name]) for name in ("depth", "width")] == [int, int]


def test_calls_are_refused_as_python_refuses_them() -> None:
    taken: dict[str, Any] = {"size": 3}
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'size'"):
        VisionTransformer(**taken)
    with pytest.raises(TypeError, match=r"missing a required (keyword-only )?argument: 'name'"):  # of 3.13
        TimmBackbone()
    assert inspect.signature(VisionTransformer).parameters["width"].default == 384


@pytest.mark.parametrize(
    ("section", "record"),
    [(Model, ViTConfig), (Head, HeadConfig)],
    ids=["model", "head"],
)
def test_settings_and_constructors_have_the_same_bounds(section: type[Settings], record: Any) -> None:
    ours, theirs = (
        {name: _bounds(field) for name, field in TypeAdapter(cls).json_schema()["properties"].items()}
        for cls in (section, record)
    )
    shared = ours.keys() & theirs.keys() - {"patch_size"}  # which need not be a square in Python
    assert len(shared) > 4
    assert {name: ours[name] for name in shared} == {name: theirs[name] for name in shared}


def _bounds(field: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return what limits the values of a field, but for whether it may be null."""
    kinds = field.get("anyOf", [field])
    names = ("minimum", "maximum", "exclusiveMaximum", "enum", "type")
    return sorted(
        (name, str(kind[name]))
        for kind in kinds
        for name in names
        if name in kind and kind.get("type") != "null"
    )
