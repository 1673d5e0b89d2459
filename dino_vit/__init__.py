"""Self-supervised pretraining of vision transformers with DINO."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dino_vit.models.vit import VisionTransformer, vit_base, vit_huge, vit_large, vit_small, vit_tiny
    from dino_vit.weights import WeightsError, export_backbone, load_backbone, save_backbone

__version__ = "0.1.0"

_VIT = ("VisionTransformer", "vit_tiny", "vit_small", "vit_base", "vit_large", "vit_huge")
_WEIGHTS = ("WeightsError", "export_backbone", "load_backbone", "save_backbone")

__all__ = [
    "VisionTransformer",
    "WeightsError",
    "export_backbone",
    "load_backbone",
    "save_backbone",
    "vit_base",
    "vit_huge",
    "vit_large",
    "vit_small",
    "vit_tiny",
]


def __getattr__(name: str) -> Any:
    """Import what stands behind a public name when it is first used, so that `--help` needs no torch."""
    for module, names in (("dino_vit.models.vit", _VIT), ("dino_vit.weights", _WEIGHTS)):
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'dino_vit' has no attribute {name!r}")
