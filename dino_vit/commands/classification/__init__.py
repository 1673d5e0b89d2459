"""Commands that classify labelled images, and what they return."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from dino_vit.commands import Result
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
