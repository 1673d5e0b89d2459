"""Train a vision transformer on images without labels (DINO), and label images by a few that have labels."""

import sys
from importlib import import_module

if sys.platform == "win32":
    raise ImportError("dino-vit runs on Linux and macOS; on Windows use it in WSL")

from dino_vit.commands import COMMANDS

__version__ = "0.6.0"

_FUNCTIONS = {name.replace("-", "_"): name for name in COMMANDS}
_MODULES = {
    **dict.fromkeys(("WeightsError", "load_backbone", "save_backbone"), "weights"),
    "export_backbone": "weights.export",
    "load_classifier": "weights.classifier",
    **dict.fromkeys(
        ("VisionTransformer", "vit_base", "vit_huge", "vit_large", "vit_small", "vit_tiny"), "models.vit"
    ),
    "RunFolder": "run_folder",
}
__all__ = sorted([*_FUNCTIONS, *_MODULES])


def __getattr__(name: str) -> object:
    """Import a public name when it is first used: `dino-vit --help` must not wait for torch."""
    if name in _FUNCTIONS:
        value: object = import_module("dino_vit.functions").function_of(_FUNCTIONS[name])
    elif name in _MODULES:
        value = getattr(import_module(f"dino_vit.{_MODULES[name]}"), name)
    else:
        raise AttributeError(f"module 'dino_vit' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
