"""Say what has come of a run: its state, the figures with how sure they are, and the one thing to try next.

With labels or masks all accuracies and the mIoU decide on the state, without them the effective rank and the
entropy gap; docs/start/watch.md lists the states. Advice names a setting, its value and a measured cause
(`CAUSES`).
"""

import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from dino_vit.config.loading import write_yaml
from dino_vit.config.pretrain import PretrainConfig, in_steps
from dino_vit.config.sections import stem_problem
from dino_vit.core import height_width
from dino_vit.training.metrics import Baseline, MetricsRecord
from dino_vit.training.readings import (
    COLLAPSES,
    FEW_ROWS,
    FIGURES,
    NONFINITE,
    PATIENCE,
    STUCK_AT_LN,
    UNLIKELY,
    Diagnosis,
    above_raw_pixels,
    chance,
    collapse,
    evaluation_text,
    evaluations_of,
    readings_of,
)

# Of a shorter run that has not seen each image once nothing bad is said, but of steps that are not finite.
FEW_STEPS = 300
ENOUGH = 3  # evaluations before a run is said to have gained nothing
HALF = 0.5  # a rank below this share of the first, or of the best, has collapsed
# Without labels, outputs that say at least this share of what they could say about an image.
INFORMATIVE = 0.1
WAITING = 0.2  # the share of its time that a run may wait for images before it gets advice
WAITING_HELP = "docs/data.md (What is fast) says what helps"
# Features are about colour if it explains at least this share of them, and nearly as much as before training.
# On flowers and groceries it is 0.8 in untrained networks and where little was learned, 0.5 in good runs.
MUCH, NEARLY = 0.6, 0.85
# Where colours alone tell labels this share as well as the features do, the features need them: on groceries
# it is 0.5, and less colour takes 5 points from k-NN.
TELLING = 0.25
FALLS = 0.01  # a loss that falls by a smaller share in the last third of a run hardly falls
RISES = 1.0  # points or dimensions; what rises less in the second half of a run hardly rises
FAR = 10.0  # points below raw pixels from which on more of the same is no advice
SHAPES = "early convolutions learn shapes (k-NN of photos of hands was 37 instead of 27 % in the same time)"
PUBLISHED = "timm:vit_small_patch16_224.dino"
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
STATES = {diagnosis.state: diagnosis for diagnosis in ALL}


def _longer_warmup(config: PretrainConfig) -> float | None:
    epochs = 2 * config.optim.warmup_epochs
    return epochs if 0 < epochs < (config.budget.epochs or math.inf) else None


# What a remedy sets, unless that is so already.
CHANGES: dict[str, Callable[[PretrainConfig], object]] = {
    "recipe": lambda config: None if config.recipe == "auto" or config.init else "auto",
    "run.precision": lambda config: "bf16" if config.run.precision == "fp16" else None,
    "head.batch_norm": lambda config: None if config.head.batch_norm else True,
    "loss.centering": lambda config: "sinkhorn" if config.loss.centering == "ema" else None,
    "loss.koleo_weight": lambda config: 0.1 if config.loss.koleo_weight < 0.1 else None,
    "loss.teacher_temp": lambda config: (
        0.04 if config.loss.teacher_temp > 0.04 and not config.loss.warmup_teacher_temp_epochs else None
    ),
    "loss.patch_weight": lambda config: config.loss.patch_weight / 2,
    "optim.warmup_epochs": _longer_warmup,
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
        how = "That is a new run, with another output." if self.advice else ""
        return " ".join(filter(None, [f"{self.figures}.", self.advice, how]))

    def __str__(self) -> str:
        """The state, the figures and the advice."""
        return f"{self.diagnosis.state}: {self.outcome}"


@dataclass(frozen=True)
class _Run:
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
        field = next((name for name in ("knn", "miou") if getattr(last, name) is not None), None)
        if field is None or len(self.evaluations) < ENOUGH:
            return False
        before = min(self.evaluations[:-1], key=lambda metrics: abs(3 * metrics.step - 2 * last.step))
        return _or_lowest(getattr(last, field)) - _or_lowest(getattr(before, field)) < RISES

    @property
    def is_evaluated_early(self) -> bool:
        """Whether it is too early for bad news: the teacher follows slowly, and a short dip is normal."""
        last = self.evaluations[-1]
        return len(self.evaluations) < ENOUGH and last.step < last.total_steps

    @property
    def best(self) -> MetricsRecord:
        return max(self.evaluations, key=lambda metrics: _or_lowest(getattr(metrics, self.decisive)))

    @property
    def decisive(self) -> str:
        """The figure that the best evaluation is chosen by: labels before masks."""
        return "miou" if self.evaluations[-1].knn is None else "knn"

    @property
    def ranks(self) -> list[float]:
        """The effective ranks, the first before training."""
        return [_or_lowest(self.before.rankme), *(metrics.rankme or 0.0 for metrics in self.evaluations)]

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

    def remedy(self, keys: Sequence[str]) -> str:
        """Return the first of some changes that is not in force yet."""
        if self.config.teacher.weights is not None:  # then most settings of the loss have no effect
            keys = [key for key in keys if key == "optim.lr"]
        values = ((key, CHANGES[key](self.config)) for key in keys)
        return next((f"{key}={write_yaml(value)}" for key, value in values if value is not None), "")


def judge(history: Sequence[MetricsRecord], config: PretrainConfig, baseline: Baseline | None) -> Verdict:
    """Return what is said of a run: in its log, on its page and by `run.outcome`."""
    baseline = baseline or Baseline()
    figures = evaluation_text(history, baseline)
    if not figures:
        figures = "there is no evaluation yet" if config.run.is_evaluated else "run.eval_every=null"
    if not history:
        return Verdict(TOO_EARLY, figures, "")
    run = _Run(history, config, baseline)
    diagnosis = _diagnose(run)
    causes = ((ALL, _too_short),) if run.is_short and diagnosis is not NONFINITE else CAUSES
    advice = (cause(run, diagnosis) for states, cause in causes if diagnosis in states)
    return Verdict(diagnosis, figures, next(filter(None, advice), ""))


def waits_for_images(history: Sequence[MetricsRecord]) -> bool:
    """Tell whether the last few records are of a run that waits for images.

    The first record of all does not count: in its time workers and compiled networks start.
    """
    last = history[1:][-PATIENCE:]
    return len(last) == PATIENCE and all(metrics.data_wait > WAITING for metrics in last)


def _diagnose(run: _Run) -> Diagnosis:
    collapsed, by_accuracy = collapse(run.history, settled_step=run.settled_step), _judge_accuracies(run)
    if run.is_short and collapsed is not NONFINITE:  # only what is good for sure is said
        return by_accuracy if by_accuracy in (LEARNING, BELOW_PIXELS) else TOO_EARLY
    if collapsed is None and run.is_still_stuck:
        collapsed = STUCK_AT_LN
    improved = by_accuracy in (LEARNING, BELOW_PIXELS, MIXED, PAST_BEST)
    spread = 0 < run.ranks[0] < HALF * run.ranks[-1]
    # Features may improve before the loss does; then they go on improving.
    follows_late = collapsed is STUCK_AT_LN and (spread or (improved and not run.is_flat))
    if collapsed and not follows_late:
        return collapsed
    if not run.evaluations:
        return TOO_EARLY if run.config.run.is_evaluated else NOT_EVALUATED
    diagnosis = by_rank = _judge_ranks(run)
    if by_accuracy is not None and (by_rank is not COLLAPSING or by_accuracy is PAST_BEST):
        diagnosis = by_accuracy
    elif improved:
        diagnosis = LOSING_RANK
    # A rank that has spread does not make a dead run one that is only young.
    stays_dead = collapsed and diagnosis is TOO_EARLY and (run.is_still_stuck or run.finished)
    return STUCK_AT_LN if stays_dead else diagnosis


def _judge_accuracies(run: _Run) -> Diagnosis | None:
    """Judge by accuracies; None without labels or without any from before the first step."""
    last, before = run.evaluations[-1] if run.evaluations else run.last, run.before
    readings = readings_of(last, before, before)
    if not readings:
        return None
    risen = {reading.rise > 0 for reading in readings if chance(reading, readings) < UNLIKELY}
    if True not in risen:
        return TOO_EARLY if run.is_evaluated_early else WORSE if risen else NO_BETTER
    if False in risen:
        return MIXED
    since_best = [each for each in readings_of(last, run.best, before) if each.title == FIGURES[run.decisive]]
    # The best of many evaluations is high by chance, too.
    if any(reading.rise < 0 and len(run.evaluations) * reading.p < UNLIKELY for reading in since_best):
        return PAST_BEST
    return BELOW_PIXELS if (above_raw_pixels(last, before) or 0.0) < 0 else LEARNING


def _judge_ranks(run: _Run) -> Diagnosis:
    """Judge by effective ranks and by what the teacher's outputs say about an image."""
    ranks, last, early = run.ranks, run.evaluations[-1], run.is_evaluated_early
    if run.before.rankme is None:  # nothing was measured before training
        ranks = ranks[1:]
    first, latest = ranks[0], ranks[-1]
    if len(ranks) < 2:
        return TOO_EARLY
    if last.step >= run.settled_step and not early and latest < HALF * max(run.ranks):
        return COLLAPSING
    if not -math.inf < first <= latest:
        return TOO_EARLY if early else NO_BETTER
    if last.entropy_gap is None:  # the teacher is frozen: what it says cannot collapse
        return LEARNING
    rows = last.rows or 0
    informative = last.entropy_gap > INFORMATIVE * math.log(max(1, min(last.prototypes or 1, rows)))
    return LEARNING if informative and rows >= FEW_ROWS else TOO_EARLY


def _or_lowest(value: float | None) -> float:
    """Return a number that is not finite, or missing, as the lowest."""
    return value if value is not None and math.isfinite(value) else -math.inf


def _too_short(run: _Run, _: Diagnosis) -> str:
    last = run.last
    enough = min(float(FEW_STEPS), last.step / last.epoch if last.epoch else math.inf) / last.step
    least = f"{FEW_STEPS} steps or one epoch are the least to judge by"
    return f"Try {run.length(enough)}: {least}." if run.finished and run.config.run.is_evaluated else ""


def _past_best(run: _Run, _: Diagnosis) -> str:
    best, shorter = run.best, run.length(run.best.step / run.last.total_steps)
    figure, percent = FIGURES[run.decisive], getattr(best, run.decisive)
    text = f"{figure} was the best at step {best.step:,} ({percent:.1f} %), and its checkpoint is kept"
    return f"Try {shorter}: {text}."


def _about_colour(run: _Run, _: Diagnosis) -> str:
    """Advise other colours where the features are about colour, and the labels are not."""
    last, before, augment = run.evaluations[-1], run.before, run.config.augment
    if before.colour is None or last.colour is None or last.colour < max(MUCH, NEARLY * before.colour):
        return ""
    if last.probe is not None and before.colours is not None:
        guessed = before.largest_class or 0.0
        if before.colours - guessed >= TELLING * (last.probe - guessed):
            return ""
    what, share, first = "colour", last.colour, before.colour
    changes = {"grey": 0.5, "hue": 0.4, "saturation": 0.8}
    if last.brightness is not None and last.brightness >= NEARLY * last.colour:
        what, share, first = "brightness", last.brightness, before.brightness or 0.0
        changes = {"brightness": 0.8, "contrast": 0.8}
    texts = [f"augment.{name}={value}" for name, value in changes.items() if getattr(augment, name) < value]
    if not texts or run.config.data.channels != 3 or augment.module:
        return ""
    few = ", but tells few of the labels"
    if last.probe is None:
        few = f"; not where {what} is what tells your images apart"
    evidence = f"{100 * share:.0f} % of the features ({100 * first:.0f} % before training)"
    return f"Try {' '.join(texts)}: {what} explains {evidence}{few}."


def _lost_rank(run: _Run, _: Diagnosis) -> str:
    best, latest, remedy = max(run.ranks), run.ranks[-1], run.remedy(KEEP_RANK)
    if not remedy or latest >= HALF * best:
        return ""
    return f"Try {remedy}: the effective rank fell from {best:.1f} to {latest:.1f}."


def _still_improves(run: _Run, _: Diagnosis) -> str:
    """Advise a longer run where the newest evaluation is the best, or the loss still falls.

    Not where accuracy has stopped to rise or is far from that of raw pixels: longer is more of the same.
    """
    if not run.finished or run.is_far_below_pixels or run.is_flat:
        return ""
    longer, history = f"Try {run.length(2)}", run.history
    last = run.evaluations[-1]
    measured = [field for field in ("probe", "knn", "miou") if getattr(last, field) is not None]
    for field in measured or ["rankme"]:
        values = [_or_lowest(getattr(metrics, field)) for metrics in run.evaluations]
        middle, latest = values[(len(values) - 1) // 2], values[-1]
        if len(values) >= ENOUGH and latest - middle >= RISES and latest == max(values):
            return f"{longer}: the {FIGURES[field]} still rises ({middle:.1f} halfway, {latest:.1f} now)."
    third = max(1, len(history) // 3)
    parts = history[-2 * third : -third], history[-third:]
    before, latest = (sum(metrics.loss for metrics in part) / third for part in parts)
    if latest < (1 - FALLS) * before:
        return f"{longer}: the loss still falls ({before:.2f}, and {latest:.2f} in the last third)."
    return ""


def _convolutions(run: _Run, _: Diagnosis) -> str:
    """Advise early convolutions, which learn shapes where patches learn colours first."""
    config = run.config
    if config.model.timm or config.init or config.model.stem != "patch" or run.is_short:
        return ""
    if stem_problem("conv", height_width(config.model.patch_size), config.model.resnet_width):
        return ""
    return f"Try model.stem=conv: {SHAPES}."


def _published_weights(run: _Run, _: Diagnosis) -> str:
    """Advise weights that know photos, with the command, where a network of one's own is hardly worth it."""
    config = run.config
    if config.init or config.data.channels != 3 or run.is_short or not run.finished:
        return ""
    source, output = config.data.source, shlex.quote(f"{config.output}-published")
    images = source if isinstance(source, str) else f"data.source={write_yaml(source)}"
    settings = f"recipe=auto {run.length(1)} init.weights={PUBLISHED}"
    command = f"dino-vit pretrain {shlex.quote(images)} {output} {settings}"
    return f"Try weights that have seen a million photos: `{command}`."


def _usual_remedy(run: _Run, diagnosis: Diagnosis) -> str:
    remedy = run.remedy(diagnosis.remedies)
    unknown = "; no cause was measured" if diagnosis in (NO_BETTER, WORSE) else ""
    return f"Try {remedy}{unknown}." if remedy else ""


# States, and a cause that is looked for in them; the first that is found gives the advice.
CAUSES: tuple[tuple[Sequence[Diagnosis], Callable[[_Run, Diagnosis], str]], ...] = (
    ((PAST_BEST,), _past_best),
    ((LEARNING,), _still_improves),  # what still rises goes on; what does not needs another setting first
    ((LEARNING, BELOW_PIXELS, MIXED, NO_BETTER, WORSE), _about_colour),
    ((MIXED, NO_BETTER, WORSE, LOSING_RANK, COLLAPSING), _lost_rank),
    ((BELOW_PIXELS, MIXED, NO_BETTER), _still_improves),
    ((BELOW_PIXELS,), _convolutions),
    ((BELOW_PIXELS,), _published_weights),
    (ALL, _usual_remedy),
    ((NO_BETTER, WORSE), _convolutions),
    ((NO_BETTER, WORSE), _published_weights),
)
