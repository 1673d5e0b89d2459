"""Read and write YAML by the core schema of YAML 1.2, in which `no` is text and `1e-3` is a number."""

import re
from dataclasses import dataclass

import yaml


@dataclass(frozen=True)
class Located:
    """A value and the line it stands on; a mapping is a dict of further `Located`."""

    value: object
    line: int


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's way)

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, "aliases (*name) are not supported here", mark)
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    pass


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
# Text that either version of YAML would take for a number is written in quotes.
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def read(text: str, name: str) -> Located:
    """Return the one document in `text`; `name` says in errors where it came from."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        return Located(None, 1) if node is None else _locate(loader, node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        problem = error.problem or str(error)
        if "'\\t'" in problem:
            problem = "a tab; YAML indents with spaces"
        raise ValueError(f"{name}{line}: {problem}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{name}: {error}") from None


def _locate(loader: _Loader, node: yaml.Node) -> Located:
    line = node.start_mark.line + 1
    if not isinstance(node, yaml.MappingNode) or node.tag != "tag:yaml.org,2002:map":
        return Located(_frozen(loader.construct_object(node, deep=True)), line)
    found: dict[str, Located] = {}
    for key_node, value_node in node.value:
        key = str(loader.construct_object(key_node, deep=True))
        if key in found:
            problem = f"{key} stands here and in line {found[key].line}; keep one of them"
            raise yaml.composer.ComposerError(None, None, problem, key_node.start_mark)
        found[key] = Located(_locate(loader, value_node).value, key_node.start_mark.line + 1)
    return Located(found, line)


def _frozen(value: object) -> object:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def write(value: object) -> str:
    """Return `value` on one line, numbers without a needless fraction."""
    text = yaml.dump(_plain(value), Dumper=_Dumper, default_flow_style=True, width=2**30, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def _plain(value: object) -> object:
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return int(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)
