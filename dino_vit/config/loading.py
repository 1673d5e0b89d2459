"""Load settings: defaults, then a YAML file of differences, then `section.name=value` on the command line.

YAML is of version 1.2, in which `no` is text and `1e-3` a number. pydantic checks the values. All wrong names
and values are reported together; contradictions between settings once these are right.
"""

import argparse
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from textwrap import TextWrapper
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from dino_vit.config.settings import C, ConfigError, Settings, flat, nested, sections, settings_of, values
from dino_vit.core.text import brief

COLUMN = 34  # where the meaning of a setting begins
SMALLEST = "greater than or equal to 0.000000000001"  # the bound of `Positive`, as pydantic writes it

_Layer = dict[str, object]  # values by dotted key


def load(
    cls: type[C], base: Path | C | None = None, overrides: Sequence[str] | Mapping[str, object] = ()
) -> C:
    """Return the defaults of `cls` changed by a YAML file, then by `section.name=value` texts or values.

    Other settings may take the place of the file: what was given in them counts.
    """
    below, origin = dict[str, object](), str(base)
    if isinstance(base, Settings):
        below, origin = values(base, given=True), "unchanged"
    elif base:
        below = flat(read_yaml(base.read_bytes(), origin))
        if base.name == "config.yaml" and any(base.parent.glob("checkpoints/step-*.safetensors")):
            below["output"] = str(base.parent)  # the settings of a run, which may have been moved
    above = flat(overrides) if isinstance(overrides, Mapping) else {}
    for text in () if isinstance(overrides, Mapping) else overrides:
        layer = _read_override(cls, text)
        above = _without(above, layer) | layer
    return _build(cls, below, above, origin)


def _read_override(cls: type[Settings], text: str) -> _Layer:
    key, equals, value = text.partition("=")
    if not equals:
        hint = next((f"{key}=..." for key in nearest(text, cls)), "settings as name=value")
        raise ValueError(f"{brief(text)!r} on the command line is not key=value; write {hint}")
    info = settings_of(cls).get(key)
    if info and info.takes_text and value != "null":
        return {key: value}
    return flat({key: _parse_yaml(value, brief(text))})


def _without(layer: _Layer, keys: Iterable[str]) -> _Layer:
    """Return a layer without some settings; the key of a section covers all inside, and the reverse."""
    return {
        name: value
        for name, value in layer.items()
        if not any(f"{key}.".startswith(f"{name}.") or f"{name}.".startswith(f"{key}.") for key in keys)
    }


def _build(cls: type[C], below: _Layer, above: _Layer, file: str) -> C:
    """Lay `above` over `below`, in which it replaces the groups that it excludes too, and validate."""
    infos = settings_of(cls)
    layer = _without(below, [*above, *_rivals(cls, above)]) | above
    layer = {rival: None for rival in _rivals(cls, layer) if infos[rival].default is not None} | layer
    origins = {key: f" ({file})" for key in layer.keys() - above.keys()}
    unknown: dict[str, list[str]] = {}
    for key, value in layer.items():
        # A section without settings is no mistake.
        if key not in infos and (key not in sections(cls) or value not in (None, {})):
            hint = f"{origins.get(key, '')}; {_hint(cls, key, value)}"
            unknown.setdefault(hint, []).append(brief(key))
    problems = [
        f"{', '.join(keys)} {'is not a setting' if len(keys) == 1 else 'are not settings'}{hint}"
        for hint, keys in unknown.items()
    ]
    try:
        config = cls.model_validate(nested({key: layer[key] for key in layer if key in infos}))
    except ValidationError as error:
        raise ConfigError([*problems, *_explained(cls, layer, origins, error)]) from None
    if problems := problems or list(config.contradictions()):
        raise ConfigError(problems)
    return config


def _rivals(cls: type[Settings], layer: _Layer) -> set[str]:
    """Return the settings that those of a layer exclude."""
    infos = settings_of(cls)
    return {rival for key in layer if key in infos and layer[key] is not None for rival in infos[key].rivals}


def _hint(cls: type[Settings], key: str, value: object) -> str:
    """Return what to write instead of an unknown key."""
    section = key.partition(".")[0]
    inside = {name: info for name, info in settings_of(cls).items() if name.startswith(f"{section}.")}
    if key in sections(cls):  # as model=vit_small
        guesses = [name for name, info in inside.items() if get_close_matches(str(value), info.choices)]
    else:
        guesses = nearest(key, cls)
    if guesses:
        return f"did you mean {' or '.join(guesses)}?"
    if inside:
        return f"the section {section} has {', '.join(inside)}"
    return f"the settings are {', '.join(cls.model_fields)}"


def nearest(typed: str, cls: type[Settings]) -> list[str]:
    """Return the dotted keys that a mistyped one may mean, with their section or without."""
    names = {key: {key, key.rpartition(".")[2]} for key in settings_of(cls)}
    last = typed.rpartition(".")[2]
    for name, cutoff in ((last, 1.0), (typed, 0.75), (last, 0.75)):
        if matches := get_close_matches(name, chain(*names.values()), n=1, cutoff=cutoff):
            return [key for key in names if matches[0] in names[key]]
    return []


def _explained(
    cls: type[Settings], layer: _Layer, origins: Mapping[str, str], error: ValidationError
) -> Iterator[str]:
    """Yield a sentence for each wrong setting: what was given, and what is allowed."""
    allowed: dict[str, list[str]] = {}  # a union has a message for each type, a list for each item
    for detail in error.errors(include_url=False):
        if detail["type"] == "too_short" and allowed:  # of a list whose items are wrong, said already
            continue
        section, *names = map(str, detail["loc"])
        key = f"{section}.{names[0]}" if names else section
        allowed.setdefault(key if key in settings_of(cls) else section, []).append(requirement(detail))
    for key, messages in allowed.items():
        info = settings_of(cls)[key]
        if key not in layer:
            yield f"{key} is missing: {info.meaning}"
            continue
        text = " or ".join(dict.fromkeys(messages))
        if info.choices:
            similar = get_close_matches(str(layer[key]), info.choices, n=1)
            text = f"must be {'one of ' * (len(info.choices) > 1)}{', '.join(info.choices)}"
            text = f"did you mean {similar[0]}? It {text}" if similar else text
        elif "null:" in info.meaning:
            text = f"{text} ({info.meaning})"
        yield f"{key} = {brief(write_yaml(layer[key]))}{origins.get(key, '')}: {text}"


def requirement(detail: ErrorDetails) -> str:
    """Return pydantic's message, such as "Input should be a valid integer", as what a setting must be."""
    items = [part for part in detail["loc"] if isinstance(part, int)]
    message = "must be given" if detail["type"] == "missing" else detail["msg"]
    message = re.sub(r"^\w+ should ", "must ", message).replace("valid tuple", "list")
    message = message.partition(" after validation")[0].replace(SMALLEST, "above 0")
    return f"item {items[-1] + 1} {message}" if items else message


def add_config_arguments(parser: argparse.ArgumentParser, cls: type[Settings]) -> None:
    """Add the arguments that change settings, and a help that lists every setting."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.allow_abbrev = False
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file of differences from defaults")
    names = "".join(f"{key.rpartition('.')[2].upper()} " for key in cls.positional)
    help = "settings, which override those in the file; --key VALUE is the same, --key alone key=true"
    parser.add_argument("settings", nargs="*", metavar=f"{names}key=value", help=help)
    for key, info in settings_of(cls).items():
        taken: dict[str, Any] = {"action": "append", "type": f"{key}={{}}".format}
        if info.is_switch:
            taken = {"action": "append_const", "const": f"{key}=true"}
        forms = dict.fromkeys((f"--{key.replace('_', '-')}", f"--{key}"))
        parser.add_argument(*forms, dest="options", help=argparse.SUPPRESS, **taken)
    parser.set_defaults(options=[])
    if settings := list_settings(cls).splitlines():
        indent, width = " " * (COLUMN + 4), shutil.get_terminal_size().columns - 2
        wrap = TextWrapper(width, subsequent_indent=indent, break_on_hyphens=False).fill
        parser.epilog = "\n".join(["settings and their defaults:", *map(wrap, settings)]).replace("%", "%%")


def list_settings(cls: type[Settings]) -> str:
    """Return a line for each setting: its name, default and meaning."""
    lines = []
    for key, info in settings_of(cls).items():
        default = "..." if info.required else brief(write_yaml(info.default))
        lines.append(f"  {f'{key}={default}':<{COLUMN}}  {info.meaning}")
    return "\n".join(lines)


def parse_arguments(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse with `key=value` allowed between and after the options too, which argparse alone rejects."""
    args, rest = parser.parse_known_args(argv)
    if unknown := [text for text in rest if text.startswith("-")]:
        parser.error(f"there is no option {unknown[0]}; see --help")
    args.settings += rest
    return args


def config_from(args: argparse.Namespace, cls: type[C]) -> C:
    """Return the config for parsed arguments."""
    _check_split([*args.options, *args.settings])
    unset, named, listed = list(cls.positional), list[str](), list[str]()
    for text in args.settings:
        key, equals, _ = text.partition("=")
        is_path = bool(unset) and "/" in key  # with an = in it
        if not unset or (equals and not is_path):
            named.append(text)
        elif settings_of(cls)[unset[0]].is_list:
            listed.append(text)
        else:
            named.append(f"{unset.pop(0)}={text}")
    if listed:
        named.append(f"{unset[0]}={write_yaml(listed)}")
    for key in set(cls.positional) - set(unset):
        if sum(text.startswith(f"{key}=") for text in (*named, *args.options)) > 1:
            raise ValueError(f"{key} is given twice, by position and as {key}=...; give it once")
    by_name, by_option = ({text.partition("=")[0] for text in texts} for texts in (named, args.options))
    if both := sorted(by_name & by_option):  # argparse does not tell which came last
        raise ValueError(f"{both[0]} is given twice, as {both[0]}=... and as --{both[0]}; give it once")
    return load(cls, args.config, [*named, *args.options])


def _check_split(texts: Sequence[str]) -> None:
    """Raise if a list or a section was given without quotes, so that the shell split it at its spaces."""
    for text in texts:
        value = text.partition("=")[2]
        closing = {"[": "]", "{": "}"}.get(value[:1])
        if closing and value.count(value[0]) > value.count(closing):
            whole = f"'{text} ...{closing}'"
            raise ValueError(f"{brief(text)} has no {closing}: the shell splits at spaces; quote it: {whole}")


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's way)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Refuse a name that is given twice, of which PyYAML would take the last."""
        names = set[str]()
        for name, _ in node.value:
            if not isinstance(name, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a name must be text", problem_mark=name.start_mark)
            if name.value in names:
                problem = f"{name.value} is given twice; keep one"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=name.start_mark)
            names.add(name.value)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Construct all that is below a node at once, which raises for what contains itself."""
        return super().construct_object(node, deep=True)


class _Dumper(yaml.SafeDumper):
    """Write floats in their shortest form, and objects that YAML does not know as text."""


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


def read_yaml(text: str | bytes, name: str) -> dict[str, object]:
    """Return the settings in the file `name`."""
    content = _parse_yaml(text, name) or {}
    if not isinstance(content, dict):
        raise ValueError(f"{name}: write settings as `name: value`")
    return content


def _parse_yaml(text: str | bytes, name: str) -> object:
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ValueError(f"{name}{line}: {error.problem}") from None
    except (yaml.YAMLError, ValueError, KeyError, AttributeError, RecursionError):  # such as `!!bool x`
        raise ValueError(f"{name}: cannot be read as YAML") from None


def write_yaml(value: object) -> str:
    """Return `value` on one line of YAML, numbers without a needless fraction."""
    text: str = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=2**30, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def _represent_float(dumper: _Dumper, value: float) -> yaml.Node:
    is_whole = value.is_integer() and abs(value) < 1e15
    return dumper.represent_int(int(value)) if is_whole else dumper.represent_float(value)


_Dumper.add_representer(float, _represent_float)
_Dumper.add_multi_representer(object, lambda dumper, value: dumper.represent_str(str(value)))


def to_yaml(config: Settings, indent: str = "", *, given: bool = False) -> str:
    """Return every setting as YAML that loads back to an equal config, each with its meaning.

    With `given`, all others are comments, so that `recipe=auto` and methods may still choose them.
    """
    lines: list[str] = []
    for name, value in config:
        if isinstance(value, Settings):
            lines += ["", f"# {value.__doc__}", f"{name}:", to_yaml(value, "  ", given=given).rstrip()]
        else:
            meaning = settings_of(type(config))[name].meaning
            start = "# " if given and name not in config.model_fields_set else ""
            lines.append(f"{f'{indent}{start}{name}: {write_yaml(value)}':<{COLUMN - 2}}  # {meaning}")
    return "\n".join(lines) + "\n"
