"""What changes on the page while a run goes on: its state, its figures, and charts with captions."""

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from dino_vit.reports.record import RunRecord, facts, finite, outcome, state
from dino_vit.training.readings import Reading
from dino_vit.training.verdict import LEARNING

BUCKETS = 300  # the lowest and the highest point of each are kept
LONG_WAIT = 0.1  # share of the time spent waiting for data from which the caption says what to do
FROZEN_HALF_LIFE = 1e5  # in steps; a teacher that averages over more hardly changes

HIDDEN_IF_CONSTANT = ("teacher_temp", "weight_decay")
PERCENT = ("knn", "data_wait")

Point = tuple[int, float]


def live_data(record: RunRecord) -> dict[str, Any]:
    """Return what changes while a run goes on: texts by their `data-text` on the page, and the charts."""
    diagnosis, history = state(record)
    tone = "good" if diagnosis == LEARNING else "plain"
    return {
        "tone": "bad" if diagnosis.advice else tone,
        "texts": {
            "state": diagnosis.state,
            "history": history,
            "outcome": outcome(record),
            **{f"fact-{name}": text for name, text in facts(record).items()},
            **{f"figure-{name}": text for name, text in figures(record).items()},
        },
        "progress": record.step / record.total_steps if record.total_steps else 0,
        "charts": charts(record),
    }


def figures(record: RunRecord) -> dict[str, str]:
    """Return the few numbers to look at first."""
    found = {}
    knn, rank = record.latest("knn"), record.latest("rankme")
    levels = record.baseline_levels("knn", "raw_pixels")
    if knn is not None or levels:
        found["k-NN"] = "–" if knn is None else f"{knn:.1f} %"
        found |= {f"k-NN, {name}": f"{level:.1f} %" for name, level in levels.items()}
        guesses = record.baseline_levels("largest_class", "chance")
        found |= {name: f"{level:.1f} %" for name, level in guesses.items()}
    if rank is not None:
        found["effective rank"] = f"{rank:.0f}"
    if record.readings:
        last = record.readings[-1]
        if last.excess is not None:
            found["loss − ln(prototypes)"] = f"{last.excess:+.2f}".replace("-", "−")
        if last.entropy_gap is not None:
            found["entropy gap"] = f"{last.entropy_gap:.2f}"
    return found


def charts(record: RunRecord) -> list[dict[str, Any]]:
    """Return the charts that the readings of a run allow, as `charts.js` draws them."""
    readings = record.readings
    if not readings:
        return []
    last = readings[-1]
    uniform = {f"ln({last.prototypes})": math.log(last.prototypes)} if last.prototypes else {}
    share = record.config.masks.probability  # of the global views, by which the loss of patches is divided
    uniform_patches = {f"{share:g} · {name}": share * value for name, value in uniform.items()}
    entropies = {
        "of the mean output": "mean_output_entropy",
        "of each output, on average": "output_entropy",
        "gap": "entropy_gap",
    }
    imitated = "Loss of patches", IMITATED
    of_patch_loss = ("Loss of masked patches", PATCH_LOSS) if last.prototypes else imitated
    of_patches = {name: f"patch_{field}" for name, field in entropies.items()}
    knn = record.baseline_levels("knn", "raw_pixels", "largest_class")
    rank = record.baseline_levels("rankme")
    accuracies = {"k-NN": "knn", "k-NN of the best features": "best_knn"}
    small = _small_charts(readings)
    specs: list[tuple[str, str, str, dict[str, str], dict[str, float]]] = [
        # id, title, caption, fields of readings by the name of their curve, values to compare with by name
        ("loss", "Loss", _loss(last), {"loss": "loss"}, uniform),
        ("entropies", "Teacher entropies", _entropies(last), entropies, uniform),
        ("patch_loss", *of_patch_loss, {"loss": "patch_loss"}, uniform_patches),
        ("patch_entropies", "Teacher entropies of masked patches", PATCHES, of_patches, uniform),
        ("knn", "k-NN accuracy", _knn(readings, knn), accuracies, knn),
        ("rank", "Effective rank", _rank(record, rank), {"effective rank": "rankme"}, rank),
        *((name, title, text, {title.lower(): name}, {}) for name, (title, text) in small.items()),
    ]
    found = []
    for id, title, caption, fields, levels in specs:
        series = {name: _curve(record, readings, field) for name, field in fields.items()}
        values = {value for points in series.values() for _, value in points}
        if values and not (id in HIDDEN_IF_CONSTANT and len(values) == 1):
            chart = {"id": id, "title": title, "caption": caption, "series": series, "levels": levels}
            found.append({**chart, "unit": "%" if id in PERCENT else "", "small": id in small})
    return found


def _curve(record: RunRecord, readings: Sequence[Reading], field: str) -> list[Point]:
    """Return the points of a curve, from step 0 if the figure was measured before training."""
    start, scale = finite(getattr(record.baseline, field, None)), 100 if field == "data_wait" else 1
    values = [(reading.step, getattr(reading, field)) for reading in readings]
    scaled = [(step, value if value is None else finite(scale * value)) for step, value in values]
    points = thin([(step, value) for step, value in scaled if value is not None])
    return points if start is None else [(0, start), *points]


def thin(points: Sequence[Point]) -> list[Point]:
    """Keep few enough points for a light page, with both ends and every peak among them."""
    if len(points) <= 2 * BUCKETS:
        return list(points)
    kept = {0, len(points) - 1}
    for bucket in np.array_split(np.arange(len(points)), BUCKETS):
        kept |= {min(bucket, key=lambda i: points[i][1]), max(bucket, key=lambda i: points[i][1])}
    return [points[i] for i in sorted(kept)]


def _loss(last: Reading) -> str:
    if not math.isfinite(last.loss):
        return "The latest loss is not finite."
    if last.excess is None or last.prototypes is None:
        return f"{last.loss:.3f}: 1 minus the cosine of the CLS features with those of the frozen teacher."
    side = "below" if last.excess < 0 else "above"
    return (
        f"{last.loss:.3f}, which is {abs(last.excess):.3f} {side} ln({last.prototypes}) = "
        f"{math.log(last.prototypes):.3f}, the loss of a student whose output is uniform."
    )


def _entropies(last: Reading) -> str:
    if last.prototypes is None or last.rows is None:
        return ""
    highest = math.log(min(last.prototypes, max(last.rows, 1)))
    return (
        f"The gap is {last.entropy_gap:.2f} of at most {highest:.2f}. It "
        "measures how much the teacher's output depends on the image. A gap of 0 is a collapse: to uniform "
        "outputs if both entropies are at the dashed line, to a single prototype if both are 0."
    )


IMITATED = "1 minus the cosine of patches with those of the frozen teacher, the mean over all of a view."
PATCH_LOSS = (
    "The cross-entropy of student and teacher: the mean over the masked patches of a view, summed over the "
    "views and divided by the number of all global views, of which only a share is masked."
)
PATCHES = (
    "As above, for patches that the student does not see. A gap of 0 means that the teacher says the same of "
    "every patch: the term of the patches has collapsed, whatever the images do."
)


def _knn(readings: Sequence[Reading], levels: dict[str, float]) -> str:
    points = [(reading.step, value) for reading in readings if (value := finite(reading.knn)) is not None]
    if not points:
        return ""
    step, value = points[-1]
    best_step, best = max(points, key=lambda point: point[1])
    caption = f"{value:.1f} %"
    if best > value:
        caption += f" at step {step:,} (best: {best:.1f} % at step {best_step:,})"
    for name, level in levels.items():
        caption += f", {abs(value - level):.1f} points {'above' if value >= level else 'below'} the {name}"
    return f"{caption}."


def _rank(record: RunRecord, levels: dict[str, float]) -> str:
    value = record.latest("rankme")
    if value is None:
        return ""
    model = record.config.model
    whole = "" if model.timm else f"of {model.shape[0]} "
    caption = f"The features span {value:.0f} {whole}dimensions"
    return caption + "".join(f", {level:.0f} before training" for level in levels.values()) + "."


def _small_charts(readings: Sequence[Reading]) -> dict[str, tuple[str, str]]:
    """Return the titles and captions of the small charts, by the field of a reading."""
    last = readings[-1]
    wait = median(reading.data_wait for reading in readings)
    speed = median(reading.images_per_second for reading in readings)
    advice = " The device waits for images: try a higher data.workers." if wait > LONG_WAIT else ""
    half_life = math.log(0.5, last.momentum) if 0 < last.momentum < 1 else math.inf
    memory = "the teacher hardly changes"
    if half_life < FROZEN_HALF_LIFE:
        memory = f"the teacher averages the student with a half-life of {half_life:,.0f} steps"
    return {
        "embedding_std": (
            "Feature spread",
            f"{last.embedding_std:.2f}; 1: over the whole sphere, 0: all images at one point.",
        ),
        "prototypes_in_use": (
            "Prototypes in use",
            f"{last.prototypes_in_use} for the {last.rows} teacher outputs of a batch.",
        ),
        "koleo": (
            "KoLeo",
            "Minus the mean logarithm of the distance of an image to the nearest other, summed over the "
            "global views: lower is wider apart.",
        ),
        "gram": (
            "Gram",
            "The mean squared difference of the cosines between patches from those of the earlier teacher.",
        ),
        "gradient_norm": (
            "Gradient norm",
            f"{last.gradient_norm:.3g}. Skipped non-finite steps: {last.nonfinite_steps:,}.",
        ),
        "lr": ("Learning rate", f"{last.lr:.2g} now, {max(r.lr for r in readings):.2g} at its peak."),
        "momentum": ("Teacher momentum", f"{last.momentum:.5g} now: {memory}."),
        "teacher_temp": (
            "Teacher temperature",
            f"{last.teacher_temp:.3g} now; a lower temperature gives sharper outputs.",
        ),
        "weight_decay": ("Weight decay", f"{last.weight_decay:.2g} now."),
        "images_per_second": ("Throughput", f"Typically {speed:,.0f} images/s."),
        "data_wait": ("Waiting for data", f"Typically {100 * wait:.1f} % of the time.{advice}"),
    }
