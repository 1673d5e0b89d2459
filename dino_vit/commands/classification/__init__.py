"""Commands that classify labelled images, and what they return."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Self

from dino_vit.commands import Result, format_table
from dino_vit.eval.accuracy import Accuracy, Predictions


@dataclass(frozen=True, kw_only=True)
class Classification(Result):
    """Accuracies on labelled images."""

    top1: Accuracy
    top5: Accuracy
    per_class: dict[str, Accuracy] = field(repr=False)  # top-1
    predictions: Predictions | None = field(repr=False, default=None)  # None after fine-tuning
    path: Path  # of the JSON file
    details: dict[str, Any] = field(repr=False)  # all that the file holds

    @classmethod
    def of(cls, best: Mapping[str, Any], **others: Any) -> Self:
        """Return the result whose figures are `best`, a part of the details."""
        per_class = {name: Accuracy(**of_class) for name, of_class in best.get("per_class", {}).items()}
        top1, top5 = Accuracy(**best["top1"]), Accuracy(**best["top5"])
        return cls(top1=top1, top5=top5, per_class=per_class, **others)


def few_shot_result(
    shots: int, images: int, name: str, value: float, top1: Sequence[Accuracy]
) -> dict[str, Any]:
    """Return the accuracies of all repeats for the value of a setting, their mean and their deviation."""
    percents = [accuracy.percent for accuracy in top1]
    return {
        "shots": shots,
        "images": images,
        name: value,
        "mean": mean(percents),
        "standard_deviation": stdev(percents) if len(percents) > 1 else None,
        "top1": [accuracy._asdict() for accuracy in top1],
    }


def few_shot_table(results: Sequence[Mapping[str, Any]], setting: str, repeats: int) -> str:
    """Return the accuracies by number of training images, for the best value of a setting."""
    rows = []
    for few in results:
        deviation = "-" if few["standard_deviation"] is None else f"{few['standard_deviation']:.2f}"
        counts = f"{few['shots']:,}", f"{few['images']:,}"
        rows.append([*counts, f"{few[setting]:.3g}", f"{few['mean']:.2f}", deviation])
    return format_table(["images per class", "images", setting, "top-1 %", f"std of {repeats}"], rows)
