"""The page of a comparison: figures with their intervals, pairs, curves, features and images that differ."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dino_vit.data.images.decode import UnreadableImage
from dino_vit.data.images.pixels import RGB, Pixels
from dino_vit.data.sources.source import Source, spread
from dino_vit.eval.comparison import Pair, Standing, compare_pairs, standings, verdict
from dino_vit.eval.confidence import Interval, Measured
from dino_vit.eval.features.frozen import FrozenBackbone
from dino_vit.eval.maps.attention import cls_attention, patch_tokens, principal_colours
from dino_vit.eval.maps.pictures import EMPTY, enlarge, heat, resize, shorten, thumbnail
from dino_vit.models.vit import VisionTransformer
from dino_vit.reports.curves import thin
from dino_vit.reports.explorer import MAX_NAME, data_uri
from dino_vit.reports.page import fill
from dino_vit.reports.record import RunRecord, finite
from dino_vit.reports.sheets import SIDE, Row, Tile

SHOWN = 4  # images whose features are drawn
DIFFERING = 8  # images of a kind on which backbones differ
_LEFT, _RIGHT, _ROW = 300, 690, 26  # of the charts of intervals, in their own units
_NAME = 36  # characters of a name beside a chart


class Opinion(NamedTuple):
    """What a backbone says of images: class and whether it is right, by the index of the image."""

    predicted: dict[int, str]
    right: dict[int, bool]


@dataclass(kw_only=True)
class Comparison:
    """What was found about some backbones on the images of a source."""

    source: Source
    names: list[str]
    notes: list[str]
    pixels: Pixels = RGB  # of the images
    steps: dict[str, int | None] = field(default_factory=dict)  # of training, by name
    runs: dict[str, RunRecord] = field(default_factory=dict)  # by name, where the folder is known
    ranks: dict[str, float] = field(default_factory=dict)  # effective, by name
    figures: dict[str, dict[str, Measured]] = field(default_factory=dict)  # by title, then by name
    opinions: dict[str, Opinion] = field(default_factory=dict)  # by name
    maps: dict[str, list[list[Tile]]] = field(default_factory=dict)  # of the first images, by name
    intervals: dict[str, dict[str, Interval]] = field(default_factory=dict)
    pairs: list[Pair] = field(default_factory=list)
    standings: dict[str, Standing] = field(default_factory=dict)

    def compare(self) -> None:
        """Compare all pairs by the figures that were measured."""
        self.pairs = compare_pairs(self.figures)
        self.standings = standings(self.figures, self.pairs)
        self.intervals = {
            title: {name: one.interval for name, one in of.items()} for title, of in self.figures.items()
        }

    def mark(self, title: str, name: str) -> str:
        """Return how a backbone stands by a figure: best, tied or behind."""
        standing = self.standings[title]
        return "best" if name == standing.best else "tied" if name in standing.tied else "behind"


def render(found: Comparison, title: str) -> str:
    """Return the page of a comparison."""
    marks = {"best": " ●", "tied": " ○", "behind": ""}
    header = [*found.figures, "effective rank"]
    cells = {
        name: [f"{of[name]}{marks[found.mark(one, name)]}" for one, of in found.intervals.items()]
        for name in found.names
    }
    return fill(
        "comparison.html",
        kind="comparison",
        title=title,
        found=found,
        verdict=verdict(found.standings),
        intervals=[_interval_chart(found, one) for one in found.figures],
        header=header,
        rows=[(name, [*cells[name], f"{found.ranks[name]:.1f}"]) for name in found.names],
        pairs=[(pair.figure, pair.better, pair.other, *describe(pair)) for pair in found.pairs],
        maps=_map_rows(found),
        disagreements=_disagreements(found),
        data={"charts": charts(found), "live": False, "version": None, "explorer": None},
    )


def describe(pair: Pair) -> tuple[str, str]:
    """Return a difference with its interval, and its p, as texts."""
    points, low, high, p = pair.difference
    return f"{points:.2f} ({low:.2f} to {high:.2f})", "< 0.001" if p < 0.001 else f"{p:.3f}"


def _interval_chart(found: Comparison, title: str) -> dict[str, Any]:
    """Return a row for each backbone: its figure as a point on a line from low to high."""
    intervals = found.intervals[title]
    low, high = min(one.low for one in intervals.values()), max(one.high for one in intervals.values())
    margin = max(0.5, 0.05 * (high - low))
    low, high = max(0.0, low - margin), min(100.0, high + margin)

    def x(value: float) -> float:
        return round(_LEFT + (value - low) / (high - low) * (_RIGHT - _LEFT), 1)

    rows = [
        {
            "name": shorten(name, _NAME),
            "y": _ROW * place + _ROW // 2,
            **{key: x(value) for key, value in zip(("x", "low", "high"), intervals[name], strict=True)},
            "text": str(intervals[name]),
            "tone": found.mark(title, name),
        }
        for place, name in enumerate(found.names)
    ]
    standing, images = found.standings[title], len(found.figures[title][found.names[0]].images)
    beside = f"; {' and '.join(standing.tied)} cannot be told from it" if standing.tied else ""
    return {
        "title": title,
        "caption": f"{images:,} images. Best: {standing.best}{beside}.",
        "height": _ROW * len(rows) + 26,
        "rows": rows,
        "ticks": [{"x": x(value), "text": f"{value:g}"} for value in _ticks(low, high)],
    }


def _ticks(low: float, high: float) -> list[float]:
    step = next(one for one in (0.5, 1, 2, 5, 10, 20, 50) if (high - low) / one <= 6)
    return [float(value) for value in np.arange(np.ceil(low / step), high / step + 1e-9) * step]


def charts(found: Comparison) -> list[dict[str, Any]]:
    """Return the figures of checkpoints of one run by step, and the curves that the runs have logged."""
    made: list[dict[str, Any]] = []
    of_run: dict[Path, list[str]] = {}
    for name, record in found.runs.items():
        of_run.setdefault(record.folder.resolve(), []).append(name)
    for folder, names in of_run.items():
        points = {
            title: sorted(
                (step, found.intervals[title][name].percent)
                for name in names
                if (step := found.steps[name]) is not None
            )
            for title in found.figures
        }
        if len(names) > 1 and points:
            caption = "The figures of this comparison, by the step of the checkpoint."
            made.append(_chart(f"Checkpoints of {folder.name}", caption, points, "%"))
    records = {folder.name: found.runs[names[0]] for folder, names in of_run.items()}
    logged = {
        "knn": ("k-NN during training", "%", "On the images that each run evaluated itself on."),
        "rankme": ("Effective rank during training", "", "How many dimensions the features span."),
    }
    for of_reading, (title, unit, caption) in logged.items():
        curves = {name: thin(_logged(record, of_reading)) for name, record in records.items()}
        if curves := {name: points for name, points in curves.items() if points}:
            made.append(_chart(title, caption, curves, unit))
    return made


def _logged(record: RunRecord, figure: str) -> list[tuple[int, float]]:
    values = ((reading.step, finite(getattr(reading, figure))) for reading in record.readings)
    return [(step, value) for step, value in values if value is not None]


def _chart(title: str, caption: str, series: Mapping[str, Any], unit: str) -> dict[str, Any]:
    chart = {"id": title.lower().replace(" ", "-"), "title": title, "caption": caption, "series": series}
    return {**chart, "levels": {}, "unit": unit, "small": False}


def map_tiles(frozen: FrozenBackbone, source: Source, indices: Sequence[int], name: str) -> list[list[Tile]]:
    """Draw the attention and the patches of some images, as far as the backbone has them."""
    model, tiles = frozen.model, list[list[Tile]]([] for _ in indices)
    images, drawn = list[Tensor](), list[list[Tile]]()
    for index, of_image in zip(indices, tiles, strict=True):
        with suppress(UnreadableImage):
            images.append(frozen.preparation.read(source, index))
            drawn.append(of_image)
    if not (model.has_patches and images):
        return tiles
    batch = frozen.preparation.normaliser(frozen.device)(torch.stack(images))
    if isinstance(model, VisionTransformer):
        for of_image, heads in zip(drawn, cls_attention(model, batch).float().cpu(), strict=True):
            of_image.append(_map_tile(heat(heads.mean(0)), f"{name}, attention"))
    colours = principal_colours(list(patch_tokens(model, batch).float().cpu()))
    for of_image, one in zip(drawn, colours, strict=True):
        of_image.append(_map_tile((255 * one.permute(2, 0, 1)).byte(), f"{name}, patches"))
    return tiles


def _map_tile(colours: Tensor, caption: str) -> Tile:
    """Draw each patch as a square of whole pixels."""
    side = max(1, SIDE // max(colours.shape[-2:]))
    size = colours.shape[-2] * side, colours.shape[-1] * side
    return Tile(data_uri(enlarge(colours, size, (side, side)).byte()), caption)


def _map_rows(found: Comparison) -> list[Row]:
    """Return the first images, each beside what all backbones make of it."""
    rows = []
    for place, index in enumerate(first_images(found.source)):
        tiles = [tile for of in found.maps.values() if place < len(of) for tile in of[place]]
        if tiles:
            image = _picture(found, index)
            rows.append(Row(shorten(found.source.name(index), MAX_NAME), [Tile(image, "image"), *tiles]))
    return rows


def first_images(source: Source) -> list[int]:
    """Return the images whose features are drawn: from all over the source."""
    return spread(len(source), SHOWN)


def _disagreements(found: Comparison) -> dict[str, list[dict[str, Any]]]:
    """Return images that only the best backbone gets right, and those that others do but not the best."""
    if len(found.opinions) < 2:
        return {}
    right = {name: one.right for name, one in found.opinions.items()}
    common = sorted(set.intersection(*map(set, right.values())))
    best = max(right, key=lambda name: sum(right[name][index] for index in common))
    others = [of for name, of in right.items() if name != best]
    helped = {index: any(of[index] for of in others) for index in common}
    kinds = {
        f"Only {best} is right": [index for index in common if right[best][index] and not helped[index]],
        f"{best} is wrong, another right": [i for i in common if helped[i] and not right[best][i]],
    }
    return {
        f"{title}: {len(images):,} of {len(common):,} images": [
            _judged(found, images[place]) for place in spread(len(images), DIFFERING)
        ]
        for title, images in kinds.items()
        if images
    }


def _judged(found: Comparison, index: int) -> dict[str, Any]:
    label = found.source.label(index)
    return {
        "uri": _picture(found, index),
        "name": shorten(found.source.name(index), MAX_NAME),
        "label": "" if label is None else found.source.classes[label],
        "said": [(name, one.predicted[index], one.right[index]) for name, one in found.opinions.items()],
    }


def _picture(found: Comparison, index: int) -> str:
    picture = thumbnail(found.source, index, found.pixels)
    return data_uri(EMPTY if picture is None else resize(picture, None, SIDE))
