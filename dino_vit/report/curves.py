"""The charts of a run: the points of each curve, and a caption that explains them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from dino_vit.report.record import RunRecord, finite
from dino_vit.training.readings import Reading

BUCKETS = 300  # the lowest and the highest point of each are kept
LONG_WAIT = 0.1  # share of the time spent waiting for data from which the caption says what to do
FROZEN_HALF_LIFE = 1e5  # in steps; a teacher that averages over more hardly changes

SMALL = {  # titles of the small charts by the field that they show
    "embedding_std": "Feature spread",
    "prototypes_in_use": "Prototypes in use",
    "gradient_norm": "Gradient norm",
    "lr": "Learning rate",
    "momentum": "Teacher momentum",
    "teacher_temp": "Teacher temperature",
    "weight_decay": "Weight decay",
    "images_per_second": "Throughput",
    "data_wait": "Waiting for data",
}
HIDDEN_IF_CONSTANT = ("teacher_temp", "weight_decay")

Point = tuple[int, float]


@dataclass(kw_only=True)
class Chart:
    """A chart as `charts.js` draws it."""

    id: str
    title: str
    caption: str
    series: dict[str, list[Point]]  # by the name of the curve
    levels: dict[str, float] = field(default_factory=dict)  # values to compare with, by name
    unit: str = ""
    small: bool = False


def charts(record: RunRecord) -> list[Chart]:
    """Return the charts that the readings of a run allow."""
    readings = record.readings
    if not readings:
        return []
    found = [_loss(readings), _entropies(readings), _knn(record, readings), _rank(record, readings)]
    return [chart for chart in found + _small_charts(readings) if any(chart.series.values())]


def thin(points: Sequence[Point]) -> list[Point]:
    """Keep few enough points for a light page, with both ends and every peak among them."""
    if len(points) <= 2 * BUCKETS:
        return list(points)
    kept = {0, len(points) - 1}
    for bucket in np.array_split(np.arange(len(points)), BUCKETS):
        kept |= {min(bucket, key=lambda i: points[i][1]), max(bucket, key=lambda i: points[i][1])}
    return [points[i] for i in sorted(kept)]


def _points(readings: Sequence[Reading], field: str) -> list[Point]:
    values = [(reading.step, finite(getattr(reading, field))) for reading in readings]
    return thin([(step, value) for step, value in values if value is not None])


def _loss(readings: list[Reading]) -> Chart:
    last = readings[-1]
    uniform, value = f"ln({last.prototypes})", math.log(last.prototypes)
    caption = "The latest loss is not finite."
    if math.isfinite(last.loss):
        side = "below" if last.excess < 0 else "above"
        caption = f"{last.loss:.3f}, which is {abs(last.excess):.3f} {side} {uniform} = {value:.3f}, "
        caption += "the loss of a student whose output is uniform."
    series = {"loss": _points(readings, "loss")}
    return Chart(id="loss", title="Loss", caption=caption, series=series, levels={uniform: value})


def _entropies(readings: list[Reading]) -> Chart:
    last = readings[-1]
    highest = math.log(last.prototypes)
    caption = (
        f"The gap is {last.entropy_gap:.2f} of at most {min(highest, math.log(max(last.rows, 1))):.2f}. It "
        "measures how much the teacher's output depends on the image. A gap of 0 is a collapse: to uniform "
        "outputs if both entropies are at the dashed line, to a single prototype if both are 0."
    )
    series = {
        "of the mean output": _points(readings, "mean_output_entropy"),
        "of each output, on average": _points(readings, "output_entropy"),
        "gap": _points(readings, "entropy_gap"),
    }
    levels = {f"ln({last.prototypes})": highest}
    return Chart(id="entropies", title="Teacher entropies", caption=caption, series=series, levels=levels)


def _knn(record: RunRecord, readings: list[Reading]) -> Chart:
    points, caption = _points(readings, "knn"), ""
    levels = record.baseline_levels("knn", "raw_pixels")
    if points:
        step, value = points[-1]
        best_step, best = max(points, key=lambda point: point[1])
        caption = f"{value:.1f} %"
        if best > value:
            caption += f" at step {step:,} (best: {best:.1f} % at step {best_step:,})"
        for name, level in levels.items():
            side = "above" if value >= level else "below"
            caption += f", {abs(value - level):.1f} points {side} the {name}"
        caption += "."
    return Chart(
        id="knn",
        title="k-NN accuracy",
        caption=caption,
        series={"k-NN": _from_step_0(points, record, "knn")},
        levels=levels,
        unit="%",
    )


def _rank(record: RunRecord, readings: list[Reading]) -> Chart:
    points, caption = _points(readings, "rankme"), ""
    levels = record.baseline_levels("rankme")
    if points:
        caption = f"The features span {points[-1][1]:.0f} of {record.config.model.shape[0]} dimensions"
        caption += "".join(f", {level:.0f} before training" for level in levels.values()) + "."
    series = {"effective rank": _from_step_0(points, record, "rankme")}
    return Chart(id="rank", title="Effective rank", caption=caption, series=series, levels=levels)


def _from_step_0(points: list[Point], record: RunRecord, figure: str) -> list[Point]:
    start = finite(record.baseline.get(figure))
    return points if start is None else [(0, start), *points]


def _small_charts(readings: list[Reading]) -> list[Chart]:
    last = readings[-1]
    wait = median(reading.data_wait for reading in readings)
    speed = median(reading.images_per_second for reading in readings)
    advice = " The device waits for images: try a higher data.workers." if wait > LONG_WAIT else ""
    captions = {
        "embedding_std": f"{last.embedding_std:.2f}; 1: over the whole sphere, 0: all images at one point.",
        "prototypes_in_use": f"{last.prototypes_in_use} for the {last.rows} teacher outputs of a batch.",
        "gradient_norm": f"{last.gradient_norm:.3g}. {_skipped(last.nonfinite_steps)}",
        "lr": f"{last.lr:.2g} now, {max(reading.lr for reading in readings):.2g} at its peak.",
        "momentum": f"{last.momentum:.5g} now: {_memory(last.momentum)}.",
        "teacher_temp": f"{last.teacher_temp:.3g} now; a lower temperature gives sharper outputs.",
        "weight_decay": f"{last.weight_decay:.2g} now.",
        "images_per_second": f"Typically {speed:,.0f} images/s.",
        "data_wait": f"Typically {100 * wait:.1f} % of the time.{advice}",
    }
    found = []
    for name, title in SMALL.items():
        points = _points(readings, name)
        if name in HIDDEN_IF_CONSTANT and len({value for _, value in points}) <= 1:
            continue
        chart = Chart(
            id=name, title=title, caption=captions[name], series={title.lower(): points}, small=True
        )
        if name == "data_wait":
            chart.series = {title.lower(): [(step, 100 * share) for step, share in points]}
            chart.unit = "%"
        found.append(chart)
    return found


def _skipped(steps: int) -> str:
    if steps == 0:
        return "No steps were skipped."
    return "1 non-finite step was skipped." if steps == 1 else f"{steps:,} non-finite steps were skipped."


def _memory(momentum: float) -> str:
    half_life = math.log(0.5, momentum) if 0 < momentum < 1 else math.inf
    if half_life < FROZEN_HALF_LIFE:
        return f"the teacher averages the student with a half-life of {half_life:,.0f} steps"
    return "the teacher hardly changes"
