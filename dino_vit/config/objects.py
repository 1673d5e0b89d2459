"""Python objects that a setting names: `python:MODULE:NAME`, or one that a program passed to a function."""

from importlib import import_module

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


def find(spec: str) -> object:
    """Return the object of a name; a class in a module is called without arguments."""
    kind, _, rest = spec.partition(":")
    if kind == "object":
        if spec not in _passed:
            raise ValueError(
                f"{spec} is an object that a Python program passed, and not known here: run that program, or "
                "write python:MODULE:NAME, which is imported"
            )
        return _passed[spec]
    module, _, name = rest.rpartition(":")
    if not module or not name:
        raise ValueError(f"{spec!r} is not valid: write python:MODULE:NAME, such as python:photos:Photos")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{spec} cannot be imported: {error}. Modules are looked for in PYTHONPATH, among others"
        ) from error
    return found() if isinstance(found, type) else found
