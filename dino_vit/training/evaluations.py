"""The evaluations of a run while it trains: its figures, the best of them, and what they are measured on."""

import json
import math
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from dino_vit.core.distributed import broadcast_int, is_main_process
from dino_vit.core.storage import digest
from dino_vit.eval.online import OnlineEvaluation, OnlineFigures
from dino_vit.models.student_teacher import Network
from dino_vit.reports.metrics import DECISIVE, Baseline


@dataclass
class Evaluations:
    """Evaluate the teacher with `online`, and note the best step."""

    online: OnlineEvaluation
    measured_on: str | None = None  # a digest of the images and labels
    best: dict[str, Any] | None = None  # figure, value, step
    best_written: dict[str, Any] | None = None  # with its checkpoint; counts if `best` cannot be written
    seconds: float = 0.0  # that the last evaluation took on rank 0
    initial: Network | None = None  # as before the first step, where that is still to be evaluated

    def evaluate(self, teacher: Network, step: int) -> OnlineFigures:
        """Evaluate the teacher; update the best result: k-NN by labels, otherwise the rank."""
        figures = self._measure(teacher)
        figure = next(name for name in DECISIVE if getattr(figures, name) is not None)
        value, best = getattr(figures, figure), self.best
        # A NaN is never the best. Rank 0 decides, since figures of others may differ by rounding, and a
        # checkpoint of shards needs all.
        if broadcast_int(math.isfinite(value) and (best is None or value > best["value"])):
            self.best = {"figure": figure, "value": value, "step": step}
        return figures

    def evaluate_baseline(self, teacher: Network) -> Baseline:
        """Evaluate the network before the first step and, on rank 0, what needs no network."""
        figures = self._measure(teacher)
        guesses = self.online.guesses() if is_main_process() else None
        return Baseline(**asdict(figures), **(asdict(guesses) if guesses else {}))

    def is_best(self, step: int) -> bool:
        """Tell whether the best evaluation is that of a step."""
        return self.best is not None and self.best["step"] == step

    def digest(self) -> str:
        """Return a digest of the images and labels that evaluations use."""
        online = self.online
        facts = {
            "images": [online.source.fingerprint, online.indices],
            "labels": online.targets.tolist(),
            "classes": list(online.source.labels.names) if online.has_labels else [],
        }
        return digest({}, {"labels": json.dumps(facts)})

    def _measure(self, teacher: Network) -> OnlineFigures:
        start = time.perf_counter()
        with torch.compiler.set_stance("force_eager"):  # its batches would be compiled size by size
            figures: OnlineFigures = teacher.run_unsharded(self.online)
        self.seconds = broadcast_int(round(1e6 * (time.perf_counter() - start))) / 1e6
        return figures
