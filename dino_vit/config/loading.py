"""Load settings: defaults, then a YAML file of differences, then `section.name=value` on the command line.

YAML is of version 1.2, in which `no` is text and `1e-3` a number. pydantic checks the values. All wrong names
and values are reported together, each with its origin; contradictions between settings once these are right.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from dino_vit.config.settings import (
    C,
    ConfigError,
    Settings,
    as_tuples,
    section_of,
    sections,
    settings_of,
    values,
)
from dino_vit.core.text import brief

# Keys of an earlier version, which are understood for one more.
RENAMED = {
    "anchor": "gram",
    "photometry": "augment",
    "data.photometry": "data.augment_on",
    "loss.centring": "loss.centering",
    "model.checkpoint_blocks": "model.grad_checkpointing",
    "readers": "num_workers",
}

# Settings of an earlier version that are constants now; their constants are understood for one more.
FIXED: dict[str, object] = {
    "views.ratio": (3 / 4, 4 / 3),
    "loss.student_temp": 0.1,
    "loss.center_momentum": 0.9,
    "masks.probability": 0.5,
    "masks.ratio": (0.1, 0.5),
    "augment.noise": 0.0,
    "augment.noise_std": (0.01, 0.1),
    "optim.head_weight_decay": 1.0,
    "teacher.momentum_end": 1.0,
}

# Names in the reference of 2021 and in other libraries that are too far from ours to be taken for typos.
OTHER_NAMES = {
    "data.batch_size": "batch_size_per_gpu",
    "data.channels": "in_chans in_channels",
    "data.source": "data_path dataset root",
    "data.workers": "num_workers",
    "head.batch_norm": "use_bn_in_head",
    "head.prototypes": "out_dim",
    "init.weights": "pretrained",
    "k": "top topk nb_knn",
    "model.arch": "backbone",
    "model.registers": "num_register_tokens",
    "model.width": "embed_dim hidden_size",
    "optim.accumulate": "gradient_accumulation_steps",
    "optim.clip": "clip_grad max_norm",
    "optim.lr": "learning_rate",
    "output": "out",
    "run.checkpoint_every": "saveckp_freq save_every",
    "run.precision": "use_fp16 amp",
    "source": "data_path dataset images path",
    "teacher.momentum": "ema",
    "views.global_count": "global_crops_number",
    "views.global_size": "image_size img_size",
    "views.local_count": "local_crops_number",
    "weights": "checkpoint model pretrained",
    "workers": "num_workers",
}


COLUMN = 34  # where the meaning of a setting begins


class Entry(NamedTuple):
    """A value under a dotted key, and where it was given."""

    key: str
    value: object
    origin: str


_Layer = dict[str, Entry]  # by dotted key


def load(cls: type[C], file: Path | None = None, overrides: Sequence[str] | Mapping[str, object] = ()) -> C:
    """Return the defaults of `cls` changed by a YAML file, then by `section.name=value` texts or values."""
    problems: list[str] = []
    below = _layer(cls, read_yaml(file.read_bytes(), str(file)) if file else [], problems)
    if isinstance(overrides, Mapping):
        return _build(cls, below, _layer(cls, _flat(overrides), problems), problems)
    above: _Layer = {}
    for text in overrides:
        layer = _layer(cls, _read_override(cls, text, problems), problems)
        above = _without(above, layer) | layer
    return _build(cls, below, above, problems)


def replace(config: C, changes: Mapping[str, object]) -> C:
    """Return `config` with other values for some dotted keys, validated as a whole again."""
    cls, problems = type(config), list[str]()
    below = {key: Entry(key, value, "unchanged") for key, value in values(config, given=True).items()}
    return _build(cls, below, _layer(cls, _flat(changes), problems), problems)


def _flat(nested: Mapping[str, object], prefix: str = "") -> list[Entry]:
    """Return values by dotted key, or by section and name, as entries."""
    entries = []
    for name, value in nested.items():
        inside = _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else []
        entries += inside or [Entry(f"{prefix}{name}", value, "in code")]
    return entries


def _read_override(cls: type[Settings], text: str, problems: list[str]) -> list[Entry]:
    key, equals, value = text.partition("=")
    if not equals:
        guesses = [f"write {key}=..." for key in nearest(text, cls) if key in settings_of(cls)]
        hint = [*guesses, "write settings as name=value"][0]
        problems.append(f"{brief(text)!r} on the command line is not key=value; {hint}")
        return []
    info = settings_of(cls).get(key)
    if info and info.takes_text and value != "null":
        return [Entry(key, value, "command line")]
    try:
        return read_yaml(value, "command line", key)
    except ValueError as error:
        problems.append(f"{brief(text)} ({error})")
        return []


def _layer(cls: type[Settings], entries: Iterable[Entry], problems: list[str]) -> _Layer:
    """Return the entries that are settings, and report the others."""
    layer: _Layer = {}
    for given, value, origin in entries:
        key = _current_name(cls, given)
        is_empty = value in (None, {}) and key in ("", *sections(cls))  # a file or section without settings
        if key in layer:
            problems.append(f"{key} is given twice ({layer[key].origin} and {origin}); keep one")
        elif key in settings_of(cls):
            layer[key] = Entry(key, value, origin)
        elif not is_empty and not (key in FIXED and as_tuples(value) == FIXED[key]):
            problems.append(_unknown(cls, key, origin))
    return layer


def _current_name(cls: type[Settings], key: str) -> str:
    section, dot, name = key.partition(".")
    current = RENAMED.get(key) or f"{RENAMED.get(section, section)}{dot}{name}"
    return current if current in settings_of(cls) or current in FIXED else key


def _without(layer: _Layer, keys: Iterable[str]) -> _Layer:
    """Return a layer without some settings; the key of a section covers all inside, and the reverse."""
    return {
        old: entry
        for old, entry in layer.items()
        if not any(f"{key}.".startswith(f"{old}.") or f"{old}.".startswith(f"{key}.") for key in keys)
    }


def _unknown(cls: type[Settings], key: str, origin: str) -> str:
    if not key:
        return f"{origin}: write settings as `name: value`"
    if key in FIXED:
        return f"{key} is no longer a setting ({origin}); its value is fixed at {write_yaml(FIXED[key])}"
    section = key.partition(".")[0]
    if key not in sections(cls) and (guesses := nearest(key, cls)):
        hint = f"did you mean {' or '.join(guesses)}?"
    elif section in sections(cls):
        inside = [name for name in settings_of(cls) if name.startswith(f"{section}.")]
        hint = f"the section {section} has {', '.join(inside)}"
    else:
        hint = f"there are {', '.join(cls.model_fields)}"
    return f"{brief(key)} is not a setting ({origin}); {hint}"


def nearest(typed: str, cls: type[Settings]) -> list[str]:
    """Return the dotted keys that a mistyped one may mean, by their own, their last and their other names."""
    keys_by_name: dict[str, list[str]] = {}
    for key in settings_of(cls):
        for name in {key, key.rpartition(".")[2], *OTHER_NAMES.get(key, "").split()}:
            keys_by_name.setdefault(name, []).append(key)
    typed = typed.strip("-").replace("-", "_")
    last = typed.rpartition(".")[2]
    for text, cutoff in ((typed, 1.0), (last, 1.0), (typed, 0.75), (last, 0.75)):
        if matches := get_close_matches(text, keys_by_name, n=1, cutoff=cutoff):
            return keys_by_name[matches[0]]
    return []


def _build(cls: type[C], below: _Layer, above: _Layer, problems: list[str]) -> C:
    """Lay `above` over `below`, in which it replaces the groups that it excludes too, and validate."""
    infos = settings_of(cls)
    rivals = {rival for key, entry in above.items() if entry.value is not None for rival in infos[key].rivals}
    layer = _without(below, {*above, *rivals}) | above
    nested: dict[str, Any] = {}
    for key, entry in layer.items():
        section, _, name = key.rpartition(".")
        inside = nested.setdefault(section, {}) if section else nested
        inside[name] = entry.value
    try:
        config = cls.model_validate(nested)
    except ValidationError as error:
        raise ConfigError([*problems, *_explained(cls, layer, error)]) from None
    for text, keys in () if problems else config.contradictions():
        origins = ", ".join(f"{key}: {layer[key].origin}" for key in keys if key in layer)
        problems.append(f"{text} ({origins})" if origins else text)
    if problems:
        raise ConfigError(problems)
    return config


def _explained(cls: type[Settings], layer: _Layer, error: ValidationError) -> Iterator[str]:
    """Yield a sentence for each wrong setting: what was given, and what is allowed."""
    details: dict[str, list[ErrorDetails]] = {}  # a union has one for each type, a list for each item
    for detail in error.errors(include_url=False):
        section, *names = map(str, detail["loc"])
        key = f"{section}.{names[0]}" if names else section
        details.setdefault(key if key in settings_of(cls) else section, []).append(detail)
    for key, of_key in details.items():
        info, entry = settings_of(cls).get(key), layer.get(key)
        if entry is None:
            assert info is not None
            yield f"{key} is needed: {info.meaning}"
            continue
        allowed = " or ".join(dict.fromkeys(map(_allowed, of_key)))
        if info and info.choices and isinstance(entry.value, str):
            similar = get_close_matches(entry.value, info.choices, n=1)
            allowed = (
                f"did you mean {similar[0]}?" if similar else f"must be one of {', '.join(info.choices)}"
            )
        yield f"{key} = {brief(write_yaml(entry.value))} ({entry.origin}): {allowed}"


def _allowed(detail: ErrorDetails) -> str:
    """Return pydantic's message, such as "Input should be a valid integer", as what a setting must be."""
    items = [part for part in detail["loc"] if isinstance(part, int)]
    message = "must be given" if detail["type"] == "missing" else detail["msg"]
    message = re.sub(r"^\w+ should ", "must ", message).replace(" after validation", "")
    message = message.replace("valid tuple", "list").replace("valid dictionary or instance of", "section of")
    return f"item {items[-1] + 1} {message}" if items else message


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


def read_yaml(text: str | bytes, name: str, key: str = "") -> list[Entry]:
    """Return the values in the file `name` by dotted key, or, with `key`, those of that one argument."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        return list(_walk(loader, node, key, name, 0 if key else 1)) if node else [Entry(key, None, name)]
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark and not key else ""
        raise ValueError(f"{name}{line}: {error.problem}") from None
    except (yaml.YAMLError, ValueError, KeyError, AttributeError):  # such as `!!bool x`
        raise ValueError(f"{name}: cannot be read as YAML") from None


def _walk(loader: _Loader, node: yaml.Node, key: str, name: str, line: int) -> Iterator[Entry]:
    """Yield the values inside a node; `line` is 0 in an argument."""
    if isinstance(node, yaml.MappingNode) and node.value:
        for name_node, inner in node.value:
            inner_key = f"{key}.{loader.construct_object(name_node, deep=True)}".removeprefix(".")
            yield from _walk(loader, inner, inner_key, name, line and name_node.start_mark.line + 1)
    else:
        yield Entry(key, loader.construct_object(node, deep=True), f"{name}:{line}" if line else name)


def write_yaml(value: object) -> str:
    """Return `value` on one line of YAML, numbers without a needless fraction."""
    text: str = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=2**30, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def _represent_float(dumper: _Dumper, value: float) -> yaml.Node:
    is_whole = value.is_integer() and abs(value) < 1e15
    return dumper.represent_int(int(value)) if is_whole else dumper.represent_float(value)


_Dumper.add_representer(float, _represent_float)
_Dumper.add_multi_representer(object, lambda dumper, value: dumper.represent_str(str(value)))


def to_yaml(config: Settings) -> str:
    """Return every setting as YAML that loads back to an equal config, each with its meaning."""
    cls = type(config)
    lines: list[str] = []
    section = ""
    for key, value in values(config).items():
        prefix, _, name = key.rpartition(".")
        if prefix != section:
            lines.append("")
        if prefix and prefix != section:
            inner = section_of(cls.model_fields[prefix].annotation)
            lines += [f"# {inner.__doc__}" if inner else "", f"{prefix}:"]
        section = prefix
        line = f"{'  ' if prefix else ''}{name}: {write_yaml(value)}"
        lines.append(f"{line:<{COLUMN - 2}}  # {settings_of(cls)[key].meaning}")
    return "\n".join(lines) + "\n"
