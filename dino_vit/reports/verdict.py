"""Say what has come of a run: its state, its accuracy beside what needs no training, one thing to do.

With labels the k-NN accuracy decides on the state, without them the effective rank and the entropy gap. What
rises, falls or was best is told by one test on the images that the accuracies are of (`AccuracyChange`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from dino_vit.config.loading import write_yaml
from dino_vit.config.pretrain import PretrainConfig, in_steps
from dino_vit.reports.accuracies import (
    QUERIES,
    AccuracyChange,
    KnnFigure,
    accuracy_text,
    better_baseline,
    evaluations_of,
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
# A run of fewer is not stuck, unless its accuracy has surely fallen; before it has seen each image once
# nothing bad is said of it, but of steps that are not finite.
FEW_STEPS = 300
ENOUGH = 3  # evaluations before a run, or a finished one of few steps, is said to have gained nothing
STANDARD_ERROR = 0.32  # the chance of a difference as large as its standard error
HALF = 0.5  # a rank below this share of the first, or of the best, has collapsed
ONE = 1.0  # dimension; the standard error of an effective rank on 300 images is 0.2 to 0.7
FAR = 10.0  # points below the better baseline from which on more of the same is no advice
INFORMATIVE = 0.1  # without labels, outputs that say at least this share of what they could about an image
WAITING = 0.2  # the share of its time that a run may wait for images before it gets advice
WAITING_HELP = "more data.workers, smaller images or shards help (dino-vit pack --help)"
RECIPE = "In a new run, try recipe=auto."
PUBLISHED = "hf:facebook/dinov2-small"  # which, unlike weights of timm, every installation can load


class Verdict(NamedTuple):
    """What is said of a run."""

    diagnosis: DiagnosisName
    sentence: str
    accuracy: str = ""
    advice: str = ""
    is_past_best: bool = False  # then an earlier checkpoint is the one to take

    @property
    def paragraphs(self) -> list[str]:
        """The state in words, the accuracy and what to do, as far as there are any."""
        return [text for text in (self.sentence, self.accuracy and f"{self.accuracy}.", self.advice) if text]

    def __str__(self) -> str:
        return f"{self.diagnosis}. " + "\n".join(self.paragraphs)


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

    def beside(self, then: MetricsRecord | Baseline, figure: KnnFigure = "knn") -> AccuracyChange:
        """The newest accuracy beside another one."""
        return AccuracyChange(self.evaluations[-1], then, self.before.queries or QUERIES, figure)

    @property
    def below(self) -> float:
        """Points by CLS and levelled cells below the better baseline; 0 where that may be chance."""
        better = Baseline(levelled_knn=(better_baseline(self.before) or ("", None))[1])
        change = self.beside(better, "levelled_knn")
        return -change.rise if change.fell() else 0.0

    @property
    def rising_since(self) -> MetricsRecord | None:
        """The evaluation of about a third of the run ago, if the accuracy has risen since."""
        if len(self.evaluations) < ENOUGH:
            return None
        *earlier, last = self.evaluations
        then = min(earlier, key=lambda metrics: abs(3 * metrics.step - 2 * last.step))
        return then if self.beside(then).rose else None

    @property
    def past_best(self) -> MetricsRecord | None:
        """The best evaluation, if the accuracy has risen to it and fallen since."""
        best = max(self.evaluations, key=lambda metrics: or_lowest(metrics.knn), default=None)
        fell = best and self.beside(best).fell(among=len(self.evaluations))
        return best if best and fell and self.beside(self.before).rose else None

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


def judge_run(history: Sequence[MetricsRecord], config: PretrainConfig, baseline: Baseline | None) -> Verdict:
    """Return what is said of a run: in its log, on its page and by `run.outcome`."""
    baseline = baseline or Baseline()
    if not history:
        return Verdict("too early to tell", "There is no evaluation yet.")
    run = JudgedRun(history, config, baseline)
    diagnosis, best = _diagnose(run), run.past_best
    name, sentence = diagnosis
    if best and name == "learning":
        sentence = (
            f"It is past its best: k-NN was {best.knn:.1f} % at step {best.step:,}; the checkpoint of that "
            "step is kept."
        )
    name = "done" if name == "learning" and run.finished else name
    accuracy = accuracy_text(run.evaluations[-1], baseline) if run.evaluations else ""
    return Verdict(name, sentence, accuracy, _advice(run, diagnosis), best is not None)


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
    gain = run.beside(run.before) if run.evaluations else None
    if run.has_few_steps and run.last.epoch < 1:  # only what is good for sure is said
        return _judge_accuracy(run, gain) if gain and gain.rose else _too_early(run)
    if collapsed is STUCK_AT_LN and run.has_few_steps:  # healthy runs pass there, too
        collapsed = None
    if gain is None:
        unknown = run.finished and not run.config.compute.eval_every
        return collapsed or _too_early(run, "learning" if unknown else "too early to tell")
    features, is_measured = _judge_ranks(run), math.isfinite(gain.rise)
    if is_measured and (gain.rose or features.name != "collapsed"):
        features = _judge_accuracy(run, gain)
    if collapsed is not STUCK_AT_LN:
        return collapsed or features
    # Features may improve before the loss does; then they go on improving.
    improves = not is_measured or len(run.evaluations) < ENOUGH or run.rising_since is not None
    return features if improves and features.name == "learning" else collapsed


def _judge_accuracy(run: JudgedRun, gain: AccuracyChange) -> Diagnosis:
    if gain.rose:
        better = better_baseline(run.before)
        but = f", but {better[0]} without a network are better" if better and run.below else ""
        return Diagnosis("learning", f"It has learned{but}.")
    if run.is_evaluated_early:
        return _too_early(run)
    if gain.fell():
        return Diagnosis("stuck", "It is worse than before training.")
    may_rise = gain.rise > 0 and gain.p < STANDARD_ERROR
    images = f"on {gain.images:,} images the difference may be chance"
    name: DiagnosisName = "too early to tell" if may_rise or run.has_few_steps else "stuck"
    return Diagnosis(name, f"It is not clearly better than before training: {images}.")


def _judge_ranks(run: JudgedRun) -> Diagnosis:
    """Judge by effective ranks and by what the teacher's outputs say about an image."""
    last = run.evaluations[-1]
    ranks = [metrics.rankme or 0.0 for metrics in run.evaluations]
    if run.before.rankme is not None:
        ranks.insert(0, or_lowest(run.before.rankme))
    first, latest, highest = ranks[0], ranks[-1], max(ranks)
    if len(ranks) < 2 or run.is_evaluated_early:
        return _too_early(run)
    ways = f"the network tells images apart in about {latest:.0f} ways (effective rank)"
    if last.step >= run.settled_step and latest < HALF * highest:
        return Diagnosis("collapsed", f"Images have become alike: {ways}, at its best in {highest:.0f}.")
    change = f"{ways}, before training in {first:.0f}"
    if not -math.inf < first <= latest + ONE:
        stuck = Diagnosis("stuck", f"It has not learned: {change}.")
        return _too_early(run) if run.has_few_steps else stuck
    worth = "only labels can say whether these are the ways that matter"
    learning = Diagnosis("learning", f"{change[0].upper()}{change[1:]}; {worth}.")
    if last.entropy_gap is None:  # the teacher is frozen: what it says cannot collapse
        return learning
    rows = last.rows or 0
    informative = last.entropy_gap > INFORMATIVE * math.log(max(1, min(last.prototypes or 1, rows)))
    return learning if informative and rows >= FEW_ROWS else _too_early(run)


def _too_early(run: JudgedRun, name: DiagnosisName = "too early to tell") -> Diagnosis:
    if not run.config.compute.eval_every:
        return Diagnosis(name, "Nothing is evaluated (compute.eval_every=null).")
    is_measured = "Too little has been measured to judge by." if run.evaluations else ""
    return Diagnosis(name, is_measured or "There is no evaluation yet.")


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
    if name == "stuck" and is_own:
        return RECIPE
    published = published_advice(config)
    if published and (name == "stuck" or run.below >= FAR):
        return published
    if name == "too early to tell" and run.has_few_steps:
        return f"{run.longer(FEW_STEPS / run.last.step)}: {FEW_STEPS} steps are the least to judge by."
    if name == "too early to tell" and run.evaluations[-1].knn is not None:
        return f"Label more images: {run.before.queries or QUERIES:,} are too few to tell by."
    if name == "learning" and (then := run.rising_since):
        return f"{run.longer(2)}: the accuracy still rises (at step {then.step:,} it was {then.knn:.1f} %)."
    return published if run.below else ""


def published_advice(config: PretrainConfig) -> str:
    """Return how to start from weights that know photos; nothing where these do not fit."""
    if config.init or config.data.channels != 3 or config.teacher.weights is not None:
        return ""
    return (
        f"Try weights that have seen 142 million photos: the same command with init.weights={PUBLISHED}, "
        "recipe=auto and another output folder."
    )
