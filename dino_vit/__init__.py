"""Self-supervised pretraining of vision transformers with DINO."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dino_vit.models.vit import VisionTransformer, vit_base, vit_huge, vit_large, vit_small, vit_tiny
    from dino_vit.weights import WeightsError, export_backbone, load_backbone, save_backbone

__version__ = "0.1.0"

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


def __getattr__(name: str) -> object:
    """Import a public name when it is first used: `dino-vit --help` must not wait for torch."""
    if name not in __all__:
        raise AttributeError(f"module 'dino_vit' has no attribute {name!r}")
    weights = ("WeightsError", "export_backbone", "load_backbone", "save_backbone")
    return getattr(import_module("dino_vit.weights" if name in weights else "dino_vit.models.vit"), name)


def __dir__() -> list[str]:
    return __all__
