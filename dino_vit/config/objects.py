"""Python objects that a setting names: `python:MODULE:NAME`, or one that a program passed to a function.

To import a module is to run it. So a name is used that a user gave, on a command line, in a file of settings
or in Python; one that was read from a file of results needs the user's word for it (`trust=true`).
"""

from collections.abc import Sequence
from pkgutil import resolve_name

from dino_vit.core.text import brief

_passed: dict[str, object] = {}


def pass_object(value: object, name: str) -> str:
    """Return the text by which `find` returns an object in this process; the same name replaces the last."""
    _passed[f"object:{name}"] = value
    return f"object:{name}"


def title_of(value: object) -> str:
    """Return the name of a function, or of the class of an object."""
    return getattr(value, "__name__", type(value).__name__)


def is_object(spec: str) -> bool:
    """Tell whether a text names an object."""
    return spec.startswith(("python:", "object:"))


def check_trusted(specs: Sequence[str | None], file: object, *, trust: bool) -> None:
    """Refuse the modules that a file names, unless the user trusts it to run code."""
    for spec in () if trust else specs:
        if spec and spec.startswith("python:"):
            text = f"{file} names {brief(spec, 200)}, which runs the code of a module when it is imported"
            raise ValueError(f"{text}; if you trust it, give trust=true")


def find(spec: str) -> object:
    """Return the object of a name; a class in a module is called without arguments."""
    kind, _, name = spec.partition(":")
    if kind == "object":
        if spec not in _passed:
            text = f"{spec} is an object of a Python program, and not known here: run that program"
            raise ValueError(f"{text}, or write python:MODULE:NAME, which is imported")
        return _passed[spec]
    if not all(name.rpartition(":")):
        raise ValueError(f"{spec!r} is not valid: write python:MODULE:NAME, such as python:photos:Photos")
    try:
        value: object = resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        advice = "Modules are looked for in PYTHONPATH, among others"
        raise ValueError(f"{spec} cannot be imported: {error}. {advice}") from error
    return value() if isinstance(value, type) else value
