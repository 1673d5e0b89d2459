"""Constructors that take the fields of a record as keywords, validated as settings are."""

from collections.abc import Callable
from functools import cache, update_wrapper
from inspect import Parameter, Signature, signature
from typing import Any, Concatenate, ParamSpec, TypeVar, get_type_hints

from pydantic import create_model

from dino_vit.config.loading import load
from dino_vit.config.settings import Settings

P = ParamSpec("P")
S = TypeVar("S")
C = TypeVar("C")


@cache
def arguments_of(record: Callable[..., object]) -> type[Settings]:
    """Return the fields of a dataclass as settings, with the bounds that its annotations declare."""
    hints, fields = get_type_hints(record, include_extras=True), dict[str, Any]()
    for name, parameter in signature(record).parameters.items():
        fields[name] = hints[name], ... if parameter.default is Parameter.empty else parameter.default
    return create_model(record.__qualname__, __base__=Settings, **fields)


def takes(
    record: Callable[P, C],
) -> Callable[[Callable[[S, C], None]], Callable[Concatenate[S, P], None]]:
    """Let a constructor be called with the fields of a dataclass as keywords.

    They are validated by the annotations of the fields; what is unknown raises a TypeError, what is out of
    bounds a ConfigError.
    """
    declared, plain = signature(record), get_type_hints(record)  # without bounds, for help()
    shown = [each.replace(annotation=plain[name]) for name, each in declared.parameters.items()]

    def decorate(init: Callable[[S, C], None]) -> Callable[Concatenate[S, P], None]:
        def checked(self: S, /, *args: P.args, **keywords: P.kwargs) -> None:
            try:
                declared.bind(*args, **keywords)
            except TypeError as error:
                raise TypeError(f"{init.__qualname__}() {error}") from None
            arguments: Any = load(arguments_of(record), None, keywords)
            build: Callable[..., C] = record
            init(self, build(**dict(arguments)))

        update_wrapper(checked, init)
        self_parameter = Parameter("self", Parameter.POSITIONAL_ONLY)
        checked.__signature__ = Signature([self_parameter, *shown])  # type: ignore[attr-defined]
        return checked

    return decorate
