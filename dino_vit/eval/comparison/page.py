"""The page of a comparison: figures with their intervals, pairs, curves, features and images that differ."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dino_vit.data.image_set import ImageSet, spread
from dino_vit.data.images.decode import UnreadableImage, read_image
from dino_vit.data.images.pixels import RGB, Pixels
from dino_vit.eval.comparison.pairs import Pair, verdict
from dino_vit.eval.features import FrozenBackbone
from dino_vit.eval.figures import Measured, Predictions
from dino_vit.eval.maps.attention import attention_of, patch_tokens, whole_patches
from dino_vit.eval.maps.pictures import draw_patches, draw_tile, heat, principal_colours, shorten, thumbnail
from dino_vit.models.vit import VisionTransformer
from dino_vit.reports.page import MAX_NAME, Row, charts, fill
from dino_vit.reports.record import RunRecord

SHOWN = 4  # images whose features are drawn
DIFFERING = 8  # images of a kind on which backbones differ


@dataclass(kw_only=True)
class Comparison:
    """What was measured of some backbones on the images of a source."""

    source: ImageSet
    pixels: Pixels = RGB  # of the images
    ranks: dict[str, float] = field(default_factory=dict)  # effective, by name of the backbone
    measured: dict[str, dict[str, Measured]] = field(default_factory=dict)  # by title, then by name
    raw_pixels: dict[str, Measured] = field(default_factory=dict)  # by title; no backbone, so never the best
    predictions: dict[str, Predictions] = field(default_factory=dict)  # by name
    runs: dict[str, RunRecord] = field(default_factory=dict)  # by name
    maps: dict[int, Row] = field(default_factory=dict)  # by image


def render(
    comparison: Comparison, pairs: list[Pair], best: Mapping[str, tuple[str, ...]], images: str
) -> str:
    """Return the page of a comparison; `best` has, by figure, the best and those that are as good.

    `images` says what the backbones are compared on.
    """
    return fill(
        "comparison.html",
        title=", ".join(comparison.ranks),
        images=images,
        comparison=comparison,
        pairs=pairs,
        best=best,
        verdict=conclusion(comparison, best),
        maps=list(comparison.maps.values()),
        differing=_differing(comparison),
        data={"charts": (joint := joint_charts(comparison.runs)), "shown": len(joint), "map": None},
    )


def conclusion(comparison: Comparison, best: Mapping[str, tuple[str, ...]]) -> str:
    """Say which backbone to take, and by what even raw pixels are as good."""
    texts = [verdict(best)]
    for title, baseline in comparison.raw_pixels.items():
        name = best[title][0]
        points = 100 * (comparison.measured[title][name].mean - baseline.mean)
        if points <= 0:
            beside = f"is {-points:.1f} points below" if points < -0.05 else "does as well"
            texts.append(f"By {title} none is better than raw pixels: {name} {beside}.")
    return " ".join(texts)


def joint_charts(runs: dict[str, RunRecord]) -> list[dict[str, Any]]:
    """Return the charts of runs with a line for each run, and the levels that all of them share."""
    joint = dict[str, dict[str, Any]]()
    for name, record in runs.items():
        for chart in charts(record):
            for curve, points in chart["series"].items():
                title = chart["title"]
                if curve.casefold() not in title.casefold():  # one of several curves of the chart
                    title += f": {curve}"
                shared = joint.setdefault(title, {**chart, "title": title, "series": {}})
                shared["series"][name] = points
                shared["levels"] = dict(shared["levels"].items() & chart["levels"].items())
    return list(joint.values())


def draw_maps(comparison: Comparison, frozen: FrozenBackbone, name: str) -> None:
    """Draw a few whole images, and a backbone's attention to them and its patches, as far as it has them."""
    source, model, images = comparison.source, frozen.model, dict[int, Tensor]()
    for index in spread(len(source), SHOWN):
        with suppress(UnreadableImage):
            images[index] = read_image(source, index, frozen.transform.pixels)
    if not (model.has_patches and images):
        return
    batches = [whole_patches(frozen, image)[1] for image in images.values()]
    colours = principal_colours([patch_tokens(model, batch)[0].float().cpu() for batch in batches])
    for (index, image), batch, patches in zip(images.items(), batches, colours, strict=True):
        row = Row(shorten(source.name(index), MAX_NAME), [draw_tile(image, "image")])
        tiles = comparison.maps.setdefault(index, row).tiles
        if isinstance(model, VisionTransformer):
            tiles.append(draw_patches(heat(attention_of(frozen, batch).mean(0)), f"{name}, attention"))
        picture = (255 * patches).byte().permute(2, 0, 1)
        tiles.append(draw_patches(picture, f"{name}, patches"))


def _differing(comparison: Comparison) -> list[Row]:
    """Return images that only the best backbone gets right, and those that another does but not the best."""
    predictions = comparison.predictions
    if len(predictions) < 2:
        return []
    common = set.intersection(*(set(each.images.tolist()) for each in predictions.values()))
    right = {name: common & set(each.images[each.right].tolist()) for name, each in predictions.items()}
    best = max(right, key=lambda name: len(right[name]))
    others = set[int]().union(*(images for name, images in right.items() if name != best))
    only, missed = sorted(right[best] - others), sorted(others - right[best])
    rows = []
    for title, images in ((f"Only {best} is right", only), (f"{best} is wrong, another is right", missed)):
        tiles = []
        for image in (images[place] for place in spread(len(images), DIFFERING)):
            lines = []
            for name, each in predictions.items():
                said = each.classes[each.ranked[each.images == image][0, 0]]
                lines.append(f"{'✓' if image in right[name] else '✗'} {name}: {said}")
            picture = thumbnail(comparison.source, image, comparison.pixels)
            tiles.append(draw_tile(picture, "\n".join(lines)))
        rows.append(Row(f"{title}: {len(images):,} of {len(common):,} images", tiles))
    return rows
