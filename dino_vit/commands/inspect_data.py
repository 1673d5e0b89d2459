"""A source of images before training on it: what is in it, what is broken, what views are cut of it."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

from pydantic import Field

from dino_vit.config.auto import auto_choices
from dino_vit.config.loading import load, replace
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.config.settings import Count, CountOrZero, Settings, setting
from dino_vit.data.images.decode import read_image
from dino_vit.data.sources.open import open_source
from dino_vit.data.sources.source import Source, spread
from dino_vit.data.statistics import ImageSummary, name_of
from dino_vit.data.survey import Survey, survey
from dino_vit.eval.pictures import Panel, as_picture, write_sheet
from dino_vit.views.build import build_pixels, make_views

log = logging.getLogger("dino_vit")

SHOWN = 10  # names, classes, groups in a text
SHEET_ROWS = 8


class InspectConfig(Settings):
    """Look at the images of a source before training on them."""

    source: str = Field(description="folder, image, pattern, list, archives, tables, hf:OWNER/NAME, arrays")
    labels: str | None = setting(None, "file of labels by name, .csv or .json; null: the source's own")
    count: Count | None = setting(2000, "images to look at, from all over the source; null: all")
    max_pixels: Count = setting(200_000_000, "a larger image is not decoded")
    sheet: str | None = setting("views.png", "PNG of the views that training would cut; null: none")
    rows: CountOrZero = setting(SHEET_ROWS, "images on the sheet")
    pretrain: str | None = setting(None, "config file of the training to show views of; null: recipe=auto")
    as_json: bool = setting(False, "print JSON, with every unreadable and every identical image")

    positional: ClassVar = ("source",)
    switches: ClassVar = {"json": "as_json"}
    also_known_as: ClassVar = {"source": "images data path", "count": "images limit n"}


def run(config: InspectConfig) -> int:
    """Print what was found, and draw the views."""
    source = open_source(config.source, config.labels)
    places = range(len(source)) if config.count is None else spread(len(source), config.count)
    found = survey(source, places, max_pixels=config.max_pixels)
    facts = describe(config.source, source, found)
    print(json.dumps(facts, indent=2, ensure_ascii=False) if config.as_json else "\n".join(say(facts)))
    if not found.found:
        raise ValueError(f"none of the {len(places):,} images that were looked at can be read")
    if config.sheet and config.rows:
        draw_views(source, found, config)
        log.info("%s: the views that training would cut of them", config.sheet)
    return 0


def describe(spec: str, source: Source, found: Survey) -> dict[str, Any]:
    """Return what is known of a source as plain values."""
    labels = Counter(source.label(index) for index in range(len(source)))
    without = labels.pop(None, 0)
    sizes = [one.size for one in found.found if one.size]
    return {
        "source": spec,
        "images": len(source),
        "labels": {name: labels[label] for label, name in enumerate(source.classes) if labels[label]},
        "without_label": without,
        "looked_at": len(found.found) + len(found.unreadable),
        "formats": found.count(lambda one: one.format),
        "pixels": found.count(lambda one: name_of(one.sight)),
        "height": _range(one.sight.height for one in found.found),
        "width": _range(one.sight.width for one in found.found),
        "shorter_side": _range(min(one.sight.height, one.sight.width) for one in found.found),
        "file_bytes": _range(sizes),
        "bytes_in_all": round(sum(sizes) / len(sizes) * len(source)) if sizes else 0,
        "values": [min(one.low for one in found.found), max(one.high for one in found.found)]
        if found.found
        else None,
        **dict(zip(("mean", "std"), found.normalisation() or (None, None), strict=True)),
        "unreadable": [{"name": one.name, "reason": one.reason} for one in found.unreadable],
        "identical": [[source.name(place) for place in group] for group in found.identical()],
    }


def _range(numbers: Iterable[float]) -> dict[str, float] | None:
    known = list(numbers)
    return {"least": min(known), "median": median(known), "most": max(known)} if known else None


def say(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is known as lines for a person."""
    yield f"{facts['source']}: {facts['images']:,} images, {_labels(facts)}"
    if facts["looked_at"] < facts["images"]:
        yield f"{facts['looked_at']:,} of them, from all over, were looked at (count=null: all)"
    if facts["height"]:
        yield from _rows(facts)
    for title, lines in (
        ("unreadable", [f"{one['name']}: {one['reason']}" for one in facts["unreadable"]]),
        ("identical", [" = ".join(group[:SHOWN]) for group in facts["identical"]]),
    ):
        if lines:
            yield _row(title, f"{len(lines):,} {'groups' if title == 'identical' else 'images'}")
            yield from (f"    {line}" for line in lines[:SHOWN])
            if len(lines) > SHOWN:
                yield f"    and {len(lines) - SHOWN:,} more; --json lists all"


def _rows(facts: Mapping[str, Any]) -> Iterator[str]:
    height, width, side = facts["height"], facts["width"], facts["shorter_side"]
    yield _row("format", _counted(facts["formats"]))
    yield _row("pixels", _counted(facts["pixels"]))
    yield _row(
        "size",
        f"{height['median']:g} × {width['median']:g} (median height × width); heights {height['least']:g} to "
        f"{height['most']:g}, widths {width['least']:g} to {width['most']:g}, shorter sides from "
        f"{side['least']:g}",
    )
    if facts["file_bytes"]:
        middle = facts["file_bytes"]["median"] / 1024
        yield _row(
            "file", f"{middle:,.1f} KiB (median), {facts['bytes_in_all'] / 2**20:,.1f} MiB in all, about"
        )
    yield _row("values", f"from {facts['values'][0]:g} to {facts['values'][1]:g}")
    if facts["mean"]:
        figures = ("; ".join(f"{value:.3f}" for value in facts[name]) for name in ("mean", "std"))
        yield _row("mean, std", "{} and {}, per channel, of values from 0 to 1".format(*figures))
    else:
        yield _row("mean, std", "not known: the values are not from 0 to 1; give data.range")


def _row(title: str, text: str) -> str:
    return f"  {title:<11} {text}"


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{what} {count:,}" for what, count in counts.items())


def _labels(facts: Mapping[str, Any]) -> str:
    labels: dict[str, int] = facts["labels"]
    if not labels:
        return "no labels (none are needed)"
    named = ", ".join(f"{name} {count:,}" for name, count in list(labels.items())[:SHOWN])
    more = f" and {len(labels) - SHOWN:,} more" if len(labels) > SHOWN else ""
    without = f"; {facts['without_label']:,} without" if facts["without_label"] else ""
    return f"{len(labels):,} labels: {named}{more}{without}"


def draw_views(source: Source, found: Survey, config: InspectConfig) -> None:
    """Write the sheet of the views of some images, an image a row."""
    seen = ImageSummary(sights=tuple(one.sight for one in found.found), unreadable=tuple(found.unreadable))
    training = pretraining(config.pretrain, source, seen)
    pixels = build_pixels(training)
    fitting = [one.place for one in found.found if one.sight.fits(pixels.channels)]
    places = [fitting[row] for row in spread(len(fitting), config.rows)]
    rows = []
    for place, made in zip(places, make_views(training, source, places, epoch=0), strict=True):
        pictures = [read_image(source, place, pixels), *made]
        rows.append([Panel(as_picture(picture)) for picture in pictures])
    views = training.views
    titles = ["image", *(f"global {n + 1}" for n in range(views.global_count))]
    titles += [f"local {n + 1}" for n in range(views.local_count)]
    names = [source.name(place) for place in places]
    write_sheet(rows, Path(config.sheet or ""), names=names, titles=titles)


def pretraining(file: str | None, source: Source, seen: ImageSummary) -> PretrainConfig:
    """Return the settings of a training on the source, filled in from what was seen."""
    config = load(PretrainConfig, Path(file) if file else None, [] if file else ["recipe=auto"])
    choices = auto_choices(
        config,
        image_size=seen.image_size,
        images=len(source),
        channels=seen.channels,
        global_batch=config.data.batch_size,
    )
    config = replace(config, {choice.key: choice.value for choice in choices})
    return config if config.data.bits else replace(config, {"data.bits": seen.bits})
