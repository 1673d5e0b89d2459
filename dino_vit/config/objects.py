"""Objects that a program passes to a function in the place of a setting's text."""

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
    return spec.startswith("object:")


def find(spec: str) -> object:
    """Return the object of a name."""
    if spec not in _passed:
        text = f"{spec} is an object of a Python program, and not known here"
        raise ValueError(f"{text}: run that program, or pass the object to the function in Python")
    return _passed[spec]
