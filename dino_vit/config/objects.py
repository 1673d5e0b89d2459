"""Objects that a program passes to a function in the place of a setting's text."""

from weakref import WeakValueDictionary

# Of objects that the program still holds: they may be large.
_passed = WeakValueDictionary[str, object]()
_kept: dict[str, object] = {}  # those that cannot be referred to weakly, such as lists


def pass_object(value: object, name: str) -> str:
    """Return the text by which `find` returns an object in this process; the same name replaces the last."""
    spec = f"object:{name}"
    _kept.pop(spec, None)
    try:
        _passed[spec] = value
    except TypeError:
        _kept[spec] = value
    return spec


def title_of(value: object) -> str:
    """Return the name of a function, or of the class of an object."""
    return getattr(value, "__name__", type(value).__name__)


def is_object(spec: str) -> bool:
    """Tell whether a text names an object."""
    return spec.startswith("object:")


def find(spec: str) -> object:
    """Return the object of a name."""
    if (value := _kept.get(spec, _passed.get(spec))) is None:
        text = f"{spec} is an object of a Python program, and not known here"
        raise ValueError(f"{text}: run that program, or pass the object to the function in Python")
    return value
