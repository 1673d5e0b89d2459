"""Label images by a few that have labels: a table with confidences."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from dino_vit.config.commands import PredictConfig
from dino_vit.config.objects import is_object
from dino_vit.config.outputs import check_outputs
from dino_vit.config.settings import Task
from dino_vit.core import log
from dino_vit.core.distributed import agree, is_main_process
from dino_vit.core.invocation import after_figures
from dino_vit.core.runtime import start_processes
from dino_vit.core.text import Result, brief, plural, public
from dino_vit.data.label_files import SEPARATOR, UNSURE
from dino_vit.data.labels import NO_LABELS
from dino_vit.data.open import open_source
from dino_vit.eval.classifier_training import TrainedClassifier, learn_nothing, train_classifier
from dino_vit.eval.label_table import summarise, sure_rows, tabulate, with_given, write_table
from dino_vit.eval.origins import read_origins
from dino_vit.eval.pooled import pool_features
from dino_vit.eval.results import to_jsonable, write_results
from dino_vit.eval.sets import LabelledSubset, Rows, images_to_label, open_subset, refuse_same_images
from dino_vit.eval.wrong_labels import Doubts
from dino_vit.features.frozen import FrozenBackbone, frozen_backbones
from dino_vit.features.readings import joined_features
from dino_vit.weights.classifier import (
    ImageClassifier,
    read_classifier,
    read_classifier_facts,
    save_classifier,
)
from dino_vit.weights.read_file import check_weights


@dataclass(frozen=True, kw_only=True, repr=False)
class LabelPredictions(Result):
    """Labels for the images that had none, with how sure they are, and a table of all images."""

    names: list[str]
    labels: list[str] | list[list[str]]  # of each image its class, or several
    confidence: NDArray[np.float64] | None  # probability that a label is right; None: too few labels to say
    classes: tuple[str, ...]  # or the names of labels, by the columns of `outputs`
    classifier: ImageClassifier | None  # None: all images had labels
    features: Tensor  # (images, d)
    spread: Tensor | None  # the probabilities, where labels spread; none without a classifier
    table: pa.Table  # of all images
    details: dict[str, Any]  # what the JSON file holds
    path: Path | None

    @cached_property
    def columns(self) -> dict[str, list[Any]]:
        """The columns of the table of all images, for pandas.DataFrame."""
        columns: dict[str, list[Any]] = self.table.to_pydict()
        return columns

    @cached_property
    def outputs(self) -> NDArray[np.float32]:
        """The probabilities (images, classes), computed when asked for: of many images they are large."""
        found = self.spread
        if found is None:
            assert self.classifier is not None
            found = self.classifier.of_features(self.features)
        outputs: NDArray[np.float32] = found.cpu().numpy()
        return outputs


def run(config: PredictConfig) -> LabelPredictions:
    """Label images; with an output, write the table and JSON."""
    start_processes()
    files = _files(config)
    check_outputs(config, *files.values())
    check_weights(config.weights)
    learned, images = agree("images", lambda: open_images(config), _describe_images)
    names = images.source.distinct_names(range(len(images.source)))
    # Read now, as the file of labels may be another after hours of work.
    origins, unsure = np.array([], np.str_), set[str]()
    if learned is not None:
        origins = read_origins(config.train or config.source, config.labels, learned)
    if learned is not None and learned.source is images.source:
        are_unsure = read_origins(config.source, config.labels, images) == UNSURE
        unsure = {names[index] for index in images.indices[are_unsure]}
    output = files.get("table")
    if output and output.suffix == ".csv" and images.task == "multilabel":
        _refuse_separators(images.classes, output)
    frozen = frozen_backbones(config)  # after what is cheaper to find fault with
    if learned is None:
        fitted, queries, indices = _read(config, frozen, images)
    else:
        pool = pool_features(config, frozen, learned, images, origins)
        fitted = train_classifier(pool) if len(pool.others) or config.classifier else learn_nothing(pool)
        tokens = fitted.classifier.facts.tokens if fitted.classifier else pool.spec.tokens
        queries, indices = pool.select(tokens, pool.others), pool.indices
    guessed = table = tabulate(queries, [names[index] for index in indices], fitted, unsure)
    if learned is not None and learned.source is images.source:
        table = with_given(guessed, pool)
    lines = [*fitted.lines, *_doubts(fitted, files)]
    origin = {"settings": config.model_dump(mode="json"), "weights": frozen.describe_weights()}
    counts = {"images": len(table), "guessed": len(guessed)}
    details = to_jsonable({**origin, **fitted.details, **counts})
    if output and is_main_process():
        with after_figures():
            _write(files, table, details, fitted.doubts)
    lines += summarise(table, guessed, images.task, files, config.confident)
    lines += _next_step(config, images.task, guessed["origin"].to_pylist()) if len(guessed) else ()
    if config.classifier and fitted.classifier and is_main_process():
        with after_figures():
            save_classifier(fitted.classifier, files["classifier"], frozen.transform)
            what = "the classifier with its backbone, as weights of predict and of export"
            lines.append(f"{config.classifier}: {what}{fitted.kept}")
    return LabelPredictions(
        names=guessed["name"].to_pylist(),
        labels=guessed["label"].to_pylist(),
        confidence=guessed["confidence"].to_numpy() if "confidence" in guessed.column_names else None,
        classes=images.classes,
        classifier=fitted.classifier,
        features=queries,
        spread=fitted.spread,
        table=table,
        details=details,
        path=output,
        text="\n".join(lines),
    )


def _refuse_separators(labels: Sequence[str], table: Path) -> None:
    """Raise for a label that would be read from a CSV as two."""
    if joined := next((name for name in labels if SEPARATOR in name), None):
        text = f"the label {brief(joined)!r} contains {SEPARATOR!r}, which separates labels in a CSV"
        raise ValueError(f"{text}; give output={table.with_suffix('.parquet')}")


def _files(config: PredictConfig) -> dict[str, Path]:
    """Return the files to write."""
    files = dict[str, Path]()
    if config.output is not None:
        table = Path(config.output)
        files = {"table": table, "about": table.with_suffix(".json")}
        files["sure"] = table.with_name(f"{table.stem}-sure{table.suffix}")
        files["doubtful"] = table.with_name(f"{table.stem}-doubtful.csv")
    elif config.confident is not None:
        raise ValueError("confident writes a table beside output, which is not given")
    return files | ({"classifier": Path(config.classifier)} if config.classifier else {})


def _write(files: Mapping[str, Path], table: pa.Table, details: Mapping[str, Any], doubts: Doubts) -> None:
    """Write the table, its sure rows, its JSON and the labels that look wrong."""
    write_table(files["table"], table)
    for name in ("sure", "doubtful"):
        files[name].unlink(missing_ok=True)  # of an earlier call
    if least := details["settings"]["confident"]:
        write_table(files["sure"], sure_rows(table, least))
    write_results(files["about"], details)
    if doubts.columns:
        write_table(files["doubtful"], pa.table(doubts.columns))


def _doubts(fitted: TrainedClassifier, files: Mapping[str, Path]) -> Iterator[str]:
    """Say whether given labels look wrong, where anybody looked."""
    if line := fitted.doubts.line:
        listed = bool(fitted.doubts.columns) and "doubtful" in files
        yield f"{line}; {files['doubtful']} lists them" if listed else line


def open_images(config: PredictConfig) -> tuple[LabelledSubset | None, LabelledSubset]:
    """Open the images to learn from, none where weights are a classifier, and those to label."""
    name = public(config.source)
    is_labelled = config.train is not None or config.labels not in (None, NO_LABELS)
    if not is_labelled and (facts := read_classifier_facts(config.weights)):
        if given := sorted({"several", "tokens", "blocks", "whiten"} & config.given):
            text = f"{' and '.join(given)} are of labels to learn from"
            raise ValueError(f"{text}; the classifier in weights has its own: leave them out")
        source = open_source(config.source, NO_LABELS)
        none = np.full(len(source), -1)
        return None, LabelledSubset(name, source, np.arange(len(source)), none, facts.classes, facts.task)
    if config.train is None:
        source = open_source(config.source, config.labels, several=config.several)
        learned = open_subset(name, source)
        others, count = images_to_label(name, source, learned), plural(len(source), "label")
        if len(others):
            guesses = plural(len(others), "is a guess", "are guesses")
            log.info("%s are yours, %s", f"{len(learned):,} of {count}", guesses)
    else:
        learned = open_subset(config.train, open_source(config.train, config.labels, several=config.several))
        others = images_to_label(name, open_source(config.source, NO_LABELS), learned)
        refuse_same_images(name, others.source, f"train={learned.name}", learned.images)
    if len(others) or config.classifier:
        learned.require_two_classes()
    return learned, others


def _describe_images(images: tuple[LabelledSubset | None, LabelledSubset]) -> str:
    learned, others = images
    by = "a classifier" if learned is None else learned.fingerprint
    return f"{len(others):,} of {others.fingerprint} by {by}"


def _read(
    config: PredictConfig, frozen: FrozenBackbone, images: LabelledSubset
) -> tuple[TrainedClassifier, Tensor, Rows]:
    """Return the classifier in the file of weights, what it reads of images, and which it can read."""
    model: Any = frozen.model
    classifier = read_classifier(config.weights, model).to(frozen.device)
    facts = classifier.facts
    names = brief(", ".join(facts.classes), 100)
    lines = [
        f"{config.weights} knows {plural(len(facts.classes), 'class', 'classes')}: {names}",
        *facts.tested,
    ]
    details = {"classifier": facts.model_dump(mode="json")}
    title = f"features of {images.name}"
    values, indices = joined_features(frozen, images.source, spec=classifier.spec, title=title)
    fitted = TrainedClassifier(classifier, None, [], details, lines, Doubts())
    return fitted, torch.from_numpy(values).to(frozen.device), indices


def _next_step(config: PredictConfig, task: Task, origins: Sequence[str]) -> Iterator[str]:
    """Yield the command to look through the guesses, where a page can, or that nothing is left to do."""
    if {*origins} == {UNSURE}:
        count = plural(len(origins), "image")
        yield f"You have looked at all images. Only {count} that you were not sure of got a guess."
    elif config.output and task == "multiclass" and not is_object(config.source):
        labels, page = None if config.train else config.labels, "check.html"
        options = {"labels": labels, "guesses": config.output, "output": page}
        options["overwrite"] = "true" if Path(page).exists() else None
        given = [f"{key}={public(str(value))}" for key, value in options.items() if value]
        command = shlex.join(["dino-vit", "label", public(config.source), config.weights, *given])
        yield f"{command}: a page to check the guesses"
