"""Read and write YAML by the core schema of YAML 1.2, in which `no` is text and `1e-3` is a number."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError

from dino_vit.core.text import brief


class Entry(NamedTuple):
    """A value under a dotted key, and where it was given."""

    key: str
    value: object
    origin: str


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's way)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Refuse aliases: a few lines of them expand to more values than fit in the memory."""
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise ComposerError(None, None, "aliases are not supported: write the value again", mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Construct a value; one that is not of the type in its tag (`!!int x`) is an error with a line."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, TypeError) as error:
            text = f"{brief(node.value)} cannot be read as {node.tag.rpartition(':')[2]}"
            raise ConstructorError(None, None, text, node.start_mark) from error


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
        found = list(_walk(loader, node, key, 1)) if node else [(key, None, 1)]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark and not key else ""
        raise ValueError(f"{name}{line}: {error.problem or error}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{name}: {str(error).splitlines()[0]}") from None
    return [Entry(key_, value, name if key else f"{name}:{line}") for key_, value, line in found]


def _walk(loader: _Loader, node: yaml.Node, key: str, line: int) -> Iterator[tuple[str, object, int]]:
    if isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map" and node.value:
        for name, inner in node.value:
            inner_key = f"{key}.{loader.construct_object(name, deep=True)}".removeprefix(".")
            yield from _walk(loader, inner, inner_key, name.start_mark.line + 1)
    else:
        yield key, _as_tuples(loader.construct_object(node, deep=True)), line


def _as_tuples(value: object) -> object:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def write(value: object) -> str:
    """Return `value` on one line, numbers without a needless fraction."""
    text: str = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=2**30, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def _represent_float(dumper: _Dumper, value: float) -> yaml.Node:
    whole = value.is_integer() and abs(value) < 1e15
    return dumper.represent_int(int(value)) if whole else dumper.represent_float(value)


_Dumper.add_representer(float, _represent_float)
_Dumper.add_multi_representer(object, lambda dumper, value: dumper.represent_str(str(value)))
