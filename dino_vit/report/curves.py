"""The curves of a run as data, each with a sentence that says what it shows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NotRequired, TypedDict

from dino_vit.report.record import RunRecord, finite
from dino_vit.training.diagnosis import Reading

BUCKETS = 300  # of readings along a curve; of each the lowest and the highest are kept
MUCH_WAITING = 0.1  # share of the time from which waiting for images is worth a word

STILL = 1e5  # steps of half-life from which a teacher does not move

Point = tuple[int, float]


class Series(TypedDict):
    """One line of a chart."""

    name: str
    points: list[Point]


class Level(TypedDict):
    """A value to compare with."""

    name: str
    value: float


class Chart(TypedDict):
    """A chart, as the page draws it."""

    id: str
    title: str
    words: str
    series: list[Series]
    levels: list[Level]
    unit: NotRequired[str]
    small: NotRequired[bool]  # one of many beside each other


def charts(record: RunRecord) -> list[Chart]:
    """Return the charts of a run, as many as its readings allow."""
    readings = record.readings
    if not readings:
        return []
    found = [_loss(readings), _entropies(readings), _knn(record, readings), _rank(record, readings)]
    found += [_spread(readings), _prototypes(readings), _gradient(readings)]
    found += [_rate(readings), _momentum(readings), _temperature(readings), _decay(readings)]
    found += [_speed(readings), _wait(readings)]
    drawn = [chart for chart in found if any(series["points"] for series in chart["series"])]
    return [chart for chart in drawn if chart["id"] not in ("temperature", "decay") or _moves(chart)]


def _moves(chart: Chart) -> bool:
    return len({value for series in chart["series"] for _, value in series["points"]}) > 1


def thin(points: Sequence[Point]) -> list[Point]:
    """Keep so few points that a page stays light, and every peak among them."""
    if len(points) <= 2 * BUCKETS:
        return list(points)
    kept = {0, len(points) - 1}
    for bucket in range(BUCKETS):
        first, end = (len(points) * number // BUCKETS for number in (bucket, bucket + 1))
        inside = range(first, end)
        kept |= {min(inside, key=lambda i: points[i][1]), max(inside, key=lambda i: points[i][1])}
    return [points[place] for place in sorted(kept)]


def _series(name: str, readings: Iterable[Reading], field: str) -> Series:
    pairs = ((reading.step, finite(getattr(reading, field))) for reading in readings)
    return Series(name=name, points=thin([(step, value) for step, value in pairs if value is not None]))


def _loss(readings: list[Reading]) -> Chart:
    last, most = readings[-1], math.log(readings[-1].prototypes)
    flat = f"ln({last.prototypes}) = {most:.3f}, the loss of a student that gives every image the same answer"
    if not math.isfinite(last.loss):
        words = "The newest loss is not a finite number."
    elif last.excess < 0:
        words = f"{last.loss:.3f}, which is {-last.excess:.3f} below {flat}."
    else:
        words = f"{last.loss:.3f}, which is {last.excess:.3f} above {flat}: nothing is foreseen yet."
    return Chart(
        id="loss",
        title="Loss",
        words=words,
        series=[_series("loss", readings, "loss")],
        levels=[Level(name=f"ln({last.prototypes})", value=most)],
    )


def _entropies(readings: list[Reading]) -> Chart:
    last = readings[-1]
    most = min(math.log(last.prototypes), math.log(max(last.rows, 1)))
    words = (
        f"The gap is {last.entropy_gap:.2f} of at most {most:.2f}: how much the teacher's output says about "
        "its image. A collapse is a gap of 0: both entropies at the dashed line if every output is flat, "
        "both at 0 if one prototype takes every image."
    )
    return Chart(
        id="entropies",
        title="Entropies of the teacher",
        words=words,
        series=[
            _series("of the mean output", readings, "mean_output_entropy"),
            _series("of an output, on average", readings, "output_entropy"),
            _series("gap", readings, "entropy_gap"),
        ],
        levels=[Level(name=f"ln({last.prototypes})", value=math.log(last.prototypes))],
    )


def _knn(record: RunRecord, readings: list[Reading]) -> Chart:
    series = _series("k-NN", readings, "knn")
    before, pixels = finite(record.baseline.get("knn")), finite(record.baseline.get("raw_pixels"))
    latest = series["points"][-1:]
    if before is not None:
        series["points"].insert(0, (0, before))
    words, levels = "", []
    for step, value in latest:
        best_step, best = max(series["points"], key=lambda point: point[1])
        words = f"{value:.1f} % at step {step:,}"
        words += f" (best: {best:.1f} % at step {best_step:,})" if best > value else ""
        times = [(before, "before the first step"), (pixels, "of raw pixels")]
        beside = [f"{value / it:.1f} times the {it:.1f} % {name}" for it, name in times if it]
        words += f": {' and '.join(beside)}." if beside else "."
    if before is not None:
        levels.append(Level(name="before the first step", value=before))
    if pixels is not None:
        levels.append(Level(name="raw pixels", value=pixels))
    return Chart(id="knn", title="k-NN accuracy", words=words, series=[series], levels=levels, unit="%")


def _rank(record: RunRecord, readings: list[Reading]) -> Chart:
    series, before = _series("effective rank", readings, "rankme"), finite(record.baseline.get("rankme"))
    width = record.config.model.shape[0]
    words = ""
    for _, value in series["points"][-1:]:
        words = f"The features use {value:.0f} of {width} directions"
        words += f", before the first step {before:.0f}." if before is not None else "."
    if before is not None:
        series["points"].insert(0, (0, before))
    levels = [] if before is None else [Level(name="before the first step", value=before)]
    return Chart(id="rank", title="Effective rank", words=words, series=[series], levels=levels)


def _small(identifier: str, title: str, words: str, readings: list[Reading], field: str) -> Chart:
    series = [_series(title.lower(), readings, field)]
    return Chart(id=identifier, title=title, words=words, series=series, levels=[], small=True)


def _spread(readings: list[Reading]) -> Chart:
    words = f"{readings[-1].embedding_std:.2f}; 1 is all over the sphere, 0 all images at one point."
    return _small("std", "Spread of features", words, readings, "embedding_std")


def _prototypes(readings: list[Reading]) -> Chart:
    last = readings[-1]
    words = f"{last.prototypes_in_use} take the {last.rows} outputs of a batch."
    return _small("prototypes", "Prototypes in use", words, readings, "prototypes_in_use")


def _gradient(readings: list[Reading]) -> Chart:
    lost = readings[-1].nonfinite_steps
    skipped = f"{lost:,} steps were not finite and skipped." if lost else "No step was lost."
    words = f"{readings[-1].gradient_norm:.3g}. {skipped}"
    return _small("gradient", "Gradient norm", words, readings, "gradient_norm")


def _rate(readings: list[Reading]) -> Chart:
    peak = max(reading.lr for reading in readings)
    words = f"{readings[-1].lr:.2g} now, {peak:.2g} at its highest."
    return _small("lr", "Learning rate", words, readings, "lr")


def _momentum(readings: list[Reading]) -> Chart:
    momentum = readings[-1].momentum
    half = math.log(0.5, momentum) if 0 < momentum < 1 else math.inf
    words = f"{momentum:.5g} now: " + (
        f"half of it is older than {half:,.0f} steps." if half < STILL else "it stands still."
    )
    return _small("momentum", "Momentum of the teacher", words, readings, "momentum")


def _temperature(readings: list[Reading]) -> Chart:
    words = f"{readings[-1].teacher_temp:.3g} now; lower is more certain."
    return _small("temperature", "Temperature of the teacher", words, readings, "teacher_temp")


def _decay(readings: list[Reading]) -> Chart:
    return _small("decay", "Weight decay", f"{readings[-1].weight_decay:.2g} now.", readings, "weight_decay")


def _speed(readings: list[Reading]) -> Chart:
    typical = median(reading.images_per_second for reading in readings)
    words = f"{typical:,.0f} images a second as a rule."
    return _small("speed", "Images a second", words, readings, "images_per_second")


def _wait(readings: list[Reading]) -> Chart:
    typical = median(reading.data_wait for reading in readings)
    words = f"{typical:.1%} of the time as a rule."
    if typical > MUCH_WAITING:
        words += " The processor waits for images: try more data.workers."
    chart = _small("wait", "Waiting for images", words, readings, "data_wait")
    chart["unit"] = "%"
    for series in chart["series"]:
        series["points"] = [(step, 100 * value) for step, value in series["points"]]
    return chart
