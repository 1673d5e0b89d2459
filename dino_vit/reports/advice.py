"""The one thing to try next after a run: a setting, its value and a measured cause (`CAUSES`)."""

import math
import shlex
from collections.abc import Callable, Sequence

from dino_vit.config.loading import write_yaml
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.config.sections import stem_problem
from dino_vit.core import height_width
from dino_vit.reports.readings import FIGURES, NONFINITE, Diagnosis
from dino_vit.reports.states import (
    ALL,
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
    PAST_BEST,
    RISES,
    WORSE,
    JudgedRun,
    or_lowest,
)

FALLS = 0.01  # a loss that falls by a smaller share in the last third of a run hardly falls
SHAPES = "early convolutions learn shapes (k-NN of photos of hands was 32 instead of 27 % in the same time)"
PUBLISHED = "timm:vit_small_patch16_224.dino"


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


def advise(run: JudgedRun, diagnosis: Diagnosis) -> str:
    """Return the advice for the first cause that is found, or nothing."""
    causes = ((ALL, _too_short),) if run.is_short and diagnosis is not NONFINITE else CAUSES
    advice = (cause(run, diagnosis) for states, cause in causes if diagnosis in states)
    return next(filter(None, advice), "")


def remedy(run: JudgedRun, keys: Sequence[str]) -> str:
    """Return the first of some changes that is not in force yet."""
    if run.config.teacher.weights is not None:  # then most settings of the loss have no effect
        keys = [key for key in keys if key == "optim.lr"]
    values = ((key, CHANGES[key](run.config)) for key in keys)
    return next((f"{key}={write_yaml(value)}" for key, value in values if value is not None), "")


def _too_short(run: JudgedRun, _: Diagnosis) -> str:
    last = run.last
    enough = min(float(FEW_STEPS), last.step / last.epoch if last.epoch else math.inf) / last.step
    least = f"{FEW_STEPS} steps or one epoch are the least to judge by"
    return f"Try {run.length(enough)}: {least}." if run.finished and run.config.run.is_evaluated else ""


def _past_best(run: JudgedRun, _: Diagnosis) -> str:
    best, shorter = run.best, run.length(run.best.step / run.last.total_steps)
    text = f"k-NN was the best at step {best.step:,} ({best.knn:.1f} %), and its checkpoint is kept"
    return f"Try {shorter}: {text}."


def _lost_rank(run: JudgedRun, _: Diagnosis) -> str:
    best, latest, setting = max(run.ranks), run.ranks[-1], remedy(run, KEEP_RANK)
    if not setting or latest >= HALF * best:
        return ""
    return f"Try {setting}: the effective rank fell from {best:.1f} to {latest:.1f}."


def _still_improves(run: JudgedRun, _: Diagnosis) -> str:
    """Advise a longer run where the newest evaluation is the best, or the loss still falls.

    Not where accuracy has stopped to rise or is far from that of raw pixels: longer is more of the same.
    """
    if not run.finished or run.is_far_below_pixels or run.is_flat:
        return ""
    longer, history = f"Try {run.length(2)}", run.history
    last = run.evaluations[-1]
    measured = [field for field in ("probe", "knn") if getattr(last, field) is not None]
    for field in measured or ["rankme"]:
        values = [or_lowest(getattr(metrics, field)) for metrics in run.evaluations]
        middle, latest = values[(len(values) - 1) // 2], values[-1]
        if len(values) >= ENOUGH and latest - middle >= RISES and latest == max(values):
            return f"{longer}: the {FIGURES[field]} still rises ({middle:.1f} halfway, {latest:.1f} now)."
    third = max(1, len(history) // 3)
    parts = history[-2 * third : -third], history[-third:]
    before, latest = (sum(metrics.loss for metrics in part) / third for part in parts)
    if latest < (1 - FALLS) * before:
        return f"{longer}: the loss still falls ({before:.2f}, and {latest:.2f} in the last third)."
    return ""


def _convolutions(run: JudgedRun, _: Diagnosis) -> str:
    """Advise early convolutions, which learn shapes where patches learn colours first."""
    config = run.config
    if config.model.timm or config.init or config.model.stem != "patch" or run.is_short:
        return ""
    if stem_problem("conv", height_width(config.model.patch_size), config.model.resnet_width):
        return ""
    return f"Try model.stem=conv: {SHAPES}."


def _published_weights(run: JudgedRun, _: Diagnosis) -> str:
    """Advise weights that know photos, with the command, where a network of one's own is hardly worth it."""
    config = run.config
    if config.init or config.data.channels != 3 or run.is_short or not run.finished:
        return ""
    data, output = config.data, f"{config.output}-published"
    if any(source.startswith("object:") for source in data.sources):  # which no command line can name
        return f"Try init.weights={PUBLISHED}: weights that have seen a million photos."
    given = {"labels": data.labels, "mix": data.mix}
    words = [f"data.{key}={write_yaml(value)}" for key, value in given.items() if value is not None]
    words = ["recipe=auto", run.length(1), f"init.weights={PUBLISHED}", *words]
    if isinstance(data.source, str) and "=" not in data.source + output:
        words = [data.source, output, *words]
    else:
        words = [f"data.source={write_yaml(data.source)}", f"output={write_yaml(output)}", *words]
    return f"Try weights that have seen a million photos: `{shlex.join(['dino-vit', 'pretrain', *words])}`."


def _usual_remedy(run: JudgedRun, diagnosis: Diagnosis) -> str:
    setting = remedy(run, diagnosis.remedies)
    unknown = "; no cause was measured" if diagnosis in (NO_BETTER, WORSE) else ""
    return f"Try {setting}{unknown}." if setting else ""


# States, and a cause that is looked for in them; the first that is found gives the advice.
CAUSES: tuple[tuple[Sequence[Diagnosis], Callable[[JudgedRun, Diagnosis], str]], ...] = (
    ((PAST_BEST,), _past_best),
    ((LEARNING,), _still_improves),  # what still rises goes on; what does not needs another setting first
    ((MIXED, NO_BETTER, WORSE, LOSING_RANK, COLLAPSING), _lost_rank),
    ((BELOW_PIXELS, MIXED, NO_BETTER), _still_improves),
    ((BELOW_PIXELS,), _convolutions),
    ((BELOW_PIXELS,), _published_weights),
    (ALL, _usual_remedy),
    ((NO_BETTER, WORSE), _convolutions),
    ((NO_BETTER, WORSE), _published_weights),
)
