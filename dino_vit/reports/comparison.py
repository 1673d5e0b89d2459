"""The page of a comparison: figures with their intervals, pairs, curves, features and images that differ."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dino_vit.data.images.decode import UnreadableImage
from dino_vit.data.images.pixels import RGB, Pixels
from dino_vit.data.sources.source import Source, spread
from dino_vit.eval.accuracy import Interval, Measured, Pair, Predictions, compare_pairs, standings, verdict
from dino_vit.eval.features import FrozenBackbone
from dino_vit.eval.maps.attention import cls_attention, patch_tokens, principal_colours
from dino_vit.eval.maps.pictures import EMPTY, enlarge, heat, resize_sides, shorten, thumbnail
from dino_vit.models.vit import VisionTransformer
from dino_vit.reports.curves import chart, curve
from dino_vit.reports.explorer import MAX_NAME, data_uri
from dino_vit.reports.page import fill
from dino_vit.reports.record import RunRecord
from dino_vit.reports.sheets import SIDE, Row, Tile

SHOWN = 4  # images whose features are drawn
DIFFERING = 8  # images of a kind on which backbones differ

Answers = Mapping[int, tuple[str, bool]]  # the predicted class of each image, and whether it is right


@dataclass(kw_only=True)
class Comparison:
    """What was measured of some backbones on the images of a source; complete before `pairs` are read."""

    source: Source
    names: list[str]
    notes: list[str]
    pixels: Pixels = RGB  # of the images
    steps: dict[str, int | None] = field(default_factory=dict)  # of training, by name
    runs: dict[str, RunRecord] = field(default_factory=dict)  # by name, where the folder is known
    ranks: dict[str, float] = field(default_factory=dict)  # effective, by name
    figures: dict[str, dict[str, Measured]] = field(default_factory=dict)  # by title, then by name
    predictions: dict[str, Predictions] = field(default_factory=dict)  # by name
    maps: dict[str, list[list[Tile]]] = field(default_factory=dict)  # of the first images, by name

    @cached_property
    def intervals(self) -> dict[str, dict[str, Interval]]:
        """The figures with their confidence intervals, by title, then by name."""
        return {
            title: {name: measured.interval for name, measured in by_name.items()}
            for title, by_name in self.figures.items()
        }

    @cached_property
    def pairs(self) -> list[Pair]:
        """All pairs by every figure."""
        return compare_pairs(self.figures)

    @cached_property
    def standings(self) -> dict[str, tuple[str, ...]]:
        """By title, the best and those that are as good."""
        return standings(self.figures, self.pairs)

    def mark(self, title: str, name: str) -> str:
        """Return how a backbone stands by a figure: best, tied or behind."""
        best, *tied = self.standings[title]
        return "best" if name == best else "tied" if name in tied else "behind"


def render(comparison: Comparison, title: str) -> str:
    """Return the page of a comparison."""
    return fill(
        "comparison.html",
        title=title,
        comparison=comparison,
        verdict=verdict(comparison.standings),
        maps=_map_rows(comparison),
        disagreements=_disagreements(comparison),
        data={"charts": charts(comparison), "map": None},
    )


def charts(comparison: Comparison) -> list[dict[str, Any]]:
    """Return the curves that the runs have logged."""
    runs = {record.folder.resolve(): record for record in comparison.runs.values()}
    drawn = []
    for title, figure, unit in (("k-NN", "knn", "%"), ("Effective rank", "rankme", "")):
        series = {folder.name: curve(record, figure) for folder, record in runs.items()}
        caption = "During training, on the images that each run evaluated itself on."
        drawn.append(chart(title, caption, series, unit=unit))
    return [of_figure for of_figure in drawn if of_figure["series"]]


def map_tiles(frozen: FrozenBackbone, source: Source, indices: Sequence[int], name: str) -> list[list[Tile]]:
    """Draw the attention and the patches of some images, as far as the backbone has them."""
    model, images = frozen.model, dict[int, Tensor]()
    for place, index in enumerate(indices):
        with suppress(UnreadableImage):
            images[place] = frozen.transform.read(source, index)
    tiles = list[list[Tile]]([] for _ in indices)
    if not (model.has_patches and images):
        return tiles
    batch = frozen.transform.normaliser(frozen.device)(torch.stack(list(images.values())))
    if isinstance(model, VisionTransformer):
        for place, heads in zip(images, cls_attention(model, batch).float().cpu(), strict=True):
            tiles[place].append(_map_tile(heat(heads.mean(0)), f"{name}, attention"))
    colours = principal_colours(list(patch_tokens(model, batch).float().cpu()))
    for place, patches in zip(images, colours, strict=True):
        tiles[place].append(_map_tile((255 * patches.permute(2, 0, 1)).byte(), f"{name}, patches"))
    return tiles


def _map_tile(colours: Tensor, caption: str) -> Tile:
    """Draw each patch as a square of whole pixels."""
    side = max(1, SIDE // max(colours.shape[-2:]))
    size = colours.shape[-2] * side, colours.shape[-1] * side
    return Tile(data_uri(enlarge(colours, size, (side, side)).byte()), caption)


def _map_rows(comparison: Comparison) -> list[Row]:
    """Return the first images, each beside what all backbones make of it."""
    rows = []
    for place, index in enumerate(first_images(comparison.source)):
        tiles = [tile for of_images in comparison.maps.values() for tile in of_images[place]]
        if tiles:
            image = Tile(_picture(comparison, index), "image")
            rows.append(Row(shorten(comparison.source.name(index), MAX_NAME), [image, *tiles]))
    return rows


def first_images(source: Source) -> list[int]:
    """Return the images whose features are drawn: from all over the source."""
    return spread(len(source), SHOWN)


def _disagreements(comparison: Comparison) -> list[Row]:
    """Return images that only the best backbone gets right, and those that others do but not the best."""
    if len(comparison.predictions) < 2:
        return []
    answers = {name: _answers(predictions) for name, predictions in comparison.predictions.items()}
    common = sorted(set.intersection(*map(set, answers.values())))
    right = {name: {index: given[index][1] for index in common} for name, given in answers.items()}
    best = max(right, key=lambda name: sum(right[name][index] for index in common))
    others = {i: any(right[name][i] for name in right if name != best) for i in common}
    kinds = {
        f"Only {best} is right": [i for i in common if right[best][i] and not others[i]],
        f"{best} is wrong, another right": [i for i in common if others[i] and not right[best][i]],
    }
    rows = []
    for title, indices in kinds.items():
        tiles = [_judged(comparison, answers, indices[place]) for place in spread(len(indices), DIFFERING)]
        rows.append(Row(f"{title}: {len(indices):,} of {len(common):,} images", tiles))
    return rows


def _answers(predictions: Predictions) -> Answers:
    rows = zip(predictions.images.tolist(), predictions.ranked[:, 0], predictions.right.tolist(), strict=True)
    return {image: (predictions.classes[number], right) for image, number, right in rows}


def _judged(comparison: Comparison, answers: Mapping[str, Answers], index: int) -> Tile:
    """Return an image with its class and what each backbone takes it for."""
    label = comparison.source.label(index)
    lines = ["" if label is None else comparison.source.classes[label]]
    for name, of_backbone in answers.items():
        predicted, right = of_backbone[index]
        lines.append(f"{'✓' if right else '✗'} {name}: {predicted}")
    return Tile(_picture(comparison, index), "\n".join(lines))


def _picture(comparison: Comparison, index: int) -> str:
    picture = thumbnail(comparison.source, index, comparison.pixels)
    return data_uri(EMPTY if picture is None else resize_sides(picture, None, SIDE))
