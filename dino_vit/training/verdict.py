"""Judge what becomes of a run: against its network before the first step, raw pixels and its own best.

With labels the k-NN accuracy decides, without them the effective rank and the entropy gap. Only a figure that
speaks for it makes a run "learning".
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dino_vit.config.pretrain import PretrainConfig
from dino_vit.core.progress import plural
from dino_vit.training.diagnosis import COLLAPSES, FEW_ROWS, STUCK_AT_LN, Diagnosis, collapse
from dino_vit.training.readings import Baseline, Reading

# Evaluations that must agree before a run is said to have gained nothing.
ENOUGH = 3
# A rank below this share of the first, or of the best, has collapsed.
HALF = 0.5
# Without labels, outputs that say at least this share of what they could say about an image.
INFORMATIVE = 0.1
# Of so many images or fewer, trained weights are the better start.
SMALL_SET = 50_000
MOST_STEPS = 2.0**53  # in an epoch; files of readings may hold anything
QUERIES = 1000  # where a run did not record how many images an accuracy is of

REMEDIES = "loss.centring=sinkhorn", "loss.koleo_weight=0.03", "a lower optim.lr", "recipe=auto"
REMEDY = f"Try {', '.join(REMEDIES[:-1])}, or {REMEDIES[-1]}."
TOO_EARLY = Diagnosis("too early to say")
NOT_EVALUATED = Diagnosis("not evaluated")
LEARNING = Diagnosis("learning")
BELOW_PIXELS = Diagnosis("learning, but still below raw pixels")
LOSING_RANK = Diagnosis(
    "learning, but losing rank",
    f"Neighbours improve, but the features use less than half of the dimensions that they used. {REMEDY}",
)
PAST_BEST = Diagnosis(
    "past its best",
    "The k-NN accuracy has fallen clearly below the run's best; that checkpoint is kept. Train for a shorter "
    "time, lower optim.lr, or add images.",
)
NO_BETTER = Diagnosis(
    "no better than before training",
    f"The evaluations so far are within the noise of the first one. {REMEDY} If the loss still falls, train "
    "longer.",
)
WORSE = Diagnosis(
    "worse than before training",
    f"What was learned does not tell these images apart. {REMEDY}",
)
COLLAPSING = Diagnosis(
    "collapsing",
    f"The features use less than half of the dimensions that they used before training. {REMEDY}",
)
STATES = {
    known.state: known
    for known in (
        *(TOO_EARLY, NOT_EVALUATED, LEARNING, BELOW_PIXELS, LOSING_RANK, PAST_BEST, NO_BETTER, WORSE),
        *(COLLAPSING, *COLLAPSES),
    )
}


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """What the readings of a run are judged by."""

    settled_step: int  # after the warm-up and the freezes
    baseline: Baseline | None = None
    evaluated: bool = True  # at times; otherwise never
    images: int = 0
    from_scratch: bool = True
    length: str = "budget.epochs"  # the setting of the length of the run
    remedy: str = REMEDY  # what the run does not have yet


def circumstances(
    config: PretrainConfig, readings: Sequence[Reading], baseline: Baseline | None, images: int
) -> Circumstances:
    """Return what a run of these settings is judged by."""
    head_epochs = config.init.head_epochs if config.init else 0.0
    settled = max(config.optim.warmup_epochs, config.optim.freeze_last_layer_epochs, head_epochs)
    last = readings[-1] if readings else None
    steps_per_epoch = min(last.step / last.epoch, MOST_STEPS) if last and last.epoch else 0.0
    return Circumstances(
        settled_step=math.floor(settled * steps_per_epoch),
        baseline=baseline,
        evaluated=bool(config.run.eval_every or config.run.eval_every_steps),
        images=images,
        from_scratch=config.init is None,
        length=f"budget.{config.budget.unit}",
        remedy=_remedy(config),
    )


def _remedy(config: PretrainConfig) -> str:
    """Return the remedies that a run does not have yet."""
    has = config.loss.centring == "sinkhorn", config.loss.koleo_weight > 0, False, config.recipe == "auto"
    *most, last = [remedy for remedy, present in zip(REMEDIES, has, strict=True) if not present]
    return f"Try {', '.join(most)}, or {last}." if most else f"Try {last}."


def diagnose(readings: Sequence[Reading], run: Circumstances) -> Diagnosis:
    """Return the state of a run from its readings so far, with the advice that fits its settings."""
    found = _judge(readings, run)
    return replace(found, advice=found.advice.replace(REMEDY, run.remedy))


def _judge(readings: Sequence[Reading], run: Circumstances) -> Diagnosis:
    if not readings:
        return TOO_EARLY
    evaluations = _evaluations(readings)
    by_accuracy = _judge_accuracies(evaluations, run.baseline)
    improved = by_accuracy in (LEARNING, BELOW_PIXELS, PAST_BEST)
    before = run.baseline.rankme if run.baseline else None
    spread = bool(before and evaluations and (evaluations[-1].rankme or 0.0) > before / HALF)
    found = collapse(readings, settled_step=run.settled_step)
    follows_late = found is STUCK_AT_LN and (improved or spread)  # features may improve before the loss falls
    if found and not follows_late:
        return found
    if not evaluations:
        return TOO_EARLY if run.evaluated else NOT_EVALUATED
    by_rank = _judge_ranks(evaluations, run)
    if by_accuracy is None:
        return by_rank
    if by_rank is COLLAPSING and by_accuracy is not PAST_BEST:
        return LOSING_RANK if improved else COLLAPSING
    return by_accuracy


def _evaluations(readings: Sequence[Reading]) -> list[Reading]:
    return [one for one in readings if one.rankme is not None and math.isfinite(one.rankme)]


def _judge_accuracies(evaluations: Sequence[Reading], baseline: Baseline | None) -> Diagnosis | None:
    """Judge by k-NN accuracies; None without labels or without one from before the first step."""
    found = [one.knn for one in evaluations if one.knn is not None and math.isfinite(one.knn)]
    if baseline is None or baseline.knn is None or not math.isfinite(baseline.knn) or not found:
        return None
    latest, best, before = found[-1], max(found), baseline.knn
    margin = noise(best, baseline)
    # The teacher follows slowly, and a short dip at the start is normal.
    early = len(found) < ENOUGH and evaluations[-1].step < evaluations[-1].total_steps
    if latest < before - margin:
        return TOO_EARLY if early else WORSE
    if latest < before + margin:
        return TOO_EARLY if early else NO_BETTER
    if latest < best - margin:
        return PAST_BEST
    return BELOW_PIXELS if baseline.raw_pixels is not None and latest < baseline.raw_pixels else LEARNING


def _judge_ranks(evaluations: Sequence[Reading], run: Circumstances) -> Diagnosis:
    """Judge by effective ranks and by what the teacher's outputs say about an image."""
    ranks = [one.rankme or 0.0 for one in evaluations]
    latest, last = ranks[-1], evaluations[-1]
    before = run.baseline.rankme if run.baseline else None
    early = len(ranks) < ENOUGH and last.step < last.total_steps
    if last.step >= run.settled_step and not early and latest < HALF * max(before or 0.0, max(ranks)):
        return COLLAPSING
    if before is None or latest < before:
        return TOO_EARLY if early else NO_BETTER
    if last.entropy_gap is None:  # the teacher is frozen: what it says cannot collapse
        return LEARNING
    rows = last.rows or 0
    informative = last.entropy_gap > INFORMATIVE * math.log(max(1, min(last.prototypes or 1, rows)))
    return LEARNING if informative and rows >= FEW_ROWS else TOO_EARLY


def noise(percent: float, baseline: Baseline) -> float:
    """Return two standard errors of an accuracy in per cent."""
    share = min(max(percent / 100, 0.0), 1.0)
    return 200 * math.sqrt(share * (1 - share) / (baseline.queries or QUERIES))


def summarise(readings: Sequence[Reading], run: Circumstances) -> str:
    """Return what has come of a run: its state, the figures that say so, and what to do next."""
    state = diagnose(readings, run)
    sentence = ": ".join(filter(None, [state.state, figures_of(readings, run.baseline)])) + "."
    return " ".join(filter(None, [sentence, state.advice, *_next_steps(readings, run, state)]))


def figures_of(readings: Sequence[Reading], baseline: Baseline | None) -> str:
    """Return the figures of the last evaluation, beside what they compare with; nothing if there is none."""
    evaluations = _evaluations(readings)
    if not evaluations:
        return ""
    last, before = evaluations[-1], baseline or Baseline()
    figures = []
    if last.knn is not None:
        others = {
            "before training": before.knn,
            "raw pixels": before.raw_pixels,
            "largest class": before.largest_class,
            "chance": before.chance,
        }
        known = ", ".join(f"{name} {value:.1f}" for name, value in others.items() if value is not None)
        figures.append(f"k-NN {last.knn:.1f} %" + (f" ({known})" if known else ""))
        if last.best_features not in (None, "CLS") and last.best_knn is not None:
            figures.append(f"{last.best_knn:.1f} % by {last.best_features}")
    rank = f"effective rank {last.rankme:.1f}"
    figures.append(rank + (f" (before training {before.rankme:.1f})" if before.rankme is not None else ""))
    if last.knn is None and last.entropy_gap is not None:
        figures.append(f"entropy gap {last.entropy_gap:.2f}")
    return ", ".join(figures)


def _next_steps(readings: Sequence[Reading], run: Circumstances, state: Diagnosis) -> list[str]:
    """Return what the curve and the number of images suggest."""
    steps = []
    trend = _trend(_evaluations(readings), run.baseline)
    hopeful = (LEARNING, BELOW_PIXELS, NO_BETTER, LOSING_RANK)
    if trend and state.state in {one.state for one in hopeful}:
        rise, margin = trend
        steps.append(
            f"k-NN rose by {rise:.1f} in the last two thirds: a larger {run.length} should bring more."
            if rise > margin / 2
            else f"k-NN changed by {rise:+.1f} in the last two thirds: a longer run alone may bring little."
        )
    if run.from_scratch and 0 < run.images <= SMALL_SET:
        few = plural(run.images, "image")
        steps.append(f"With {few}, trained weights are the better start: init.weights=FILE_OR_RUN.")
    return steps


def _trend(evaluations: Sequence[Reading], baseline: Baseline | None) -> tuple[float, float] | None:
    """Return how much k-NN rose in the last two thirds of the steps so far, and its noise.

    Not in the last third alone: there the learning rate is so low that every curve is flat.
    """
    known = [(one.step, one.knn) for one in evaluations if one.knn is not None and math.isfinite(one.knn)]
    if baseline is None or len(known) < ENOUGH:
        return None
    last, latest = known[-1]
    earlier = min(known[:-1], key=lambda pair: abs(pair[0] - last / 3))[1]
    return latest - earlier, noise(latest, baseline)
