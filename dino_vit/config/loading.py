"""Load settings: defaults, then a YAML file of differences, then `section.name=value` on the command line.

All mistakes are reported together, each with its origin, what is allowed and the nearest known name.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher, get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from dino_vit.config import yaml
from dino_vit.config.settings import (
    SKIP_CONTRADICTIONS,
    C,
    ConfigError,
    Problem,
    Settings,
    sections,
    settings_of,
)
from dino_vit.config.settings import values as all_values
from dino_vit.config.yaml import Entry
from dino_vit.core.text import brief

_Layer = dict[str, Entry]  # by dotted key
AS_NEAR = 0.05  # of two names that may both be meant
LARGEST_FILE = 1_000_000


def load(cls: type[C], file: Path | None = None, overrides: Sequence[str] | Mapping[str, object] = ()) -> C:
    """Return the defaults of `cls` changed by a YAML file, then by `section.name=value` texts or values."""
    problems: list[Problem] = []
    below = _layer(cls, _read_file(file) if file else [], problems)
    if isinstance(overrides, Mapping):
        return _build(cls, below, _layer(cls, _in_code(overrides), problems), problems)
    above: _Layer = {}
    for text in overrides:
        one = _layer(cls, _read_override(cls, text, problems), problems)
        above = _without(above, one) | one
    return _build(cls, below, above, problems)


def replace(config: C, values: Mapping[str, object]) -> C:
    """Return `config` with other values for some dotted keys, validated as a whole again."""
    cls, problems = type(config), list[Problem]()
    below = {key: Entry(key, value, "unchanged") for key, value in all_values(config, given=True).items()}
    return _build(cls, below, _layer(cls, _in_code(values), problems), problems)


def _in_code(values: Mapping[str, object]) -> list[Entry]:
    """Return values by dotted key, or by section and name, as entries of the types that settings have."""
    entries = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            entries += _in_code({f"{key}.{name}": inside for name, inside in value.items()})
        else:
            entries.append(Entry(key, _plain(value), "in code"))
    return entries


def _plain(value: object) -> object:
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _read_file(file: Path) -> list[Entry]:
    with file.open("rb") as opened:
        data = opened.read(LARGEST_FILE + 1)
    if len(data) > LARGEST_FILE:
        raise ValueError(f"{file} has more than {LARGEST_FILE:,} bytes and is no file of settings")
    return yaml.read(data, str(file))


def _read_override(cls: type[Settings], text: str, problems: list[Problem]) -> list[Entry]:
    key, equals, value = text.partition("=")
    info = settings_of(cls).get(key)
    if info and equals and info.takes_text and value != "null":
        return [Entry(key, value, "command line")]
    try:
        if equals:
            return yaml.read(value, "command line", key)
        said = f"{brief(text)!r} on the command line is not key=value"
        problems.append(Problem(f"{said}; {_hint(cls, text)}", ()))
    except ValueError as error:
        problems.append(Problem(f"{brief(text)} ({error})", (key,)))
    return []


def _layer(cls: type[Settings], entries: Sequence[Entry], problems: list[Problem]) -> _Layer:
    """Return the entries that are settings, and report the others."""
    layer: _Layer = {}
    for entry in entries:
        key, value, origin = entry
        is_empty = value in (None, {}) and key in ("", *sections(cls))  # a file or section without settings
        if key in layer:
            text = f"{key} is given twice ({layer[key].origin} and {origin}); keep one"
            problems.append(Problem(text, (key,)))
        elif key in settings_of(cls):
            layer[key] = entry
        elif not is_empty:
            problems.append(_unknown(cls, key, origin))
    return layer


def _without(layer: _Layer, keys: Iterable[str]) -> _Layer:
    """Return a layer without some settings; the key of a section covers all inside, and the reverse."""
    return {
        old: entry
        for old, entry in layer.items()
        if not any(f"{key}.".startswith(f"{old}.") or f"{old}.".startswith(f"{key}.") for key in keys)
    }


def _unknown(cls: type[Settings], key: str, origin: str) -> Problem:
    if not key:
        return Problem(f"{origin}: write settings as `name: value`", ())
    guesses = [] if key in sections(cls) else nearest(key, cls)
    section = key.partition(".")[0]
    if guesses:
        hint = f"did you mean {' or '.join(guesses)}?"
    elif section in sections(cls):
        inside = [name for name in settings_of(cls) if name.startswith(f"{section}.")]
        hint = f"the section {section} has {', '.join(inside)}"
    else:
        hint = f"there are {', '.join(cls.model_fields)}"
    return Problem(f"{brief(key)} is not a setting ({origin}); {hint}", (key, *guesses))


def nearest(typed: str, cls: type[Settings]) -> list[str]:
    """Return the dotted keys that a mistyped one may mean, by their own, their last and their other names."""
    keys_by_name: dict[str, list[str]] = {}
    for key in dict.fromkeys([*([] if "." in typed else sections(cls)), *settings_of(cls)]):
        for name in {key, key.rpartition(".")[2], *cls.also_known_as.get(key, "").split()}:
            keys_by_name.setdefault(name, []).append(key)
    typed = typed.strip("-").replace("-", "_")
    last = typed.rpartition(".")[2]
    for text, cutoff in ((typed, 1.0), (last, 1.0), (typed, 0.75), (last, 0.75)):
        if found := get_close_matches(text, keys_by_name, n=2, cutoff=cutoff):
            near = [name for name in found if _likeness(text, name) > _likeness(text, found[0]) - AS_NEAR]
            keys = dict.fromkeys(key for name in near for key in keys_by_name[name])
            return sorted(keys, key=lambda key: -_likeness(typed, key))[:4]
    return [key for key in settings_of(cls) if len(last) > 3 and last in key][:3]


def _likeness(one: str, other: str) -> float:
    return SequenceMatcher(None, one, other).ratio()


def _hint(cls: type[Settings], text: str) -> str:
    guesses = [f"{key}=..." for key in nearest(text, cls) if key in settings_of(cls)]
    sources = [f"{key}={text}" for key in settings_of(cls) if key.endswith("source")]
    return f"write {[*guesses, *sources, f'{next(iter(settings_of(cls)))}=...'][0]}"


def _rivals(cls: type[Settings], keys: Iterable[str]) -> set[str]:
    known = settings_of(cls)
    return {rival for key in keys if key in known for rival in known[key].rivals}


def _build(cls: type[C], below: _Layer, above: _Layer, problems: list[Problem]) -> C:
    """Lay `above` over `below`, in which it replaces the groups that it excludes too, and validate."""
    rivals = _rivals(cls, [key for key, entry in above.items() if entry.value is not None])
    layer = _without(below, {*above, *rivals}) | above
    problems = problems + _validate(cls, layer, SKIP_CONTRADICTIONS)[1]
    # Check for contradictions without the wrong settings, to report everything at once and nothing twice.
    wrong = {key for problem in problems for key in problem.keys}
    wrong |= _rivals(cls, wrong)
    config, found = _validate(cls, _without(layer, wrong))
    problems += [problem for problem in found if not wrong & set(problem.keys)]
    if config is None or problems:
        raise ConfigError(problems)
    return config


def _validate(cls: type[C], layer: _Layer, context: object = None) -> tuple[C | None, list[Problem]]:
    nested: dict[str, Any] = {}
    for key, entry in layer.items():
        section, _, name = key.rpartition(".")
        inside = nested.setdefault(section, {}) if section else nested
        # A list of one value needs no brackets.
        alone = settings_of(cls)[key].is_list and not isinstance(entry.value, tuple | None)
        inside[name] = (entry.value,) if alone else entry.value
    try:
        return cls.model_validate(nested, context=context), []
    except ValidationError as error:
        details = error.errors(include_url=False)
    # A union has an error for each of its types, and a list for each of its items.
    by_key = {_key_of(cls, detail): detail for detail in reversed(details)}
    return None, [problem for key in reversed(by_key) for problem in _explain(cls, layer, key, by_key[key])]


def _key_of(cls: type[Settings], detail: ErrorDetails) -> str:
    """Return the dotted key of the setting that an error is about; its last names are of items."""
    section, *names = map(str, detail["loc"]) if detail["loc"] else [""]
    key = f"{section}.{names[0]}" if names else section
    return key if key in settings_of(cls) else section


def _explain(cls: type[Settings], layer: _Layer, key: str, detail: ErrorDetails) -> Iterator[Problem]:
    """Yield an error of pydantic as problems with their origins."""
    error = detail.get("ctx", {}).get("error")
    if isinstance(error, ConfigError):
        for text, keys in error.problems:
            origins = ", ".join(f"{key}: {layer[key].origin}" for key in keys if key in layer)
            yield Problem(f"{text} ({origins})" if origins else text, keys)
        return
    info = settings_of(cls)[key]
    if key in layer:
        _, value, origin = layer[key]
        yield Problem(f"{key} = {brief(yaml.write(value))} ({origin}): must be {info.allowed}", (key,))
    else:
        text = f"{key} is needed: {info.doc}"
        yield Problem(f"{text}, {info.allowed}" if info.choices else text, (key, key.partition(".")[0]))
