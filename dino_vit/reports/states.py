"""The states of a run, and what of its records they follow from; docs/start/watch.md lists them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from dino_vit.config.loading import write_yaml
from dino_vit.config.pretrain import PretrainConfig, in_steps
from dino_vit.reports.metrics import Baseline, MetricsRecord
from dino_vit.reports.readings import COLLAPSES, STUCK_AT_LN, Diagnosis, above_raw_pixels, evaluations_of

# Of a shorter run that has not seen each image once nothing bad is said, but of steps that are not finite.
FEW_STEPS = 300
ENOUGH = 3  # evaluations before a run is said to have gained nothing
HALF = 0.5  # a rank below this share of the first, or of the best, has collapsed
RISES = 1.0  # points or dimensions; what rises less in the second half of a run hardly rises
FAR = 10.0  # points below raw pixels from which on more of the same is no advice
AWAKE = 0.01  # a loss that was stuck at ln(prototypes) has left it with this share of it below

KEEP_RANK = ("loss.centering", "loss.koleo_weight", "optim.lr")
ALL = (
    TOO_EARLY := Diagnosis("too early to say"),
    NOT_EVALUATED := Diagnosis("not evaluated"),
    LEARNING := Diagnosis("learning"),
    BELOW_PIXELS := Diagnosis("learning, but still below raw pixels"),
    MIXED := Diagnosis("better and worse than before training"),
    LOSING_RANK := Diagnosis("learning, but losing rank", KEEP_RANK),
    PAST_BEST := Diagnosis("past its best", ("budget",)),
    NO_BETTER := Diagnosis("no better than before training", ("recipe",)),
    WORSE := Diagnosis("worse than before training", ("recipe", "optim.lr")),
    COLLAPSING := Diagnosis("collapsing", KEEP_RANK),
    *COLLAPSES,
)
NOTHING_LEARNED = NO_BETTER, WORSE, COLLAPSING, *COLLAPSES
STATES = {diagnosis.state: diagnosis for diagnosis in ALL}


@dataclass(frozen=True)
class JudgedRun:
    """What a run is judged by; it has at least one record."""

    history: Sequence[MetricsRecord]
    config: PretrainConfig
    before: Baseline

    @cached_property
    def evaluations(self) -> list[MetricsRecord]:
        return evaluations_of(self.history)

    @property
    def last(self) -> MetricsRecord:
        return self.history[-1]

    @property
    def finished(self) -> bool:
        return self.last.step >= self.last.total_steps

    @property
    def is_short(self) -> bool:
        return self.last.step < FEW_STEPS and self.last.epoch < 1

    @property
    def is_still_stuck(self) -> bool:
        """Whether the loss was called stuck before, and has hardly moved since: noise brings it across."""
        last, before = self.last, self.history[-2:-1]
        if not before or before[0].state != STUCK_AT_LN.state or last.excess is None:
            return False
        return last.excess > -AWAKE * math.log(last.prototypes or 1)

    @property
    def is_far_below_pixels(self) -> bool:
        distance = above_raw_pixels(self.evaluations[-1], self.before) if self.evaluations else None
        return distance is not None and distance <= -FAR

    @property
    def is_flat(self) -> bool:
        """Whether accuracy has hardly risen in the last third of the run so far."""
        last = self.evaluations[-1] if self.evaluations else self.last
        if last.knn is None or len(self.evaluations) < ENOUGH:
            return False
        before = min(self.evaluations[:-1], key=lambda metrics: abs(3 * metrics.step - 2 * last.step))
        return or_lowest(last.knn) - or_lowest(before.knn) < RISES

    @property
    def is_evaluated_early(self) -> bool:
        """Whether it is too early for bad news: the teacher follows slowly, and a short dip is normal."""
        last = self.evaluations[-1]
        return len(self.evaluations) < ENOUGH and last.step < last.total_steps

    @property
    def best(self) -> MetricsRecord:
        return max(self.evaluations, key=lambda metrics: or_lowest(metrics.knn))

    @property
    def ranks(self) -> list[float]:
        """The effective ranks, the first before training."""
        return [or_lowest(self.before.rankme), *(metrics.rankme or 0.0 for metrics in self.evaluations)]

    @property
    def settled_step(self) -> int:
        """The step after the warm-up and the freezes."""
        config, last = self.config, self.last
        head_epochs = config.init.head_epochs if config.init else 0.0
        settled = max(config.optim.warmup_epochs, config.optim.freeze_last_layer_epochs, head_epochs)
        # At most 2^53, as files may hold anything.
        steps_per_epoch = round(min(last.step / last.epoch, 2.0**53)) if last.epoch else 0
        return round(in_steps(settled, steps_per_epoch))

    def length(self, factor: float) -> str:
        """Return the budget times a factor, as a setting."""
        unit = self.config.budget.unit
        value = getattr(self.config.budget, unit) * factor
        return f"budget.{unit}={write_yaml(float(f'{value:.2g}') if unit == 'minutes' else math.ceil(value))}"


def or_lowest(value: float | None) -> float:
    """Return a number that is not finite, or missing, as the lowest."""
    return value if value is not None and math.isfinite(value) else -math.inf
