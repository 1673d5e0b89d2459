"""Keywords of constructors: fields of a dataclass, which pydantic validates as it does settings."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import signature
from typing import Any, TypeVar

from pydantic import ValidationError

from dino_vit.config.loading import requirement
from dino_vit.config.settings import ConfigError, as_tuples
from dino_vit.core.text import brief

C = TypeVar("C")


def build(cls: Callable[..., C], keywords: Mapping[str, Any]) -> C:
    """Return a dataclass of keywords: a TypeError for an unknown one, a ConfigError for a wrong value."""
    signature(cls).bind(**keywords)
    values = {name: as_tuples(value) for name, value in keywords.items()}
    try:
        return cls(**values)
    except ValidationError as error:
        raise ConfigError(faults(values, error)) from None


def faults(content: Mapping[str, Any], error: ValidationError) -> Iterator[str]:
    """Yield for each wrong value in `content` its name, the value and what it must be."""
    messages = dict[str, list[str]]()  # a union has a message for each type
    for detail in error.errors(include_url=False):
        text, value = _stated_at(content, detail["loc"])
        named = f"{brief(text)} = {brief(repr(value))}: " if text else ""
        messages.setdefault(named, []).append(requirement(detail).removeprefix("Value error, "))
    for named, texts in messages.items():
        yield f"{named}{' or '.join(dict.fromkeys(texts))}"


def _stated_at(content: Any, place: Sequence[int | str]) -> tuple[str, Any]:
    """Return the name and the value that a message is about, of whose place the end names types."""
    names = list[str]()
    for name in place:
        if not isinstance(content, Mapping) or name not in content:
            break
        content = content[name]
        names.append(str(name))
    return ".".join(names), content
