"""The terms of the loss, a file each."""

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from dino_vit.method.objective import Term


@cache
def all_terms() -> dict[str, type[Term]]:
    """Return the terms by name."""
    modules = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
    kinds = (kind for module in modules for kind in vars(module).values() if isinstance(kind, type))
    return {kind.name: kind for kind in kinds if issubclass(kind, Term) and hasattr(kind, "name")}
