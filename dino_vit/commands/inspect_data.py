"""Inspect a source of images before training on it: what it contains, what is broken, and its views."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor

from dino_vit.commands import Result
from dino_vit.config.auto import auto_choices
from dino_vit.config.loading import load, replace
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.config.settings import Count, FewOrZero, Settings, setting
from dino_vit.core import log
from dino_vit.core.progress import plural
from dino_vit.core.text import printable
from dino_vit.data.images.decode import UnreadableImage, read_image
from dino_vit.data.labels import LabelledSource
from dino_vit.data.sources.archives import ArchiveSource
from dino_vit.data.sources.open import open_source
from dino_vit.data.sources.source import Source, spread
from dino_vit.data.splits import splits_of
from dino_vit.data.statistics import ImageInfo, ImageSummary, inspect_images
from dino_vit.eval.maps.pictures import Panel, as_picture, write_sheet
from dino_vit.views.build import build_pixels, build_views, make_views
from dino_vit.views.costs import advice_on_size

LISTED = 10  # names, classes or groups in a text


class InspectConfig(Settings):
    """Inspect the images of a source before training on them."""

    source: str = Field(description="folder, image, pattern, list, archives, tables, hf:OWNER/NAME, arrays")
    labels: str | None = setting(None, "file of labels by name, .csv or .json; null: the source's own")
    count: Count | None = setting(2000, "images to inspect, evenly spread over the source; null: all")
    max_pixels: Count = setting(200_000_000, "a larger image is not decoded")
    sheet: str | None = setting(None, "PNG to write of the views that training would use; null: none")
    rows: FewOrZero = setting(8, "images on the sheet")
    pretrain: str | None = setting(None, "config file of the training to show views of; null: recipe=auto")
    as_json: bool = setting(False, "print JSON, with every unreadable and every identical image")

    positional: ClassVar = ("source",)
    switches: ClassVar = {"json": "as_json"}


@dataclass(frozen=True, kw_only=True)
class SourceFacts(Result):
    """What is known of a source, by the names that --json prints."""

    facts: dict[str, Any]


def run(config: InspectConfig) -> SourceFacts:
    """Inspect the images, and draw the views."""
    source = open_source(config.source, config.labels)
    indices = range(len(source)) if config.count is None else spread(len(source), config.count)
    summary = inspect_images(source, indices, max_pixels=config.max_pixels, allow_none=True)
    facts = describe(printable(config.source), source, summary)
    if summary.images:
        training = fitted_config(config.pretrain, source, summary)
        sizes = [(image.height, image.width) for image in summary.images]
        scaled = training.data.scaled_decoding
        views, name = build_views(training), printable(config.source)
        facts["advice"] = advice_on_size(sizes, views, name, scaled_decoding=scaled)
    if not summary.images:
        reasons = "\n  ".join(str(one) for one in summary.unreadable[:LISTED])
        raise ValueError(f"none of the {len(indices):,} inspected images can be read:\n  {reasons}")
    if config.sheet and config.rows:
        replaced = " (replaced an existing file)" if Path(config.sheet).exists() else ""
        draw_views(source, summary, config)
        log.info("%s: the views that training would use%s", config.sheet, replaced)
    whole = json.dumps(facts, indent=2, ensure_ascii=False)
    return SourceFacts(facts=facts, text=whole if config.as_json else "\n".join(as_text(facts)))


def describe(spec: str, source: Source, summary: ImageSummary) -> dict[str, Any]:
    """Return what is known of a source as plain values."""
    labels = Counter(source.label(index) for index in range(len(source)))
    unlabelled = labels.pop(None, 0)
    images = summary.images
    sizes = [image.file_bytes for image in images if image.file_bytes]
    mean, std = summary.mean_and_std() or (None, None)
    return {
        "source": spec,
        "images": len(source),
        "labels": {name: labels[label] for label, name in enumerate(source.classes) if labels[label]},
        "without_label": unlabelled,
        "splits": {name: len(places) for name, places in splits_of(source).items()},
        "reduced_to": _reduced_to(source),
        "advice": None,  # of a training with these images
        "looked_at": len(images) + len(summary.unreadable),
        "formats": summary.count(lambda image: image.format),
        "pixels": summary.count(ImageInfo.describe),
        "height": _range(image.height for image in images),
        "width": _range(image.width for image in images),
        "shorter_side": _range(min(image.height, image.width) for image in images),
        "file_bytes": _range(sizes),
        "bytes_in_all": round(sum(sizes) / len(sizes) * len(source)) if sizes else 0,
        "values": [min(i.low for i in images), max(i.high for i in images)] if images else None,
        "mean": mean,
        "std": std,
        "unreadable": [{"name": image.name, "reason": image.reason} for image in summary.unreadable],
        "identical": [[source.name(index) for index in group] for group in summary.identical()],
    }


def _reduced_to(source: Source) -> list[int]:
    """Return the shorter sides that shards were packed with."""
    inner = source.source if isinstance(source, LabelledSource) else source
    return inner.reduced_to() if isinstance(inner, ArchiveSource) else []


def _range(values: Iterable[float]) -> dict[str, float] | None:
    known = list(values)
    return {"least": min(known), "median": median(known), "most": max(known)} if known else None


def as_text(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the facts as lines for a person."""
    yield f"{facts['source']}: {facts['images']:,} images, {_labels(facts)}"
    if facts["splits"]:
        yield f"splits: {_counts(facts['splits'])}; the labels are the folders in them"
    if facts["reduced_to"]:
        sides = " or ".join(map(str, facts["reduced_to"]))
        yield f"packed with size={sides}: larger images were reduced to this shorter side in pixels"
    if facts["looked_at"] < facts["images"]:
        yield f"{facts['looked_at']:,} of them were inspected (count=null: all)"
    if facts["height"]:
        yield from (f"  {title:<11} {text}" for title, text in _rows(facts))
    if facts["advice"]:
        yield facts["advice"]
    unreadable = [f"{image['name']}: {image['reason']}" for image in facts["unreadable"]]
    identical = [" = ".join(group[:LISTED]) for group in facts["identical"]]
    for title, unit, lines in (("unreadable", "image", unreadable), ("identical", "group", identical)):
        if lines:
            yield f"  {title:<11} {plural(len(lines), unit)}"
            yield from (f"    {line}" for line in lines[:LISTED])
        if len(lines) > LISTED:
            yield f"    and {len(lines) - LISTED:,} more; --json lists all"


def _rows(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    height, width = facts["height"], facts["width"]
    yield "format", _counts(facts["formats"])
    yield "pixels", _counts(facts["pixels"])
    yield (
        "size",
        f"{height['median']:g} × {width['median']:g} (median height × width); heights {height['least']:g} to "
        f"{height['most']:g}, widths {width['least']:g} to {width['most']:g}, shorter sides from "
        f"{facts['shorter_side']['least']:g}",
    )
    if facts["file_bytes"]:
        typical, total = facts["file_bytes"]["median"] / 1024, facts["bytes_in_all"] / 2**20
        yield "file", f"{typical:,.1f} KiB (median), about {total:,.1f} MiB in total"
    yield "values", f"from {facts['values'][0]:g} to {facts['values'][1]:g}"
    if facts["mean"]:
        mean, std = ("; ".join(f"{value:.3f}" for value in facts[name]) for name in ("mean", "std"))
        yield "mean, std", f"{mean} and {std}, per channel, of values from 0 to 1"
    else:
        yield "mean, std", "unknown: the values are not from 0 to 1; set data.range"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())


def _labels(facts: Mapping[str, Any]) -> str:
    labels: dict[str, int] = facts["labels"]
    if not labels:
        return "no labels (none are needed)"
    more = f" and {len(labels) - LISTED:,} more" if len(labels) > LISTED else ""
    without = f"; {facts['without_label']:,} without" if facts["without_label"] else ""
    return f"{len(labels):,} labels: {_counts(dict(list(labels.items())[:LISTED]))}{more}{without}"


def draw_views(source: Source, summary: ImageSummary, config: InspectConfig) -> None:
    """Write the sheet of the views of some images, an image per row."""
    training = fitted_config(config.pretrain, source, summary)
    pixels = build_pixels(training)
    images = [image.index for image in summary.images if image.fits(pixels.channels)]
    images = images or [image.index for image in summary.images]
    originals: dict[int, Tensor] = {}
    for row in spread(len(images), config.rows):
        try:
            originals[images[row]] = read_image(source, images[row], pixels)
        except UnreadableImage as error:
            log.warning("no views of %s", error)
    if not originals:
        raise ValueError(f"{config.sheet} cannot be drawn: training could use none of the images")
    views_of = make_views(training, source, list(originals), epoch=0)
    rows = [
        [Panel(as_picture(picture)) for picture in (original, *views)]
        for original, views in zip(originals.values(), views_of, strict=True)
    ]
    titles = ["image", *(f"global {n + 1}" for n in range(training.views.global_count))]
    titles += [f"local {n + 1}" for n in range(training.views.local_count)]
    names = [source.name(index) for index in originals]
    write_sheet(rows, Path(config.sheet or ""), names=names, titles=titles)


def fitted_config(file: str | None, source: Source, summary: ImageSummary) -> PretrainConfig:
    """Return the settings of a training on the source, completed from its images."""
    config = load(PretrainConfig, Path(file) if file else None, [] if file else ["recipe=auto"])
    choices = auto_choices(
        config,
        image_size=summary.image_size,
        images=len(source),
        channels=summary.channels,
        global_batch=min(config.data.batch_size, len(source)),
    )
    config = replace(config, {choice.key: choice.value for choice in choices})
    return config if config.data.bits else replace(config, {"data.bits": summary.bits})
