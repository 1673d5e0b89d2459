"""Commands that classify labelled images, and what they return."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dino_vit.commands import Result
from dino_vit.eval.accuracy import Accuracy, Predictions, write_results


@dataclass(frozen=True, kw_only=True)
class Classification(Result):
    """Accuracies on labelled images."""

    top1: Accuracy
    top5: Accuracy
    per_class: dict[str, Accuracy] = field(repr=False)  # top-1
    predictions: Predictions = field(repr=False)
    path: Path  # of the JSON file
    details: dict[str, Any] = field(repr=False)  # all that the file holds


def write_classification(
    predictions: Predictions, path: Path, details: Mapping[str, Any], text: str
) -> Classification:
    """Write the JSON file, and return the result whose own figures are those of the predictions."""
    figures = predictions.figures()
    return Classification(
        top1=figures["top1"],
        top5=figures["top5"],
        per_class=figures["per_class"],
        predictions=predictions,
        path=path,
        details=write_results(path, details),
        text=f"{text}\n{path}",
    )
