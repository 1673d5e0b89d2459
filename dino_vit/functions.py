"""The commands of `dino-vit` as functions: the same settings, results instead of exit codes.

    run = dino_vit.pretrain("photos", "runs/photos", budget={"minutes": 20})
    print(dino_vit.knn("photos", "runs/photos").figure)

Each takes what its command takes by position, then settings by keyword: a section as a dictionary
(`optim={"lr": 1e-3}`), or its settings by their dotted name (`**{"optim.lr": 1e-3}`). `config` is a file of
settings, or an object of them, that these change. A mistake raises a ValueError with the sentence that the
command would print. Python shows a result as the command prints it; `verbose=False` logs warnings only.
Results are written if `output` is given; if they cannot be, the error has the result as its `.result`.

A source may be an object of your own: with a length and `read(i)`, or a `torch.utils.data.Dataset` of images
(`data/stores/calls.py`); "augment.module" a module on batches of views from 0 to 1. What `pretrain` returns
is taken for weights.
"""

import hashlib
import os
from collections.abc import Callable, Mapping
from inspect import Parameter, Signature, cleandoc, signature
from pathlib import Path
from typing import Any

from dino_vit.commands import COMMANDS
from dino_vit.config.loading import list_settings, load
from dino_vit.config.objects import pass_object, title_of
from dino_vit.config.settings import Settings, flat, settings_of
from dino_vit.core.process import open_closed_streams
from dino_vit.core.text import log_shown

OBJECTS = "source", "train", "data.source"  # settings that take an object of the caller too
MODULE = "augment.module"  # and this a module or a function


def function_of(name: str) -> Callable[..., Any]:
    """Return the function of a command; its module is imported now."""
    command = COMMANDS[name]
    cls, run = command.config_class, command.run
    hooks = list(signature(run).parameters.values())[1:]
    positional = {key.rpartition(".")[2]: key for key in cls.positional}
    taken = _signature(cls, positional, hooks)

    def function(*args: object, config: object = None, verbose: bool = True, **keywords: object) -> object:
        from dino_vit.core.invocation import invoked  # imports torch

        open_closed_streams()
        called = {hook.name: keywords.pop(hook.name, None) for hook in hooks}
        named = {key: keywords.pop(key) for key in taken.parameters.keys() & keywords.keys()}
        given = taken.bind_partial(*args, **named).arguments  # what is missing may be in `config`
        settings = keywords | {positional.get(name, name): value for name, value in given.items()}
        ready: Any = _config(cls, config, _with_objects_named(settings))
        with log_shown(verbose), invoked() as invocation:
            invocation.result = result = run(ready, **called)
        if name != "pretrain":
            return result
        from dino_vit.run_folder import RunFolder  # imports torch

        return RunFolder(ready.output)

    function.__name__ = function.__qualname__ = name.replace("-", "_")
    function.__module__ = "dino_vit"
    texts = [str(cls.__doc__), cleandoc(str(run.__doc__))]
    texts.append("The settings and their defaults:")
    function.__doc__ = "\n\n".join([*texts, f"{list_settings(cls)}\n"])
    function.__signature__ = taken  # type: ignore[attr-defined]
    return function


def _signature(cls: type[Settings], positional: Mapping[str, str], hooks: list[Parameter]) -> Signature:
    """Return what the function of a command takes; the types are in `__init__.pyi`."""
    infos, parameters = settings_of(cls), list[Parameter]()
    keyword_only = {key: key for key in cls.model_fields if key not in positional}
    for title, key in {**positional, **keyword_only}.items():
        info: Any = infos.get(key)  # of a section there is none
        default = {} if info is None else Parameter.empty if info.required else info.default
        kind = Parameter.POSITIONAL_OR_KEYWORD if title in positional else Parameter.KEYWORD_ONLY
        parameters.append(Parameter(title, kind, default=default))
    config = Parameter("config", Parameter.KEYWORD_ONLY, default=None)
    verbose = Parameter("verbose", Parameter.KEYWORD_ONLY, default=True)
    return Signature([*parameters, *hooks, config, verbose])


def _config(cls: type[Settings], config: object, settings: Mapping[str, Any]) -> Settings:
    """Return the settings of a command, validated."""
    if isinstance(config, cls):
        return load(cls, config, settings)
    if config is not None and not isinstance(config, str | os.PathLike):
        raise TypeError(f"config must be a file or a {cls.__name__}, not a {type(config).__name__}")
    return load(cls, None if config is None else Path(config), settings)


def _with_objects_named(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by dotted key, with the names of objects where they are objects."""
    named = flat(settings)
    for key in named.keys() & {MODULE, *OBJECTS}:
        value: Any = named[key]
        if isinstance(value, str | os.PathLike | None):
            continue
        if key == MODULE:
            named[key] = pass_object(value, title_of(value))
        else:
            from dino_vit.data.stores.calls import names_sources, wrap  # import torch

            if not names_sources(value):
                source = wrap(value)
                digest = hashlib.sha256(source.fingerprint.encode()).hexdigest()
                named[key] = pass_object(value, f"{title_of(value)}-{digest[:12]}")
    return named
