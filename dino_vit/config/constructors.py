"""Validate the arguments of a constructor as settings are: by the bounds that it declares."""

from collections.abc import Callable
from functools import cache, update_wrapper
from inspect import Parameter, signature, unwrap
from typing import Any, Concatenate, ParamSpec, TypeVar, get_type_hints

from pydantic import create_model

from dino_vit.config.loading import load
from dino_vit.config.settings import Settings

P = ParamSpec("P")
S = TypeVar("S")


@cache
def arguments_of(function: Callable[..., object]) -> type[Settings]:
    """Return the keyword arguments of a constructor as settings."""
    function = unwrap(function)
    hints, fields = get_type_hints(function, include_extras=True), dict[str, Any]()
    for name, parameter in list(signature(function).parameters.items())[1:]:
        fields[name] = hints[name], ... if parameter.default is Parameter.empty else parameter.default
    return create_model(function.__qualname__, __base__=Settings, **fields)


def validated(
    init: Callable[Concatenate[S, P], None],
) -> Callable[Concatenate[S, P], None]:
    """Let a constructor take only what its annotations allow; a mistake raises a ConfigError."""

    taken = signature(init)

    def checked(self: S, /, *args: P.args, **keywords: P.kwargs) -> None:
        try:
            taken.bind(self, *args, **keywords)
        except TypeError as error:
            raise TypeError(f"{init.__qualname__}() {error}") from None
        arguments: Any = load(arguments_of(init), None, keywords)
        init(self, *args, **dict(arguments))

    plain = get_type_hints(init)  # bounds would hide the types in help()
    shown = [
        each.replace(annotation=plain.get(name, Parameter.empty)) for name, each in taken.parameters.items()
    ]
    update_wrapper(checked, init)
    checked.__signature__ = taken.replace(parameters=shown)  # type: ignore[attr-defined]
    return checked
