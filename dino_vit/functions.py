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
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from inspect import Parameter, Signature, cleandoc, signature
from operator import or_
from pathlib import Path
from types import GenericAlias, UnionType
from typing import Annotated, Any, TypedDict, Union, get_args, get_origin

from dino_vit.commands import COMMANDS
from dino_vit.config.loading import list_settings, load
from dino_vit.config.objects import pass_object, title_of
from dino_vit.config.settings import Settings, flat, settings_of
from dino_vit.core.process import open_closed_streams
from dino_vit.core.text import log_shown

OBJECTS = "source", "train", "data.source"  # settings that take an object of the caller too
MODULE = "augment.module"  # and this a module or a function
FileName = str | os.PathLike[str]


def function_of(name: str) -> Callable[..., Any]:
    """Return the function of a command; its module is imported now."""
    command = COMMANDS[name]
    cls, run = command.config_class, command.run
    hooks = list(signature(run).parameters.values())[1:]
    positional = {key.rpartition(".")[2]: key for key in cls.positional}
    taken = _signature(name, cls, positional)

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
        return _run_class()(ready.output) if name == "pretrain" else result

    function.__name__ = function.__qualname__ = name.replace("-", "_")
    function.__module__ = "dino_vit"
    texts = [str(cls.__doc__), cleandoc(str(run.__doc__))]
    texts.append("The settings and their defaults:")
    function.__doc__ = "\n\n".join([*texts, f"{list_settings(cls)}\n"])
    function.__signature__ = taken  # type: ignore[attr-defined]
    return function


def _signature(name: str, cls: type[Settings], positional: Mapping[str, str]) -> Signature:
    """Return what the function of a command takes and returns."""
    infos, run_signature = settings_of(cls), signature(COMMANDS[name].run, eval_str=True)
    keyword_only = {key: key for key in cls.model_fields if key not in positional}
    parameters = []
    for title, key in {**positional, **keyword_only}.items():
        info: Any = infos.get(key)  # of a section there is none
        default = {} if info is None else Parameter.empty if info.required else info.default
        kind = Parameter.POSITIONAL_OR_KEYWORD if title in positional else Parameter.KEYWORD_ONLY
        accepted = FileName | object if key in OBJECTS else _accepted(cls.model_fields[key].annotation)
        parameters.append(Parameter(title, kind, default=default, annotation=accepted))
    parameters += list(run_signature.parameters.values())[1:]
    config: Any = FileName | cls | None
    for title, accepted, default in (("config", config, None), ("verbose", bool, True)):
        parameters.append(Parameter(title, Parameter.KEYWORD_ONLY, default=default, annotation=accepted))
    returned = _run_class() if name == "pretrain" else run_signature.return_annotation
    return Signature(parameters, return_annotation=returned)


def _run_class() -> Any:
    from dino_vit.run_folder import RunFolder  # imports torch

    return RunFolder


def _accepted(annotation: Any) -> Any:
    """Return what a call may give for a setting of some type: paths for text, one value for a list of it."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if annotation is str:
        return FileName
    if origin is Annotated:
        return _accepted(inner[0])
    if origin is tuple:
        item = _accepted(inner[0])
        several: Any = GenericAlias(Sequence, (item,))
        return item | several if Ellipsis in inner else several
    if origin in (Union, UnionType):
        return reduce(or_, map(_accepted, inner))
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        keys = {name: _accepted(field.annotation) for name, field in annotation.model_fields.items()}
        section = TypedDict(f"_{annotation.__name__}", keys, total=False)  # type: ignore[misc]
        section.__module__, section.__doc__ = "dino_vit", annotation.__doc__
        return section
    return annotation


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
