"""Load settings: defaults, then a YAML file of differences, then `section.name=value` on the command line.

pydantic checks the values; all mistakes are reported together, each with its origin.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from dino_vit.config import yaml
from dino_vit.config.settings import (
    C,
    ConfigError,
    Problem,
    Settings,
    as_tuples,
    sections,
    settings_of,
    values,
)
from dino_vit.config.yaml import Entry
from dino_vit.core import log
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


_Layer = dict[str, Entry]  # by dotted key


def load(cls: type[C], file: Path | None = None, overrides: Sequence[str] | Mapping[str, object] = ()) -> C:
    """Return the defaults of `cls` changed by a YAML file, then by `section.name=value` texts or values."""
    problems: list[Problem] = []
    below = _layer(cls, yaml.read(file.read_bytes(), str(file)) if file else [], problems)
    if isinstance(overrides, Mapping):
        return _build(cls, below, _layer(cls, _flat(overrides), problems), problems)
    above: _Layer = {}
    for text in overrides:
        layer = _layer(cls, _read_override(cls, text, problems), problems)
        above = _without(above, layer) | layer
    return _build(cls, below, above, problems)


def replace(config: C, changes: Mapping[str, object]) -> C:
    """Return `config` with other values for some dotted keys, validated as a whole again."""
    cls, problems = type(config), list[Problem]()
    below = {key: Entry(key, value, "unchanged") for key, value in values(config, given=True).items()}
    return _build(cls, below, _layer(cls, _flat(changes), problems), problems)


def _flat(nested: Mapping[str, object], prefix: str = "") -> list[Entry]:
    """Return values by dotted key, or by section and name, as entries."""
    entries = []
    for name, value in nested.items():
        inside = _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else []
        entries += inside or [Entry(f"{prefix}{name}", value, "in code")]
    return entries


def _read_override(cls: type[Settings], text: str, problems: list[Problem]) -> list[Entry]:
    key, equals, value = text.partition("=")
    if not equals:
        guesses = [f"write {key}=..." for key in nearest(text, cls) if key in settings_of(cls)]
        hint = [*guesses, "write settings as name=value"][0]
        problems.append(Problem(f"{brief(text)!r} on the command line is not key=value; {hint}", ()))
        return []
    info = settings_of(cls).get(key)
    if info and info.takes_text and value != "null":
        return [Entry(key, value, "command line")]
    try:
        return yaml.read(value, "command line", key)
    except ValueError as error:
        problems.append(Problem(f"{brief(text)} ({error})", (key,)))
        return []


def _layer(cls: type[Settings], entries: Iterable[Entry], problems: list[Problem]) -> _Layer:
    """Return the entries that are settings, and report the others."""
    layer: _Layer = {}
    for given, value, origin in entries:
        key = _current_name(cls, given)
        is_empty = value in (None, {}) and key in ("", *sections(cls))  # a file or section without settings
        if key in layer:
            text = f"{key} is given twice ({layer[key].origin} and {origin}); keep one"
            problems.append(Problem(text, (key,)))
        elif key in settings_of(cls):
            layer[key] = Entry(key, value, origin)
        elif not is_empty and not (key in FIXED and as_tuples(value) == FIXED[key]):
            problems.append(_unknown(cls, key, origin))
    return layer


def _current_name(cls: type[Settings], key: str) -> str:
    section, _, name = key.partition(".")
    current = RENAMED.get(key) or (f"{RENAMED[section]}.{name}" if section in RENAMED else key)
    if current not in settings_of(cls) or current == key:
        return key
    _say_renamed(section if section in RENAMED else key)
    return current


@cache
def _say_renamed(old: str) -> None:
    log.warning("%s is called %s now; the next version will refuse the old name", old, RENAMED[old])


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
    if key in FIXED:
        text = f"{key} is no longer a setting ({origin}); its value is fixed at {yaml.write(FIXED[key])}"
        return Problem(text, (key,))
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
    for key in settings_of(cls):
        for name in {key, key.rpartition(".")[2], *OTHER_NAMES.get(key, "").split()}:
            keys_by_name.setdefault(name, []).append(key)
    typed = typed.strip("-").replace("-", "_")
    last = typed.rpartition(".")[2]
    for text, cutoff in ((typed, 1.0), (last, 1.0), (typed, 0.75), (last, 0.75)):
        if matches := get_close_matches(text, keys_by_name, n=1, cutoff=cutoff):
            return keys_by_name[matches[0]]
    return []


def _build(cls: type[C], below: _Layer, above: _Layer, problems: list[Problem]) -> C:
    """Lay `above` over `below`, in which it replaces the groups that it excludes too, and validate."""
    infos = settings_of(cls)
    rivals = {rival for key, entry in above.items() if entry.value is not None for rival in infos[key].rivals}
    layer = _without(below, {*above, *rivals}) | above
    config, invalid = _validate(cls, layer)
    problems += invalid
    # Check for contradictions without the wrong settings, to report everything at once and nothing twice.
    wrong = {key for problem in problems for key in problem.keys}
    wrong |= {rival for key in wrong & infos.keys() for rival in infos[key].rivals}
    if wrong:
        config, _ = _validate(cls, _without(layer, wrong))
    for text, keys in config.contradictions() if config else ():
        if not wrong & set(keys):
            origins = ", ".join(f"{key}: {layer[key].origin}" for key in keys if key in layer)
            problems.append(Problem(f"{text} ({origins})" if origins else text, keys))
    if config is None or problems:
        raise ConfigError(problems)
    return config


def _validate(cls: type[C], layer: _Layer) -> tuple[C | None, list[Problem]]:
    nested: dict[str, Any] = {}
    for key, entry in layer.items():
        section, _, name = key.rpartition(".")
        inside = nested.setdefault(section, {}) if section else nested
        inside[name] = entry.value
    try:
        return cls.model_validate(nested), []
    except ValidationError as error:
        details: dict[str, list[ErrorDetails]] = {}  # a union has one for each type, a list for each item
        for detail in error.errors(include_url=False):
            details.setdefault(_key_of(cls, detail), []).append(detail)
    return None, [_explain(cls, layer.get(key), key, details[key]) for key in details]


def _key_of(cls: type[Settings], detail: ErrorDetails) -> str:
    """Return the dotted key of the setting that an error is about; its last names are of types and items."""
    section, *names = map(str, detail["loc"])
    key = f"{section}.{names[0]}" if names else section
    return key if key in settings_of(cls) else section


def _explain(cls: type[Settings], entry: Entry | None, key: str, details: list[ErrorDetails]) -> Problem:
    """Return an error of pydantic as a sentence: what was given, and what is allowed."""
    if entry is None:
        needed = settings_of(cls)[key]
        choices = f", one of {', '.join(needed.choices)}" if needed.choices else ""
        return Problem(f"{key} is needed: {needed.doc}{choices}", (key, key.partition(".")[0]))
    allowed = " or ".join(dict.fromkeys(map(_allowed, details)))
    info, value = settings_of(cls).get(key), entry.value
    if info and isinstance(value, str) and (similar := get_close_matches(value, info.choices, n=1)):
        allowed = f"did you mean {similar[0]}?"
    return Problem(f"{key} = {brief(yaml.write(entry.value))} ({entry.origin}): {allowed}", (key,))


def _allowed(detail: ErrorDetails) -> str:
    """Return pydantic's message, such as "Input should be a valid integer", as what a setting must be."""
    items = [part for part in detail["loc"] if isinstance(part, int)]
    message = "must be given" if detail["type"] == "missing" else detail["msg"]
    message = re.sub(r"^\w+ should ", "must ", message).replace("valid tuple", "list")
    message = message.replace("valid dictionary or instance of", "section of").replace(
        " after validation", ""
    )
    return f"item {items[-1] + 1} {message}" if items else message
