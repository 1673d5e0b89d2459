"""Say what has come of a run: its diagnosis in a plain sentence, its figures, and one thing to do.

With labels all accuracies decide on the diagnosis, without them the effective rank and the entropy gap.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from dino_vit.config.loading import write_yaml
from dino_vit.config.pretrain import PretrainConfig, in_steps
from dino_vit.reports.accuracies import (
    UNLIKELY,
    Reading,
    above_baseline,
    better_baseline,
    evaluations_of,
    figures_text,
    readings_of,
)
from dino_vit.reports.collapse import (
    FEW_ROWS,
    NONFINITE,
    PATIENCE,
    STUCK_AT_LN,
    Diagnosis,
    DiagnosisName,
    collapse,
)
from dino_vit.reports.metrics import Baseline, MetricsRecord

BAD: tuple[DiagnosisName, ...] = ("stuck", "collapsed", "diverged")
# A run of fewer is not stuck, unless its accuracies have surely fallen or its loss stays where it was; before
# it has seen each image once nothing bad is said of it, but of steps that are not finite.
FEW_STEPS = 300
ENOUGH = 3  # evaluations before a run, or a finished one of few steps, is said to have gained nothing
HALF = 0.5  # a rank below this share of the first, or of the best, has collapsed
RISES = 1.0  # points or dimensions; what rises less in the last third of a run hardly rises
FAR = 10.0  # points below the better baseline from which on more of the same is no advice
INFORMATIVE = 0.1  # without labels, outputs that say at least this share of what they could about an image
WAITING = 0.2  # the share of its time that a run may wait for images before it gets advice
WAITING_HELP = "more data.workers, smaller images or shards help (dino-vit pack --help)"
RECIPE = "In a new run, try recipe=auto."
PUBLISHED = "hf:facebook/dinov2-small"  # which, unlike weights of timm, every installation can load
RANK = "the effective rank, about how many dimensions they use,"
KNN = "k-NN, which labels an image by the most similar others,"
HOW = {"knn": KNN, "best_knn": "k-NN by the best tokens", "probe": "a linear classifier"}


class Verdict(NamedTuple):
    """What is said of a run."""

    diagnosis: DiagnosisName
    sentence: str
    figures: str = ""
    advice: str = ""
    is_past_best: bool = False  # then an earlier checkpoint is the one to take

    @property
    def paragraphs(self) -> list[str]:
        """The plain sentence, the figures and what to do, as far as there are any."""
        return [text for text in (self.sentence, self.figures and f"{self.figures}.", self.advice) if text]

    def __str__(self) -> str:
        return "\n".join([f"{self.diagnosis}. {self.paragraphs[0]}", *self.paragraphs[1:]])


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
    def has_few_steps(self) -> bool:
        return self.last.step < FEW_STEPS

    @property
    def is_evaluated_early(self) -> bool:
        """Whether it is too early for bad news: the teacher follows slowly, and a short dip is normal."""
        return len(self.evaluations) < ENOUGH and (self.has_few_steps or not self.finished)

    @cached_property
    def readings(self) -> list[Reading]:
        """The accuracies beside those before training, the most certain difference first."""
        return readings_of(self.evaluations[-1], self.before, self.before) if self.evaluations else []

    @property
    def changes(self) -> list[Reading]:
        """Those that are no chance (Bonferroni)."""
        return [reading for reading in self.readings if len(self.readings) * reading.p < UNLIKELY]

    @property
    def gained(self) -> bool:
        return any(reading.rise > 0 for reading in self.changes)

    @property
    def above_baseline(self) -> float:
        """Points of k-NN above the better of pixels and gradients; 0 where they are not known."""
        return (above_baseline(self.evaluations[-1], self.before) or 0.0) if self.evaluations else 0.0

    @property
    def rises(self) -> tuple[float, float] | None:
        """The figure a third of the run ago and now, if it has risen since and was never higher."""
        field = "rankme" if self.evaluations[-1].knn is None else "knn"
        if len(self.evaluations) < ENOUGH:
            return None
        values = {metrics.step: or_lowest(getattr(metrics, field)) for metrics in self.evaluations}
        *earlier, last = values
        before, now = values[min(earlier, key=lambda step: abs(3 * step - 2 * last))], values[last]
        return (before, now) if now - before >= RISES and now == max(values.values()) else None

    @property
    def past_best(self) -> MetricsRecord | None:
        """The best evaluation, if k-NN has clearly fallen since."""
        best = max(self.evaluations, key=lambda metrics: or_lowest(metrics.knn))
        since = readings_of(self.evaluations[-1], best, self.before)
        # The best of many evaluations is high by chance, too.
        fell = (len(self.evaluations) * each.p < UNLIKELY for each in since if each.field == "knn")
        return best if any(fell) else None

    @property
    def settled_step(self) -> int:
        """The step after the warm-up and the freezes."""
        config, last = self.config, self.last
        head_epochs = config.init.head_epochs if config.init else 0.0
        settled = max(config.optim.warmup_epochs, config.optim.freeze_last_layer_epochs, head_epochs)
        # At most 2^53, as files may hold anything.
        steps_per_epoch = round(min(last.step / last.epoch, 2.0**53)) if last.epoch else 0
        return round(in_steps(settled, steps_per_epoch))

    def longer(self, factor: float) -> str:
        """Advise a budget that is larger by a factor."""
        unit = self.config.budget.unit
        value = getattr(self.config.budget, unit) * factor
        text = write_yaml(float(f"{value:.2g}") if unit == "minutes" else math.ceil(value))
        return f"In a new run, try budget.{unit}={text}"


def or_lowest(value: float | None) -> float:
    """Return a number that is not finite, or missing, as the lowest."""
    return value if value is not None and math.isfinite(value) else -math.inf


def judge(history: Sequence[MetricsRecord], config: PretrainConfig, baseline: Baseline | None) -> Verdict:
    """Return what is said of a run: in its log, on its page and by `run.outcome`."""
    baseline = baseline or Baseline()
    if not history:
        return Verdict("too early", "There is no evaluation yet.")
    run = JudgedRun(history, config, baseline)
    diagnosis = _diagnose(run)
    name, sentence = diagnosis
    best = run.past_best if run.gained else None
    if best and name == "learning":
        sentence = (
            f"It is past its best: k-NN was {best.knn:.1f} % at step {best.step:,} and is "
            f"{run.evaluations[-1].knn:.1f} % now; the checkpoint of that step is kept."
        )
    name = "done" if name == "learning" and run.finished else name
    figures = figures_text(history, baseline)
    return Verdict(name, sentence, figures, _advice(run, diagnosis), best is not None)


def waits_for_images(history: Sequence[MetricsRecord]) -> bool:
    """Tell whether the last few records are of a run that waits for images.

    The first record of all does not count: in its time workers and compiled networks start.
    """
    last = history[1:][-PATIENCE:]
    return len(last) == PATIENCE and all(metrics.data_wait > WAITING for metrics in last)


def _diagnose(run: JudgedRun) -> Diagnosis:
    collapsed = collapse(run.history, settled_step=run.settled_step)
    if collapsed is NONFINITE:
        return collapsed
    if run.has_few_steps and run.last.epoch < 1:  # only what is good for sure is said
        return _judge_accuracies(run) if run.gained else Diagnosis("too early", _so_far(run))
    if not run.evaluations:
        unknown = run.finished and not run.config.compute.eval_every
        return collapsed or Diagnosis("learning" if unknown else "too early", _so_far(run))
    features = _judge_ranks(run)
    if run.readings and (run.gained or features.name != "collapsed"):
        features = _judge_accuracies(run)
    if collapsed is not STUCK_AT_LN:
        return collapsed or features
    # Features may improve before the loss does; then they go on improving.
    spread = 0 < (run.before.rankme or 0.0) < HALF * (run.evaluations[-1].rankme or 0.0)
    improves = not run.readings or len(run.evaluations) < ENOUGH or run.rises is not None
    follows = improves if features.name == "learning" else spread and not run.finished
    return features if follows else collapsed


def _judge_accuracies(run: JudgedRun) -> Diagnosis:
    better, figures = better_baseline(run.before), _accuracy_text(run)
    below = f"k-NN is {-run.above_baseline:.1f} points below {better[0]}" if better else ""
    below = below if run.above_baseline < 0 else ""
    if run.gained:
        return Diagnosis("learning", f"It has learned{below and f', but {below}'}: {figures}.")
    if run.is_evaluated_early:
        return Diagnosis("too early", _so_far(run))
    below = below and f", and {below}"
    if run.changes:
        return Diagnosis("stuck", f"It is worse than before training{below}: {figures}.")
    unsure = f"on {run.readings[0].images:,} images the difference may be chance"
    has_risen = max(reading.rise for reading in run.readings) >= RISES  # of more images it may be sure
    name: DiagnosisName = "too early" if has_risen or run.has_few_steps else "stuck"
    return Diagnosis(name, f"It is not clearly better than before training ({unsure}){below}: {figures}.")


def _accuracy_text(run: JudgedRun) -> str:
    """Return k-NN, or else the accuracy that has changed most surely, beside what needs no training."""
    clear = [each for each in run.changes if (each.rise > 0) == run.gained] or run.readings
    reading = next((each for each in clear if each.field == "knn"), clear[0])
    how = HOW[reading.field]
    reaches = "is right for" if run.before.metric == "top-1" else f"reaches an {run.before.metric} of"
    text = f"{how} {reaches} {reading.percent:.1f} %, before training {reading.before:.1f} %"
    better = None if reading.field == "probe" else better_baseline(run.before)
    return f"{text}, with {better[0]} {better[1]:.1f} %" if better else text


def _judge_ranks(run: JudgedRun) -> Diagnosis:
    """Judge by effective ranks and by what the teacher's outputs say about an image."""
    last = run.evaluations[-1]
    ranks = [metrics.rankme or 0.0 for metrics in run.evaluations]
    if run.before.rankme is not None:
        ranks.insert(0, or_lowest(run.before.rankme))
    first, latest, highest = ranks[0], ranks[-1], max(ranks)
    too_early = Diagnosis("too early", _so_far(run))
    if len(ranks) < 2:
        return too_early
    if last.step >= run.settled_step and not run.is_evaluated_early and latest < HALF * highest:
        fell = f"{RANK} fell from {highest:.1f} to {latest:.1f}"
        return Diagnosis("collapsed", f"Features become alike: {fell}.")
    change = f"{RANK} is {latest:.1f}, before training {first:.1f}"
    if not -math.inf < first <= latest:
        stuck = Diagnosis("stuck", f"Features have not spread: {change}.")
        return too_early if run.is_evaluated_early or run.has_few_steps else stuck
    worth = "only labels can tell what they are worth"
    learning = Diagnosis("learning", f"Features have spread: {change}; {worth}.")
    if last.entropy_gap is None:  # the teacher is frozen: what it says cannot collapse
        return learning
    rows = last.rows or 0
    informative = last.entropy_gap > INFORMATIVE * math.log(max(1, min(last.prototypes or 1, rows)))
    return learning if informative and rows >= FEW_ROWS else too_early


def _so_far(run: JudgedRun) -> str:
    if not run.config.compute.eval_every:
        return "Nothing is evaluated (compute.eval_every=null)."
    if run.readings:
        return f"So far {_accuracy_text(run)}."
    return "There is no evaluation yet." if not run.evaluations else "Too little is measured to judge by."


def _advice(run: JudgedRun, diagnosis: Diagnosis) -> str:
    """Return one thing to do, or nothing."""
    config, name = run.config, diagnosis.name
    slower = f"In a new run, try optim.lr={write_yaml(config.optim.lr / 2)}."
    is_own = config.recipe != "auto" and not config.init and config.teacher.weights is None
    if name == "diverged":
        return "In a new run, try compute.precision=bf16." if config.compute.precision == "fp16" else slower
    if name == "collapsed" or diagnosis is STUCK_AT_LN:
        return RECIPE if is_own else slower
    if not run.finished or not run.evaluations:
        return ""
    if name == "too early" and run.has_few_steps:
        return f"{run.longer(FEW_STEPS / run.last.step)}: {FEW_STEPS} steps are the least to judge by."
    if run.above_baseline > -FAR:  # else more of the same is no advice
        if name == "learning" and run.rises:
            before, now = run.rises
            return f"{run.longer(2)}: it still rises ({before:.1f} after two thirds, {now:.1f} at the end)."
        if name == "too early" and run.readings:
            return f"{run.longer(2)}, or label more images: {run.readings[0].images:,} are few to tell by."
    if name == "stuck" and is_own:
        return RECIPE
    return published_advice(config) if name == "stuck" or run.above_baseline < 0 else ""


def published_advice(config: PretrainConfig) -> str:
    """Return how to start from weights that know photos; nothing where these do not fit."""
    if config.init or config.data.channels != 3 or config.teacher.weights is not None:
        return ""
    return (
        f"Try weights that have seen 142 million photos: the same command with init.weights={PUBLISHED}, "
        "recipe=auto and another output."
    )
