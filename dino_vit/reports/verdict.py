"""Say what has come of a run: its state, the figures with how sure they are, and the one thing to try next.

With labels all accuracies decide on the state, without them the effective rank and the entropy gap.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from dino_vit.config.pretrain import PretrainConfig
from dino_vit.reports.advice import advise
from dino_vit.reports.metrics import Baseline, MetricsRecord
from dino_vit.reports.readings import (
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
    readings_of,
)
from dino_vit.reports.states import (
    BELOW_PIXELS,
    COLLAPSING,
    HALF,
    LEARNING,
    LOSING_RANK,
    MIXED,
    NO_BETTER,
    NOT_EVALUATED,
    PAST_BEST,
    TOO_EARLY,
    WORSE,
    JudgedRun,
)

# Without labels, outputs that say at least this share of what they could say about an image.
INFORMATIVE = 0.1
WAITING = 0.2  # the share of its time that a run may wait for images before it gets advice
WAITING_HELP = "more data.workers, smaller images or shards help (dino-vit pack --help)"


class Verdict(NamedTuple):
    """What is said of a run."""

    diagnosis: Diagnosis
    figures: str  # and how sure they make it
    advice: str

    @property
    def paragraphs(self) -> list[str]:
        """The figures, and the advice if there is one."""
        advice = [f"{self.advice} That is a new run, with another output."] if self.advice else []
        return [f"{self.figures}.", *advice]

    @property
    def outcome(self) -> str:
        """The same in a line."""
        return " ".join(self.paragraphs)

    def __str__(self) -> str:
        """The state, the figures and the advice."""
        return f"{self.diagnosis.state}: {self.outcome}"


def judge(history: Sequence[MetricsRecord], config: PretrainConfig, baseline: Baseline | None) -> Verdict:
    """Return what is said of a run: in its log, on its page and by `run.outcome`."""
    baseline = baseline or Baseline()
    figures = evaluation_text(history, baseline)
    if not figures:
        figures = "there is no evaluation yet" if config.run.is_evaluated else "run.eval_every=null"
    if not history:
        return Verdict(TOO_EARLY, figures, "")
    run = JudgedRun(history, config, baseline)
    diagnosis = _diagnose(run)
    return Verdict(diagnosis, figures, advise(run, diagnosis))


def waits_for_images(history: Sequence[MetricsRecord]) -> bool:
    """Tell whether the last few records are of a run that waits for images.

    The first record of all does not count: in its time workers and compiled networks start.
    """
    last = history[1:][-PATIENCE:]
    return len(last) == PATIENCE and all(metrics.data_wait > WAITING for metrics in last)


def _diagnose(run: JudgedRun) -> Diagnosis:
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


def _judge_accuracies(run: JudgedRun) -> Diagnosis | None:
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
    since_best = [each for each in readings_of(last, run.best, before) if each.title == FIGURES["knn"]]
    # The best of many evaluations is high by chance, too.
    if any(reading.rise < 0 and len(run.evaluations) * reading.p < UNLIKELY for reading in since_best):
        return PAST_BEST
    return BELOW_PIXELS if (above_raw_pixels(last, before) or 0.0) < 0 else LEARNING


def _judge_ranks(run: JudgedRun) -> Diagnosis:
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
