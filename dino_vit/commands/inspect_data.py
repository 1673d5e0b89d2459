"""Inspect a source of images before training on it: what it contains, what is broken, and its views."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from torch import Tensor

from dino_vit.commands import Facts
from dino_vit.config.commands import InspectConfig
from dino_vit.config.complete import decide
from dino_vit.config.facts import RunFacts
from dino_vit.config.loading import load
from dino_vit.config.outputs import check_outputs
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.core import log
from dino_vit.core.invocation import after_figures
from dino_vit.core.storage import write_bytes
from dino_vit.core.text import plural, printable, public
from dino_vit.data.image_set import ImageSet, evenly_spaced
from dino_vit.data.images.decode import UnreadableImage, read_image
from dino_vit.data.images.pixels import Pixels
from dino_vit.data.labels import alike_names
from dino_vit.data.open import open_source
from dino_vit.data.statistics import ImageInfo, ImageSummary, channel_statistics, inspect_images
from dino_vit.training.inputs import image_facts
from dino_vit.views.build import build_pixels, make_views
from dino_vit.views.pictures import as_picture, draw_sheet

LISTED = 10  # names, classes or groups in a text
ROWS = 8  # images on the sheet


def run(config: InspectConfig) -> Facts:
    """Inspect the images, and draw the views."""
    if config.sheet:
        check_outputs(config, Path(config.sheet))
    source = open_source(config.source, config.labels, several=config.several)
    sources = [config.source] if isinstance(config.source, str) else config.source
    name = printable(", ".join(map(public, sources)))
    indices = evenly_spaced(len(source), config.count or len(source))
    summary = inspect_images(source, indices, max_pixels=config.max_pixels)
    facts = describe_images(name, source, summary)
    if config.sheet:
        file = config.pretrain
        given = load(PretrainConfig, Path(file) if file else None, [] if file else ["recipe=auto"])
        training = decide(given, RunFacts(images=image_facts(source, summary))).config
        sheet = draw_views(Path(config.sheet), source, summary, training)
        with after_figures():
            write_bytes(Path(config.sheet), sheet)
        whose = config.pretrain or "recipe=auto; budget.minutes may choose smaller ones"
        log.info("%s: the views that training would use, %s (%s)", config.sheet, training.views.title, whose)
    text = json.dumps(facts, indent=2, ensure_ascii=False) if config.as_json else "\n".join(as_text(facts))
    return Facts(facts=facts, text=text)


def describe_images(name: str, source: ImageSet, summary: ImageSummary) -> dict[str, Any]:
    """Return what is in a source as plain values."""
    codes, labels, images = source.codes(), source.labels, summary.images
    labelled = codes[codes >= 0]
    values = labels.values(labelled)
    counts = values.sum(0) if labels.sets is not None else np.bincount(values, minlength=len(labels.names))
    sizes = [image.file_bytes for image in images if image.file_bytes]
    return {
        "source": name,
        "images": len(source),
        "labels": {name: int(count) for name, count in zip(labels.names, counts, strict=True) if count},
        "without_label": len(source) - len(labelled),
        "several": None if labels.sets is None else labels.describe(labelled),
        "splits": source.split_sizes(),
        "inspected": len(images) + len(summary.unreadable),
        "formats": summary.count(lambda image: image.format),
        "pixels": summary.count(ImageInfo.describe),
        "height": _range(image.height for image in images),
        "width": _range(image.width for image in images),
        "shorter_side": _range(min(image.height, image.width) for image in images),
        "file_bytes": _range(sizes) if sizes else None,
        "total_bytes": round(sum(sizes) / len(sizes) * len(source)) if sizes else 0,
        "values": [min(image.low for image in images), max(image.high for image in images)],
        **_mean_and_std(source, summary),
        "unreadable": [{"name": image.name, "reason": image.reason} for image in summary.unreadable],
    }


def _mean_and_std(source: ImageSet, summary: ImageSummary) -> dict[str, list[float] | None]:
    """Return mean and std of the values in [0, 1]; None if their range is unknown."""
    pixels = Pixels(channels=summary.channels, bits=16)
    indices = [image.index for image in summary.images if image.fits(pixels.channels)]
    try:
        statistics = channel_statistics(source, indices, pixels)
    except ValueError:
        return {"mean": None, "std": None}
    return {"mean": list(statistics.mean), "std": list(statistics.std)}


def _range(numbers: Iterable[float]) -> dict[str, float]:
    values = list(numbers)
    return {"min": min(values), "median": median(values), "max": max(values)}


def as_text(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the facts as lines for a person."""
    labels, unlabelled = facts["labels"], facts["without_label"]
    text = f"{plural(len(labels), 'label')}: {_counts(labels)}" if labels else "no labels (none are needed)"
    text = facts["several"] or text
    text += f"; {unlabelled:,} without" if labels and unlabelled else ""
    yield f"{facts['source']}: {plural(facts['images'], 'image')}, {text}"
    yield from (f"labels {line}" for line in alike_names(labels))
    if facts["splits"]:
        yield f"splits: {_counts(facts['splits'])}"
    if facts["inspected"] < facts["images"]:
        yield f"{facts['inspected']:,} of them inspected (count=null: all)"
    yield f"  format      {_counts(facts['formats'])}"
    yield f"  pixels      {_counts(facts['pixels'])}"
    for name in ("height", "width", "shorter_side"):
        text = "{min:g} to {max:g} pixels, median {median:g}".format(**facts[name])
        yield f"  {name.partition('_')[0]:<11} {text}"
    if facts["file_bytes"]:
        typical, total = facts["file_bytes"]["median"] / 1024, facts["total_bytes"] / 2**20
        yield f"  file        {typical:,.1f} KiB (median), about {total:,.1f} MiB in total"
    yield f"  values      from {facts['values'][0]:g} to {facts['values'][1]:g}"
    if facts["mean"]:
        settings = (
            f"data.{name}='[{','.join(f'{value:.3g}' for value in facts[name])}]'" for name in ("mean", "std")
        )
        yield f"  mean, std   {' '.join(settings)}"
    else:
        yield "  mean, std   unknown: the values are not from 0 to 1; set data.range"
    if unreadable := facts["unreadable"]:
        yield f"  unreadable  {len(unreadable):,}"
        yield from (f"    {image['name']}: {image['reason']}" for image in unreadable[:LISTED])
        if len(unreadable) > LISTED:
            yield f"    and {len(unreadable) - LISTED:,} more; as_json=true lists all"


def _counts(counts: Mapping[str, int]) -> str:
    text = ", ".join(f"{name}: {count:,}" for name, count in list(counts.items())[:LISTED])
    return f"{text} and {len(counts) - LISTED:,} more" if len(counts) > LISTED else text


def draw_views(sheet: Path, source: ImageSet, summary: ImageSummary, training: PretrainConfig) -> bytes:
    """Draw the sheet of the views of some images, an image per row."""
    pixels = build_pixels(training)
    indices = [image.index for image in summary.images if image.fits(pixels.channels)]
    originals: dict[int, Tensor] = {}
    for index in [indices[row] for row in evenly_spaced(len(indices), ROWS)]:
        try:
            originals[index] = read_image(source, index, pixels)
        except UnreadableImage as error:
            log.warning("no views of %s", error)
    if not originals:
        raise ValueError(f"{sheet} cannot be drawn: training could use none of the images")
    log.info("drawing the views of %s", plural(len(originals), "image"))
    views_of = make_views(training, source, list(originals), epoch=0)
    rows = [
        [as_picture(picture) for picture in (original, *views)]
        for original, views in zip(originals.values(), views_of, strict=True)
    ]
    titles = ["image", *(f"global {n + 1}" for n in range(training.views.global_count))]
    titles += [f"local {n + 1}" for n in range(training.views.local_count)]
    names = [source.name(index) for index in originals]
    return draw_sheet(rows, names=names, titles=titles)
