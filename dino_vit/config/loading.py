"""Load settings: defaults, then the differences in a YAML file, then `key.sub=value` from the command line.

All mistakes are reported together, each with where it came from, what is allowed and the nearest known name.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from dino_vit.config import yaml
from dino_vit.config.settings import (
    FIELDS_ONLY,
    C,
    ConfigError,
    Problem,
    Settings,
    allowed,
    get,
    given_keys,
    parents,
    sections,
    settings_of,
)
from dino_vit.config.spelling import nearest
from dino_vit.config.yaml import Located


class _Given(NamedTuple):
    value: object
    origin: str


_Layer = dict[str, _Given]  # by dotted key


def load(cls: type[C], file: Path | None = None, overrides: Sequence[str] = ()) -> C:
    """Return the defaults of `cls` changed by a YAML file and then by `key.sub=value` texts."""
    problems: list[Problem] = []
    layer = {} if file is None else _read_file(cls, file, problems)
    above = _read_overrides(cls, overrides, problems)
    return _build(cls, _over(cls, layer, above), problems)


def replace(config: C, values: Mapping[str, object]) -> C:
    """Return `config` with other values for some dotted keys, checked as a whole again."""
    cls = type(config)
    layer = {key: _Given(get(config, key), "as before") for key in given_keys(config)}
    above = {key: _Given(value, "derived") for key, value in values.items() if key in settings_of(cls)}
    unknown = [_unknown(cls, key, "in code") for key in values if key not in settings_of(cls)]
    return _build(cls, _over(cls, layer, above), unknown)


def _over(cls: type[Settings], below: _Layer, above: _Layer) -> _Layer:
    """Lay `above` over `below`; a choice between exclusive groups that it makes replaces the one below."""
    for key, given in above.items():
        rivals = _rivals(cls, key) if given.value is not None else set()
        below = {old: kept for old, kept in below.items() if not _kin(key, old) and old not in rivals}
    return below | above


def _kin(key: str, other: str) -> bool:
    return key == other or key in parents(other) or other in parents(key)


def _rivals(cls: type[Settings], key: str) -> set[str]:
    """Return the keys of the groups that exclude the one of `key`."""
    prefix, dot, name = key.rpartition(".")
    groups = settings_of(cls)[key].section.one_of if key in settings_of(cls) else ()
    mine = any(name in group for group in groups)
    return {prefix + dot + other for group in groups if mine and name not in group for other in group}


def _read_file(cls: type[Settings], file: Path, problems: list[Problem]) -> _Layer:
    try:
        found = yaml.read(file.read_text(encoding="utf-8"), str(file))
    except OSError as error:
        raise ConfigError([Problem(f"cannot read {file}: {error.strerror}", ())]) from None
    except UnicodeDecodeError:
        raise ConfigError([Problem(f"cannot read {file}: it is no UTF-8 text", ())]) from None
    except ValueError as error:
        raise ConfigError([Problem(str(error), ())]) from None
    if not isinstance(found.value, dict):
        shown = "nothing" if found.value is None else "no mapping of names to values"
        hint = "write lines such as `optim: {lr: 1e-3}`, or {} for no differences"
        raise ConfigError([Problem(f"{file} holds {shown}; {hint}", ())])
    layer: _Layer = {}
    for key, item in found.value.items():
        _collect(cls, key, item, f"{file}:{item.line}", layer, problems, file=str(file))
    return layer


def _read_overrides(cls: type[Settings], overrides: Sequence[str], problems: list[Problem]) -> _Layer:
    layer: _Layer = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        one: _Layer = {}
        if not equals:
            problems.append(Problem(f"{text!r} on the command line is not key=value; {_hint(cls, text)}", ()))
        elif key in settings_of(cls) and settings_of(cls)[key].takes_text and value != "null":
            one[key] = _Given(value, "command line")
        else:
            try:
                found = yaml.read(value, f"{key}={value} on the command line")
                _collect(cls, key, found, "command line", one, problems)
            except ValueError as error:
                problems.append(Problem(str(error), (key,)))
        layer = {old: given for old, given in layer.items() if not any(_kin(new, old) for new in one)} | one
    return layer


def _collect(
    cls: type[Settings],
    key: str,
    found: Located,
    origin: str,
    layer: _Layer,
    problems: list[Problem],
    file: str = "",
) -> None:
    """Add what stands under `key` to `layer`, sections taken apart."""
    is_section, is_knob = key in sections(cls), key in settings_of(cls)
    if is_section and isinstance(found.value, dict):
        for name, item in found.value.items():
            where = f"{file}:{item.line}" if file else origin
            _collect(cls, f"{key}.{name}", item, where, layer, problems, file)
    elif is_knob and key in layer:
        problems.append(Problem(f"{key} is given twice ({layer[key].origin} and {origin}); keep one", (key,)))
    elif is_knob:
        layer[key] = _Given(_plain(found.value), origin)
    elif is_section and found.value is not None:  # an empty section changes nothing
        inner = ", ".join(name for name in settings_of(cls) if name.startswith(f"{key}."))
        problems.append(Problem(f"{key} ({origin}) is a section; set one of {inner}", (key,)))
    elif not is_section:
        problems.append(_unknown(cls, key, origin))


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {key: _plain(item.value) for key, item in value.items()}
    return value


def _unknown(cls: type[Settings], key: str, origin: str) -> Problem:
    guesses = nearest(key, _names(cls))
    section = key.rpartition(".")[0]
    if guesses:
        hint = f"did you mean {' or '.join(guesses)}?"
    elif section in sections(cls):
        hint = "it has " + ", ".join(name for name in settings_of(cls) if name.startswith(f"{section}."))
    else:
        single = [name for name in settings_of(cls) if "." not in name]
        hint = "there are " + ", ".join(dict.fromkeys([*single, *sections(cls)]))
    return Problem(f"{key} is not a setting ({origin}); {hint}", (key, *guesses))


def _names(cls: type[Settings]) -> dict[str, Sequence[str]]:
    """Return every key and section with its other names."""
    return {key: cls.also_known_as.get(key, "").split() for key in [*sections(cls), *settings_of(cls)]}


def _hint(cls: type[Settings], text: str) -> str:
    guesses = [f"{key}=..." for key in nearest(text, _names(cls)) if key in settings_of(cls)]
    sources = [f"{key}={text}" for key in settings_of(cls) if key.endswith("source")]
    return f"write {[*guesses, *sources, f'{next(iter(settings_of(cls)))}=...'][0]}"


def _build(cls: type[C], layer: _Layer, problems: list[Problem]) -> C:
    problems = problems + _validate(cls, layer, FIELDS_ONLY)[1]
    # Contradictions are looked for in what is left, so that all is reported at once and nothing that follows.
    wrong = {key for problem in problems for key in problem.keys}
    wrong |= {rival for key in wrong for rival in _rivals(cls, key)}
    rest = {key: given for key, given in layer.items() if not any(_kin(key, other) for other in wrong)}
    config, found = _validate(cls, rest)
    problems += [problem for problem in found if not wrong & set(problem.keys)]
    if config is None or problems:
        raise ConfigError(problems)
    return config


def _validate(cls: type[C], layer: _Layer, context: object = None) -> tuple[C | None, list[Problem]]:
    nested: dict[str, object] = {}
    for key, given in layer.items():
        *path, name = key.split(".")
        inner = nested
        for part in path:
            inner = inner.setdefault(part, {})  # type: ignore[assignment]
        inner[name] = given.value
    try:
        return cls.model_validate(nested, context=context), []
    except ValidationError as error:
        explained = [problem for detail in error.errors() for problem in _explain(cls, layer, detail)]
    return None, list({problem.keys or problem.text: problem for problem in explained}.values())


def _explain(cls: type[Settings], layer: _Layer, detail: ErrorDetails) -> Iterator[Problem]:
    """Say one pydantic error in our words."""
    error = detail.get("ctx", {}).get("error")
    if isinstance(error, ConfigError):
        for text, keys in error.problems:
            origins = ", ".join(f"{key}: {layer[key].origin}" for key in keys if key in layer)
            yield Problem(f"{text} ({origins})" if origins else text, keys)
        return
    loc = [str(part) for part in detail["loc"]]
    key = max(
        (".".join(loc[:n]) for n in range(1, len(loc) + 1) if ".".join(loc[:n]) in settings_of(cls)), key=len
    )
    one = settings_of(cls)[key]
    if key not in layer:
        yield Problem(f"{key} is needed: {one.doc}", (key, *parents(key)))
    else:
        given = layer[key]
        yield Problem(
            f"{key} = {yaml.write(given.value)} ({given.origin}): give {allowed(one.schema)}", (key,)
        )
