"""Commands that classify labelled images, and what they return."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dino_vit.commands import Result
from dino_vit.eval.accuracy import Accuracy, Predictions
from dino_vit.eval.results import evaluation


@dataclass(frozen=True, kw_only=True)
class Classification(Result):
    """Accuracies on labelled images."""

    top1: Accuracy
    top5: Accuracy | None  # of five classes or fewer
    per_class: dict[str, Accuracy] = field(repr=False)  # top-1
    predictions: Predictions = field(repr=False)
    path: Path | None  # of the JSON file, if one was written
    details: dict[str, Any] = field(repr=False)  # all that the file holds


def classification(
    command: str,
    path: str | Path | None,
    title: str,
    predictions: Predictions,
    details: Mapping[str, Any],
    text: str,
) -> Classification:
    """Return a result with the figures of predictions; with a path, write the JSON file."""
    figures, path = predictions.figures(), None if path is None else Path(path)
    return Classification(
        top1=figures["top1"],
        top5=figures["top5"],
        per_class=figures["per_class"],
        predictions=predictions,
        path=path,
        details=evaluation(command, path, title, figures["top1"], details),
        text=text if path is None else f"{text}\n{path}",
    )
