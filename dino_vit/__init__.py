"""Self-supervised pretraining of vision transformers with DINO."""

from importlib import import_module
from typing import TYPE_CHECKING

from dino_vit.commands import COMMANDS

if TYPE_CHECKING:  # each command is a function that returns this; see functions.py
    from collections.abc import Callable

    from dino_vit.commands.classification import Classification
    from dino_vit.commands.compare import ComparisonResult
    from dino_vit.commands.demo import DemoResult
    from dino_vit.commands.embeddings.duplicates import DuplicatesResult
    from dino_vit.commands.embeddings.embed import ImageEmbeddings
    from dino_vit.commands.embeddings.search import SearchResult
    from dino_vit.commands.inspect_data import SourceFacts
    from dino_vit.commands.maps.attention import AttentionMaps
    from dino_vit.commands.maps.dense import DenseResult
    from dino_vit.commands.pack import PackResult
    from dino_vit.commands.report import ReportFile
    from dino_vit.commands.weights import ExportResult, WeightsFacts
    from dino_vit.models.vit import VisionTransformer as VisionTransformer
    from dino_vit.models.vit import vit_base as vit_base
    from dino_vit.models.vit import vit_huge as vit_huge
    from dino_vit.models.vit import vit_large as vit_large
    from dino_vit.models.vit import vit_small as vit_small
    from dino_vit.models.vit import vit_tiny as vit_tiny
    from dino_vit.run import Run as Run
    from dino_vit.weights import WeightsError as WeightsError
    from dino_vit.weights import load_backbone as load_backbone
    from dino_vit.weights import save_backbone as save_backbone
    from dino_vit.weights.export import export_backbone as export_backbone

    attention: Callable[..., AttentionMaps]
    compare: Callable[..., ComparisonResult]
    demo: Callable[..., DemoResult]
    dense: Callable[..., DenseResult]
    duplicates: Callable[..., DuplicatesResult]
    embed: Callable[..., ImageEmbeddings]
    export: Callable[..., ExportResult]
    finetune: Callable[..., Classification]
    inspect_data: Callable[..., SourceFacts]
    inspect_weights: Callable[..., WeightsFacts]
    knn: Callable[..., Classification]
    linear: Callable[..., Classification]
    pack: Callable[..., PackResult]
    pretrain: Callable[..., Run]
    report: Callable[..., ReportFile | None]
    search: Callable[..., SearchResult]

__version__ = "0.1.0"

_FUNCTIONS = {name.replace("-", "_"): name for name in COMMANDS}
_MODULES = {
    **dict.fromkeys(("WeightsError", "load_backbone", "save_backbone"), "weights"),
    "export_backbone": "weights.export",
    **dict.fromkeys(
        ("VisionTransformer", "vit_base", "vit_huge", "vit_large", "vit_small", "vit_tiny"), "models.vit"
    ),
    "Run": "run",
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
