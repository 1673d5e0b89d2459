"""Say what has come of a run: its state, the figures with how sure they are, and the one thing to try next.

Advice names a setting and its value, and has a measured cause: a collapse, features that are about colour, a
lost rank, figures that still rise. Before that it names how long to train.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from dino_vit.config.loading import write_yaml
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.training.diagnosis import (
    BELOW_PIXELS,
    COLLAPSING,
    ENOUGH,
    FEW_STEPS,
    HALF,
    KEEP_RANK,
    LEARNING,
    LOSING_RANK,
    MIXED,
    NO_BETTER,
    NOT_EVALUATED,
    PAST_BEST,
    PATIENCE,
    TOO_EARLY,
    WORSE,
    Diagnosis,
    diagnose,
    evaluation_text,
    evaluations_of,
    is_too_short,
    or_lowest,
)
from dino_vit.training.metrics import Baseline, MetricsRecord

# The share of its time that a run may wait for images before it gets advice.
WAITING = 0.2
WAITING_HELP = "docs/data.md (What is fast) says what helps"
# Features are about colour if it explains at least this share of them, and nearly as much as before training.
# On flowers and groceries it is 0.8 in untrained networks and where little was learned, 0.5 in good runs.
MUCH, NEARLY = 0.6, 0.85
# Where colours alone tell labels this share as well as the features do, the features need them.
TELLING = 0.5
# A loss that falls by less than this share in the last third of a run hardly falls.
FALLS = 0.01
# What a remedy sets, unless that is so already.
CHANGES: dict[str, Callable[[PretrainConfig], object]] = {
    "recipe": lambda config: "auto" if config.recipe != "auto" else None,
    "run.precision": lambda config: "bf16" if config.run.precision == "fp16" else None,
    "head.batch_norm": lambda config: None if config.head.batch_norm else True,
    "loss.centering": lambda config: "sinkhorn" if config.loss.centering == "ema" else None,
    "loss.koleo_weight": lambda config: 0.1 if config.loss.koleo_weight < 0.1 else None,
    "loss.teacher_temp": lambda config: 0.04 if config.loss.teacher_temp > 0.04 else None,
    "loss.patch_weight": lambda config: config.loss.patch_weight / 2,
    "optim.warmup_epochs": lambda config: 2 * config.optim.warmup_epochs or None,
    "optim.lr": lambda config: config.optim.lr / 2,
}


class Verdict(NamedTuple):
    """What is said of a run."""

    diagnosis: Diagnosis
    figures: str  # and how sure they make it
    advice: str

    @property
    def outcome(self) -> str:
        """The figures and the advice, in sentences."""
        return " ".join(filter(None, [f"{self.figures}.", self.advice]))

    def __str__(self) -> str:
        """The state, the figures and the advice."""
        return f"{self.diagnosis.state}: {self.outcome}"


def judge(history: Sequence[MetricsRecord], config: PretrainConfig, baseline: Baseline | None) -> Verdict:
    """Return what is said of a run: in its log, on its page and by `run.outcome`."""
    diagnosis = diagnose(history, config, baseline)
    figures = evaluation_text(history, baseline)
    if not figures:
        is_evaluated = config.run.eval_every or config.run.eval_every_steps
        figures = "there is no evaluation yet" if is_evaluated else "run.eval_every=null"
    return Verdict(diagnosis, figures, _advice(history, config, baseline, diagnosis) if history else "")


def waits_for_images(history: Sequence[MetricsRecord]) -> bool:
    """Tell whether the last few records are of a run that waits for images.

    The first record of all does not count: in its time workers and compiled networks start.
    """
    last = history[1:][-PATIENCE:]
    return len(last) == PATIENCE and all(metrics.data_wait > WAITING for metrics in last)


def _advice(
    history: Sequence[MetricsRecord], config: PretrainConfig, baseline: Baseline | None, diagnosis: Diagnosis
) -> str:
    """Return one thing to try, with its value and the cause that was measured; nothing if there is none."""
    last, evaluations = history[-1], evaluations_of(history)
    finished = last.step >= last.total_steps
    if is_too_short(last):
        enough = min(float(FEW_STEPS), last.step / last.epoch if last.epoch else math.inf) / last.step
        longer = f"The run was shorter than {FEW_STEPS} steps and an epoch: try {_length(config, enough)}."
        return longer if finished else ""
    if diagnosis in (TOO_EARLY, NOT_EVALUATED):
        return ""
    if diagnosis is PAST_BEST:
        best = max(evaluations, key=lambda metrics: or_lowest(metrics.knn))
        text = f"Try {_length(config, best.step / last.total_steps)}: k-NN was the best at step {best.step:,}"
        return f"{text} ({best.knn:.1f} %), and its checkpoint is kept."
    causes: list[str] = []
    if diagnosis in (LEARNING, BELOW_PIXELS, MIXED, NO_BETTER, WORSE):
        causes.append(_about_colour(evaluations[-1], config, baseline))
    if diagnosis in (MIXED, NO_BETTER, WORSE, LOSING_RANK, COLLAPSING):
        causes.append(_lost_rank(evaluations, config, baseline))
    if diagnosis in (LEARNING, BELOW_PIXELS, MIXED, NO_BETTER) and finished:
        # What still rises goes on; what does not needs another setting first.
        causes.insert(0 if diagnosis is LEARNING else len(causes), _still_improves(history, config))
    if cause := next(filter(None, causes), ""):
        return cause
    remedy = _remedy(config, diagnosis.remedies)
    unknown = "; no cause was measured" if diagnosis in (NO_BETTER, WORSE) else ""
    return f"Try {remedy}{unknown}." if remedy else ""


def _remedy(config: PretrainConfig, keys: Sequence[str]) -> str:
    """Return the first of some changes that is not in force yet."""
    if config.teacher.weights is not None:  # then most settings of the loss have no effect
        keys = [key for key in keys if key == "optim.lr"]
    values = ((key, CHANGES[key](config)) for key in keys)
    return next((f"{key}={write_yaml(value)}" for key, value in values if value is not None), "")


def _length(config: PretrainConfig, factor: float) -> str:
    """Return the budget times a factor, as a setting."""
    unit = config.budget.unit
    value = getattr(config.budget, unit) * factor
    return f"budget.{unit}={write_yaml(float(f'{value:.2g}') if unit == 'minutes' else math.ceil(value))}"


def _about_colour(metrics: MetricsRecord, config: PretrainConfig, baseline: Baseline | None) -> str:
    """Advise other colours where the features are about colour, and the labels are not."""
    colour, brightness = metrics.colour, metrics.brightness or 0.0
    before = baseline.colour if baseline else None
    augment = config.augment
    if baseline is None or before is None or colour is None or colour < max(MUCH, NEARLY * before):
        return ""
    if metrics.probe is not None and baseline.colours is not None:
        guessed = baseline.largest_class or 0.0
        if baseline.colours - guessed >= TELLING * (metrics.probe - guessed):
            return ""
    if brightness >= NEARLY * colour:
        what, share, first = "brightness", brightness, baseline.brightness or 0.0
        changes = {"brightness": 0.8, "contrast": 0.8}
    else:
        what, share, first = "colour", colour, before
        changes = {"grey": 0.5, "hue": 0.4, "saturation": 0.8}
    texts = [f"augment.{name}={value}" for name, value in changes.items() if getattr(augment, name) < value]
    if not texts or config.data.channels != 3 or augment.module:
        return ""
    few = "" if metrics.probe is None else ", but tells few of the labels"
    evidence = f"{100 * share:.0f} % of the features ({100 * first:.0f} % before training)"
    return f"Try {' '.join(texts)}: {what} explains {evidence}{few}."


def _lost_rank(
    evaluations: Sequence[MetricsRecord], config: PretrainConfig, baseline: Baseline | None
) -> str:
    """Advise what keeps the rank where it has fallen."""
    first = baseline.rankme if baseline else None
    ranks = [or_lowest(rank) for rank in (first, *(metrics.rankme for metrics in evaluations))]
    remedy = _remedy(config, KEEP_RANK)
    if not remedy or ranks[-1] >= HALF * max(ranks):
        return ""
    return f"Try {remedy}: the effective rank fell from {max(ranks):.1f} to {ranks[-1]:.1f}."


def _still_improves(history: Sequence[MetricsRecord], config: PretrainConfig) -> str:
    """Advise a longer run where the newest evaluation is the best, or the loss still falls."""
    longer, evaluations = f"Try {_length(config, 2)}", evaluations_of(history)
    has_labels = evaluations[-1].knn is not None
    fields = {"ridge probe": "probe", "k-NN": "knn"} if has_labels else {"effective rank": "rankme"}
    for title, field in fields.items():
        values = [or_lowest(getattr(metrics, field)) for metrics in evaluations]
        middle, latest = values[(len(values) - 1) // 2], values[-1]
        if len(values) >= ENOUGH and middle < latest == max(values):
            return f"{longer}: the {title} still rises ({middle:.1f} halfway, {latest:.1f} now)."
    third = max(1, len(history) // 3)
    before, last = (
        sum(metrics.loss for metrics in part) / third
        for part in (history[-2 * third : -third], history[-third:])
    )
    if last < (1 - FALLS) * before:
        return f"{longer}: the loss still falls ({before:.2f}, and {last:.2f} in the last third)."
    return ""
