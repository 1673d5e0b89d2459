"""Commands that classify labelled images, and what they return."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dino_vit.commands import Result
from dino_vit.eval.accuracy import Accuracy


class Predictions(NamedTuple):
    """The class of each image that could be read, as numbers of `classes`."""

    images: NDArray[np.int64]  # in the source
    predicted: NDArray[np.int64]
    targets: NDArray[np.int64]
    classes: tuple[str, ...]

    @classmethod
    def of(
        cls, ranked: Tensor, targets: Tensor, images: NDArray[np.int64], classes: Sequence[str]
    ) -> "Predictions":
        """Return the first of the ranked classes of each image."""
        return cls(images, ranked[:, 0].cpu().numpy(), targets.cpu().numpy(), tuple(classes))

    @property
    def right(self) -> NDArray[np.bool_]:
        """Which images were classified rightly."""
        return self.predicted == self.targets


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
        per_class = {name: Accuracy(**one) for name, one in best.get("per_class", {}).items()}
        top1, top5 = Accuracy(**best["top1"]), Accuracy(**best["top5"])
        return cls(top1=top1, top5=top5, per_class=per_class, **others)
