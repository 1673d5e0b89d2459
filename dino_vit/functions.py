"""The commands of `dino-vit` as functions: the same settings, results instead of exit codes.

    run = dino_vit.pretrain("photos", "runs/photos", **{"budget.minutes": 20})
    print(dino_vit.knn("photos", weights="runs/photos").top1)

Each takes what its command takes by position, then settings by keyword: those in sections by their dotted
name in a dictionary, or a section as a dictionary (`optim={"lr": 1e-3}`). `config` is a file of settings, or
a dictionary or object of them, that these change. `dino-vit COMMAND --help` lists them. A mistake raises a
ValueError with the sentence that the command would print. `verbose=False` prints nothing but warnings.

A source may be an object of your own: with a length and `read(i)`, or a `torch.utils.data.Dataset` of images
(see `data/custom.py`); "photometry.module" a module on batches of views from 0 to 1. What one function
returns another takes: a run for weights, a file of embeddings.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dino_vit.cli import COMMANDS, config_class, is_rank_0, run_function
from dino_vit.config.loading import load, replace
from dino_vit.config.objects import pass_object, title_of
from dino_vit.core import log
from dino_vit.core.native import set_torch_environment
from dino_vit.core.text import PrintableFormatter, printable_lines

SOURCES = "source", "train", "data.source", "originals", "queries", "distractors"  # these take objects too
MODULE = "photometry.module"  # and this
OF_WEIGHTS = "inspect-weights", "export"  # commands whose source is no images

if TYPE_CHECKING:
    from dino_vit.commands.classification import Classification
    from dino_vit.commands.compare import ComparisonResult
    from dino_vit.commands.demo import DemoResult
    from dino_vit.commands.embeddings.copies import CopiesResult
    from dino_vit.commands.embeddings.duplicates import DuplicatesResult
    from dino_vit.commands.embeddings.embed import EmbeddingFile
    from dino_vit.commands.embeddings.retrieval import RetrievalResult
    from dino_vit.commands.embeddings.search import SearchResult
    from dino_vit.commands.inspect_data import SourceFacts
    from dino_vit.commands.maps.attention import AttentionMaps
    from dino_vit.commands.maps.dense import DenseResult
    from dino_vit.commands.maps.propagate import PropagateResult
    from dino_vit.commands.pack import PackResult
    from dino_vit.commands.report import ReportFile
    from dino_vit.commands.weights import ExportResult, WeightsFacts
    from dino_vit.config.settings import Settings
    from dino_vit.run import Run
    from dino_vit.training.readings import Reading

    PathLike = str | os.PathLike[str]
    Config = Settings | Mapping[str, Any] | PathLike | None


def pretrain(
    source: object = None,
    output: PathLike | None = None,
    *,
    config: Config = None,
    verbose: bool = True,
    on_reading: Callable[[Reading], object] | None = None,
    on_checkpoint: Callable[[Path], object] | None = None,
    **settings: Any,
) -> Run:
    """Train a vision transformer on images without labels; a run in `output` resumes.

    `on_reading` is called with each reading (a line of metrics.jsonl), `on_checkpoint` with the path of each
    checkpoint, on rank 0; an exception in them ends the run. After a signal the state is saved, and
    KeyboardInterrupt (ctrl-C) or SystemExit raised; call the function again to go on.
    """
    from dino_vit.run import Run

    for name, hook in (("on_reading", on_reading), ("on_checkpoint", on_checkpoint)):
        if hook is not None and not callable(hook):
            raise TypeError(f"{name} must be a function, not {hook!r}")
    hooks = {"on_reading": on_reading, "on_checkpoint": on_checkpoint}
    ready: Any = _config("pretrain", config, settings, {"data.source": source, "output": output})
    _run("pretrain", ready, verbose, hooks)
    return Run(ready.output)


def knn(
    source: object = None, *, config: Config = None, verbose: bool = True, **settings: Any
) -> Classification:
    """Classify images by their nearest neighbours; the result's own figures are those of the first k."""
    return _call("knn", config, settings, verbose, source=source)


def linear(
    source: object = None, *, config: Config = None, verbose: bool = True, **settings: Any
) -> Classification:
    """Train linear classifiers on a frozen backbone; the result's own figures are those of the best."""
    return _call("linear", config, settings, verbose, source=source)


def finetune(
    source: object = None, *, config: Config = None, verbose: bool = True, **settings: Any
) -> Classification:
    """Train a whole network with a classifier on labelled images; a run in `output` resumes."""
    return _call("finetune", config, settings, verbose, source=source)


def dense(
    source: object = None, *, config: Config = None, verbose: bool = True, **settings: Any
) -> DenseResult:
    """Classify the pixels of images that have masks, by their patches."""
    return _call("dense", config, settings, verbose, source=source)


def compare(
    source: object = None, *, config: Config = None, verbose: bool = True, **settings: Any
) -> ComparisonResult:
    """Measure several weights on the same images, image by image, and say which is best."""
    return _call("compare", config, settings, verbose, source=source)


def attention(
    source: object = None, *, config: Config = None, verbose: bool = True, **settings: Any
) -> AttentionMaps:
    """Draw the self-attention maps of images."""
    return _call("attention", config, settings, verbose, source=source)


def propagate(
    source: object = None, *, config: Config = None, verbose: bool = True, **settings: Any
) -> PropagateResult:
    """Follow the objects of a video's first frame through the others, by the patches of the frames."""
    return _call("propagate", config, settings, verbose, source=source)


def embed(
    source: object = None, *, config: Config = None, verbose: bool = True, **settings: Any
) -> EmbeddingFile:
    """Write the embeddings of images to a file; the result has them as arrays, with names and labels."""
    return _call("embed", config, settings, verbose, source=source)


def search(
    embeddings: PathLike | None = None,
    images: PathLike | Sequence[PathLike] | None = None,
    *,
    config: Config = None,
    verbose: bool = True,
    **settings: Any,
) -> SearchResult:
    """Find the images nearest to given ones among those that were embedded."""
    return _call("search", config, settings, verbose, embeddings=embeddings, images=images)


def duplicates(
    embeddings: PathLike | None = None, *, config: Config = None, verbose: bool = True, **settings: Any
) -> DuplicatesResult:
    """List embedded images that are nearly the same."""
    return _call("duplicates", config, settings, verbose, embeddings=embeddings)


def copies(
    source: object = None, *, config: Config = None, verbose: bool = True, **settings: Any
) -> CopiesResult:
    """Find the originals of copies, own ones or made of photos, by the features of a frozen backbone."""
    return _call("copies", config, settings, verbose, source=source)


def retrieval(
    source: object = None, *, config: Config = None, verbose: bool = True, **settings: Any
) -> RetrievalResult:
    """Rank images by their similarity to queries; the figures say how early those of the same class come."""
    return _call("retrieval", config, settings, verbose, source=source)


def inspect_data(
    source: object = None, *, config: Config = None, verbose: bool = True, **settings: Any
) -> SourceFacts:
    """Inspect the images of a source before training on them."""
    return _call("inspect-data", config, settings, verbose, source=source)


def pack(
    source: object = None,
    output: PathLike | None = None,
    *,
    config: Config = None,
    verbose: bool = True,
    **settings: Any,
) -> PackResult:
    """Pack a source of images into tar shards."""
    return _call("pack", config, settings, verbose, source=source, output=output)


def report(
    run: PathLike | None = None, *, config: Config = None, verbose: bool = True, **settings: Any
) -> ReportFile | None:
    """Write one HTML file about a run; on rank 0 return it."""
    return _call("report", config, settings, verbose, run=run)


def inspect_weights(
    source: PathLike | None = None, *, config: Config = None, verbose: bool = True, **settings: Any
) -> WeightsFacts:
    """Return what is known of a weights file or run folder."""
    return _call("inspect-weights", config, settings, verbose, source=source)


def export(
    source: PathLike | None = None,
    out: PathLike | None = None,
    *,
    config: Config = None,
    verbose: bool = True,
    **settings: Any,
) -> ExportResult:
    """Write a backbone for timm, torchvision, Hugging Face or the DINO repository (`format`)."""
    return _call("export", config, settings, verbose, source=source, out=out)


def demo(*, config: Config = None, verbose: bool = True, **settings: Any) -> DemoResult:
    """Pretrain a small network on generated images, and show what it learned."""
    return _call("demo", config, settings, verbose)


def _call(name: str, config: Config, settings: Mapping[str, Any], verbose: bool, **positional: Any) -> Any:
    return _run(name, _config(name, config, settings, positional), verbose, {})


def _config(
    name: str, config: Config, settings: Mapping[str, Any], positional: Mapping[str, Any]
) -> Settings:
    """Return the settings of a command, validated."""
    cls = config_class(name)
    given = {key: value for key, value in positional.items() if value is not None}
    if both := [key for key in given if key in settings]:
        raise TypeError(f"{name.replace('-', '_')}() got {both[0]} by position and by name; give it once")
    values = {**settings, **given}
    if name not in OF_WEIGHTS:
        values = {key: _named(key, value) for key, value in values.items()}
    if isinstance(config, cls):
        return replace(config, values)
    if isinstance(config, Mapping):
        values = {**config, **values}
        config = None
    if config is not None and not isinstance(config, str | os.PathLike):
        raise TypeError(f"config must be a file or a {cls.__name__}, not a {type(config).__name__}")
    return load(cls, None if config is None else Path(config), values)


def _named(key: str, value: Any) -> Any:
    """Return the name of an object, where a setting takes one."""
    if isinstance(value, Mapping):
        return {name: _named(f"{key}.{name}", inside) for name, inside in value.items()}
    if value is None or isinstance(value, str | os.PathLike) or key not in (*SOURCES, MODULE):
        return value
    if key == MODULE:
        if not callable(value) or isinstance(value, type):
            raise TypeError(f"{MODULE} must be a module or a function, not {value!r}")
        return pass_object(value, title_of(value))
    from dino_vit.data.custom import CustomSource  # imports torch

    source = CustomSource(value)
    return pass_object(source, source.title)


def _run(name: str, config: Settings, verbose: bool, keywords: Mapping[str, Any]) -> Any:
    set_torch_environment()
    with _logging(verbose):
        result = run_function(name)(config, **keywords)
    if verbose and result is not None and is_rank_0():
        print(printable_lines(str(result)))
    return result


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


for _name in COMMANDS:
    _function = globals()[_name.replace("-", "_")]
    _function.__doc__ = (_function.__doc__ or "") + (
        f"\n\n    The settings, what they mean and their defaults: `dino-vit {_name} --help`.\n    "
    )
