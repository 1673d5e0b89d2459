"""Read and write YAML by the core schema of YAML 1.2, in which `no` is text and `1e-3` is a number."""

import re
from collections.abc import Iterator
from typing import NamedTuple

import yaml

from dino_vit.core.text import brief


class Entry(NamedTuple):
    """A value under a dotted key, and where it was given."""

    key: str
    value: object
    origin: str


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's way)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        return True


_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?$|[-+]?[0-9]+[eE][-+]?[0-9]+$|[-+]?\.inf$|\.nan$"
)
for _name, _pattern, _first in (
    ("null", re.compile(r"(~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("bool", re.compile(r"(true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    ("int", re.compile(r"[-+]?(0|[1-9][0-9]*)$"), list("-+0123456789")),
    ("float", _FLOAT, list("-+.0123456789")),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", _pattern, _first)
# Quote text that either version of YAML would read as a number.
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def read(text: str | bytes, name: str, key: str = "") -> list[Entry]:
    """Return the values in the file `name` by dotted key, or, with `key`, those of that one argument."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        return list(_walk(loader, node, key, name, 0 if key else 1)) if node else [Entry(key, None, name)]
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark and not key else ""
        raise ValueError(f"{name}{line}: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{name}: cannot be read as YAML ({brief(error)})") from None
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        raise ValueError(f"{name}: cannot be read as YAML") from None


def _walk(loader: _Loader, node: yaml.Node, key: str, name: str, line: int) -> Iterator[Entry]:
    """Yield the values inside a node; `line` is 0 in an argument."""
    if isinstance(node, yaml.MappingNode) and node.value:
        for name_node, inner in node.value:
            inner_key = f"{key}.{loader.construct_object(name_node, deep=True)}".removeprefix(".")
            yield from _walk(loader, inner, inner_key, name, line and name_node.start_mark.line + 1)
    else:
        yield Entry(key, loader.construct_object(node, deep=True), f"{name}:{line}" if line else name)


def write(value: object) -> str:
    """Return `value` on one line of YAML, numbers without a needless fraction."""
    text: str = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=2**30, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def _represent_float(dumper: _Dumper, value: float) -> yaml.Node:
    is_whole = value.is_integer() and abs(value) < 1e15
    return dumper.represent_int(int(value)) if is_whole else dumper.represent_float(value)


_Dumper.add_representer(float, _represent_float)
_Dumper.add_multi_representer(object, lambda dumper, value: dumper.represent_str(str(value)))
