"""Objects that a program passes to a function in the place of a setting's text."""

from collections.abc import Callable
from weakref import ref

# Each returns an object, if the program still holds it: it may be large.
_passed: dict[str, Callable[[], object]] = {}


def pass_object(value: object, name: str) -> str:
    """Return the text by which `find` returns an object in this process; the same name replaces the last."""
    spec = f"object:{name}"
    try:
        _passed[spec] = ref(value)
    except TypeError:  # of lists and others there are no weak references
        _passed[spec] = lambda: value
    return spec


def title_of(value: object) -> str:
    """Return the name of a function, or of the class of an object."""
    return getattr(value, "__name__", type(value).__name__)


def is_object(spec: str) -> bool:
    """Tell whether a text names an object."""
    return spec.startswith("object:")


def find(spec: str) -> object:
    """Return the object of a name."""
    if (value := _passed.get(spec, lambda: None)()) is None:
        text = f"{spec} is an object of a Python program, and not known here"
        raise ValueError(f"{text}: run that program, or pass the object to the function in Python")
    return value
