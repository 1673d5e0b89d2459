"""Self-supervised pretraining of vision transformers with DINO."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dino_vit.functions import (
        attention,
        compare,
        copies,
        demo,
        dense,
        duplicates,
        embed,
        export,
        finetune,
        inspect_data,
        inspect_weights,
        knn,
        linear,
        pack,
        pretrain,
        propagate,
        report,
        retrieval,
        search,
    )
    from dino_vit.models.vit import VisionTransformer, vit_base, vit_huge, vit_large, vit_small, vit_tiny
    from dino_vit.run import Run
    from dino_vit.weights import WeightsError, export_backbone, load_backbone, save_backbone

__version__ = "0.1.0"

__all__ = [
    "Run",
    "VisionTransformer",
    "WeightsError",
    "attention",
    "compare",
    "copies",
    "demo",
    "dense",
    "duplicates",
    "embed",
    "export",
    "export_backbone",
    "finetune",
    "inspect_data",
    "inspect_weights",
    "knn",
    "linear",
    "load_backbone",
    "pack",
    "pretrain",
    "propagate",
    "report",
    "retrieval",
    "save_backbone",
    "search",
    "vit_base",
    "vit_huge",
    "vit_large",
    "vit_small",
    "vit_tiny",
]
_MODULES = {
    **dict.fromkeys(("WeightsError", "export_backbone", "load_backbone", "save_backbone"), "weights"),
    **dict.fromkeys(
        ("VisionTransformer", "vit_base", "vit_huge", "vit_large", "vit_small", "vit_tiny"), "models.vit"
    ),
    "Run": "run",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used: `dino-vit --help` must not wait for torch."""
    if name not in __all__:
        raise AttributeError(f"module 'dino_vit' has no attribute {name!r}")
    return getattr(import_module(f"dino_vit.{_MODULES.get(name, 'functions')}"), name)


def __dir__() -> list[str]:
    return __all__
