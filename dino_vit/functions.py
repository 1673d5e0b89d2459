"""The commands of `dino-vit` as functions: the same settings, results instead of exit codes.

    run = dino_vit.pretrain("photos", "runs/photos", **{"budget.minutes": 20})
    print(dino_vit.knn("photos", weights="runs/photos").top1)

Each takes what its command takes by position, then settings by keyword: those in sections by their dotted
name in a dictionary, or a section as a dictionary (`optim={"lr": 1e-3}`). `config` is a file of settings, or
an object of them, that these change. A mistake raises a ValueError with the sentence that the command would
print. `verbose=False` prints nothing but warnings.

A source may be an object of your own: with a length and `read(i)`, or a `torch.utils.data.Dataset` of images
(see `data/custom.py`); "augment.module" a module on batches of views from 0 to 1. What one function
returns another takes: a run for weights, a file of embeddings.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Any

from dino_vit.commands import COMMANDS
from dino_vit.config.loading import flat, list_settings, load, replace
from dino_vit.config.objects import pass_object, title_of
from dino_vit.config.settings import Settings, section_of
from dino_vit.core import log
from dino_vit.core.process import is_rank_0
from dino_vit.core.text import PrintableFormatter, printable_lines

OBJECTS = "source", "train", "data.source"  # settings that take an object of the caller too
EMBEDDINGS = "embeddings"  # takes what `embed` returned
MODULE = "augment.module"  # and this a module or a function


def function_of(name: str) -> Callable[..., Any]:
    """Return the function of a command; its module is imported now."""
    command = COMMANDS[name]
    cls, run = command.config_class, command.run
    hooks = list(signature(run).parameters.values())[1:]
    positional = {key.rpartition(".")[2]: key for key in cls.positional}

    def function(*args: object, **keywords: object) -> object:
        arguments = taken.bind(*args, **keywords).arguments
        config, verbose = arguments.pop("config", None), arguments.pop("verbose", True)
        called = {hook.name: arguments.pop(hook.name, None) for hook in hooks}
        settings = arguments.pop("settings", {})
        settings |= {positional.get(name, name): value for name, value in arguments.items()}
        ready: Any = _config(cls, config, _with_objects_named(settings))
        with _logging(verbose):
            result = run(ready, **called)
        if name == "pretrain":
            from dino_vit.run import Run

            return Run(ready.output)
        if verbose and result is not None and is_rank_0():
            print(printable_lines(str(result)))
        return result

    taken = _signature(cls, positional, hooks)
    function.__name__ = function.__qualname__ = name.replace("-", "_")
    function.__module__ = "dino_vit"
    function.__doc__ = (
        f"{cls.__doc__}\n\n{run.__doc__}\n\nThe settings and their defaults:\n{list_settings(cls)}\n"
    )
    function.__signature__ = taken  # type: ignore[attr-defined]
    return function


def _signature(cls: type[Settings], positional: Mapping[str, str], hooks: list[Parameter]) -> Signature:
    """Return what the function of a command takes; a setting without a default may come from `config`."""
    parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=None) for name in positional]
    for name, default in (("config", None), ("verbose", True)):
        parameters.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default))
    parameters += hooks
    for name, field in cls.model_fields.items():
        if name not in positional and not section_of(field.annotation):
            default = None if field.is_required() else field.default
            parameters.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default))
    return Signature([*parameters, Parameter("settings", Parameter.VAR_KEYWORD)])


def _config(cls: type[Settings], config: object, settings: Mapping[str, Any]) -> Settings:
    """Return the settings of a command, validated."""
    if isinstance(config, cls):
        return replace(config, settings)
    if config is not None and not isinstance(config, str | os.PathLike):
        raise TypeError(f"config must be a file or a {cls.__name__}, not a {type(config).__name__}")
    return load(cls, None if config is None else Path(config), settings)


def _with_objects_named(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by dotted key, with the names of objects where they are objects."""
    named = flat(settings)
    for key in named.keys() & {MODULE, EMBEDDINGS, *OBJECTS}:
        value: Any = named[key]
        if isinstance(value, str | os.PathLike | None):
            continue
        if key == MODULE:
            named[key] = pass_object(value, title_of(value))
        elif key == EMBEDDINGS:
            named[key] = value.path or pass_object(value.content, EMBEDDINGS)
        else:
            from dino_vit.data.custom import CustomSource  # imports torch

            source = CustomSource(value)
            named[key] = pass_object(source, source.title)
    return named


@contextmanager
def _logging(verbose: bool) -> Iterator[None]:
    """Hide the lines of the library meanwhile, or show them on stderr where no handler does."""
    level, handler = log.level, logging.StreamHandler(sys.stderr)
    handler.setFormatter(PrintableFormatter())
    shown = verbose and not log.hasHandlers()
    log.setLevel(logging.INFO if verbose else logging.WARNING)
    if shown:
        log.addHandler(handler)
    try:
        yield
    finally:
        log.setLevel(level)
        log.removeHandler(handler)
