"""`dino-vit label`: write a page to label images by."""

import hashlib
import json
import math
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dino_vit.commands import Written
from dino_vit.config.commands import LabelConfig
from dino_vit.config.objects import is_object
from dino_vit.config.outputs import check_outputs
from dino_vit.core.distributed import is_main_process
from dino_vit.core.process import in_threads
from dino_vit.core.storage import write_bytes
from dino_vit.core.text import plural, printable, progress, public
from dino_vit.data.image_set import ImageSet, random_indices
from dino_vit.data.images.decode import decode_item, read_item
from dino_vit.data.label_files import GUESSED, UNSURE, Entry, find_entry, match_names, read_table
from dino_vit.data.labels import NO_LABEL, NO_LABELS
from dino_vit.data.open import open_source
from dino_vit.eval.neighbours import nearest, unit
from dino_vit.eval.pooled import spec_to_choose_from
from dino_vit.eval.typical import densities, k_means, order_to_label, spread_rows
from dino_vit.features.cache import cached_features
from dino_vit.features.frozen import FrozenBackbone, frozen_backbone
from dino_vit.features.readings import select_parts
from dino_vit.reports.page import fill_in
from dino_vit.views.pictures import as_picture, data_uri, resize_sides

MOST = 20_000  # images that are clustered, of a larger source drawn by the seed
SAMPLE = 100  # drawn at random for the check, at most
CLUSTERS, NEIGHBOURS = 40, 40  # rows of the overview, at most, and images that are close to one
# The longer side of a photo, at most, and the pixels of all: 2,000 photos make a page of less than 12 MB.
PHOTO_SIDE, PHOTO_PIXELS = 640, 2000 * 24_000

Rows = dict[str, Entry]  # of a table, by name


def run(config: LabelConfig) -> Written:
    """Write the page and return its file; rank 0 writes it."""
    output = Path(config.output)
    check_outputs(config, output)
    source = open_once(config.source)
    given, guesses = read_tables(config, source)
    frozen = frozen_backbone(config)  # after what is cheaper to find fault with
    labelled = [index for index in range(len(source)) if given and find_entry(given, source, index)]
    drawn = random_indices(source, config.seed)
    spec = spec_to_choose_from(frozen.model)  # one forward pass is for both commands
    some = np.arange(len(source))
    if len(source) > MOST:
        some = np.array([*dict.fromkeys([*labelled[: MOST // 2], *drawn])][:MOST])
    images = source.subset(some) if len(source) > MOST else source
    values, kept = cached_features(frozen, images, spec=spec, title=f"features of {public(config.source)}")
    indices = some[kept]
    if not is_main_process():
        return Written(path=output, text="")
    places = {index: place for place, index in enumerate(indices.tolist())}
    rows = [(find_entry(given, source, index), find_entry(guesses, source, index)) for index in places]
    shuffled = [places[index] for index in drawn if index in places]
    usual = "cls+mean" if frozen.model.has_patches else "cls"
    features = unit(select_parts(torch.from_numpy(values), spec, frozen.model, usual))
    data = choose(features, rows, shuffled, config)
    shown = indices[data.pop("rows")].tolist()
    data |= describe_page(source, shown, given, config)
    data["photos"], data["ids"] = zip(*draw_photos(frozen, source, shown), strict=True)
    data["digest"] = digest_of(json.dumps(data).encode())
    data["command"] = next_command(config)
    folder = public(config.source).rstrip("/").rpartition("/")[2]
    html = fill_in("label.html", title=folder, data=data).encode()
    write_bytes(output, html)
    count = f"{len(shown):,} of {plural(len(source), 'image')}"
    return Written(path=output, text=f"{output}: {count}, {len(html) / 1e6:.1f} MB; open it in any browser")


def open_once(path: str) -> ImageSet:
    """Return the images of a source, each once, so that each row of the table is of one image."""
    source = open_source(path, NO_LABELS)
    once = {name: index for index, name in enumerate(source.distinct_names(range(len(source))))}
    return source if len(once) == len(source) else source.subset(sorted(once.values()))


def read_tables(config: LabelConfig, source: ImageSet) -> tuple[Rows, Rows]:
    """Return what has been given and what has been guessed; a table of predict holds both."""
    given = read_rows(config.labels, source) if config.labels not in (None, NO_LABELS) else {}
    given = {name: row for name, row in given.items() if row.origin != GUESSED}
    table = read_rows(config.guesses, source) if config.guesses else {}
    guesses = {name: row for name, row in table.items() if row.origin in ("", GUESSED)}
    others = {name: row for name, row in table.items() if name not in guesses}
    has_guess = any(row.guess for row in others.values()) or any(
        row != given.get(name) for name, row in guesses.items()
    )
    if config.guesses and not has_guess:
        text = "has no guesses to check; give the table that predict wrote"
        raise ValueError(f"{public(config.guesses)} {text}")
    return {**given, **others, **given}, guesses  # the labels in the order in which they were first used


def read_rows(path: str, source: ImageSet) -> Rows:
    """Return the rows of a table that have a label, or for which somebody was not sure."""
    table = read_table(path, False)
    match_names(source, table, public(path))  # raises or warns where names are not those of the images
    if any(isinstance(row.label, list) for row in table.values()):
        raise ValueError(f"{public(path)} has several labels of an image; label is for one of each")
    rows = {name: row._replace(label=str(row.label)) for name, row in table.items() if row.label is not None}
    labelled = {name: row for name, row in rows.items() if row.label.lower() not in ("", *NO_LABEL)}
    unsure = {name: row._replace(label="") for name, row in table.items() if row.origin == UNSURE}
    return labelled | unsure


def as_number(text: str) -> float:
    """Return a number as spreadsheets write it; 0 for none."""
    try:
        number = float(text.replace(",", "."))
    except ValueError:
        return 0.0
    return number if math.isfinite(number) else 0.0


def choose(
    features: Tensor,
    rows: Sequence[tuple[Entry | None, Entry | None]],
    shuffled: Sequence[int],
    config: LabelConfig,
) -> dict[str, Any]:
    """Choose the images to show by their features (n, d), and what the page needs to know of them.

    The random ones for the check are those that come first of the shuffled ones without a label, whatever
    else they are.
    """
    density = densities(features)
    labelled = torch.tensor([given is not None for given, _ in rows])
    typical = order_to_label(features, density, labelled, config.seed)
    unlabelled = [row for row in shuffled if not labelled[row]]
    sample = unlabelled[: min(SAMPLE, len(unlabelled) // 5, config.images // 5)]
    guesses = [
        (guess.label, as_number(guess.confidence)) if guess and not given else None for given, guess in rows
    ]
    unsure = [row for _, row in sorted((guess[1], row) for row, guess in enumerate(guesses) if guess)]
    quarter = config.images // 4
    some = [*sample, *labelled.nonzero()[:quarter, 0].tolist(), *unsure[:quarter], *typical, *shuffled]
    shown = list(dict.fromkeys(some))[: config.images]
    numbers = {row: number for number, row in enumerate(shown)}
    near = nearest(features[shown], features[shown], k=min(NEIGHBOURS, len(shown) - 1), self_offset=0)[1]
    return {
        "rows": shown,
        "given": [row and (row.label, row.origin) for row in (rows[number][0] for number in shown)],
        "guesses": [guesses[row] for row in shown],
        "queue": _numbered([*typical, *unsure, *shown], numbers),
        "sample": _numbered(sample, numbers),
        "clusters": _clusters(features, density, numbers, config.seed),
        "neighbours": near.tolist(),
        "looked_at": len(features),
    }


def _numbered(rows: Iterable[int], numbers: dict[int, int]) -> list[int]:
    """Return the numbers on the page of rows that are shown, each once."""
    return [numbers[row] for row in dict.fromkeys(rows) if row in numbers]


def _clusters(features: Tensor, density: Tensor, numbers: dict[int, int], seed: int) -> list[dict[str, Any]]:
    """Return a few clusters, the largest first, with the images of each on the page, typical ones first."""
    count = max(1, min(CLUSTERS, len(features) // 8))
    clusters = k_means(features, features[spread_rows(features, count, seed)])
    sizes, order = torch.bincount(clusters, minlength=count), density.argsort(descending=True)
    return [
        {
            "size": int(sizes[cluster]),
            "images": _numbered(order[clusters[order] == cluster].tolist(), numbers),
        }
        for cluster in sizes.argsort(descending=True, stable=True).tolist()
        if sizes[cluster]
    ]


def describe_page(source: ImageSet, shown: Sequence[int], given: Rows, config: LabelConfig) -> dict[str, Any]:
    """Return the names of the images, the rows of others, and what is to be done with the table."""
    names = [source.name(index) for index in shown]
    on_page = set(names) | {printable(source.full_name(index)) for index in shown}
    others = [(public(row.name), row.label, row.origin) for name, row in given.items() if name not in on_page]
    stem = Path(config.labels).stem if config.labels else ""
    return {
        "names": names,
        "total": len(source),
        "labels": list(dict.fromkeys(row.label for row in given.values())),
        "others": others,
        "after": stem if re.fullmatch(r"[\w.-]+", stem) else "",  # the table that the new one follows
    }


def next_command(config: LabelConfig) -> str:
    """Return the command that takes the labels, but for their file."""
    inputs, output = [config.source, config.weights], config.guesses or "rest.csv"
    options = [f"output={output}", *["overwrite=true"] * Path(output).exists()]
    command = shlex.join(["dino-vit", "predict", *map(public, [*inputs, *options])])
    return "" if any(map(is_object, inputs)) else command


def digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def draw_photos(frozen: FrozenBackbone, source: ImageSet, indices: Sequence[int]) -> list[tuple[str, str]]:
    """Return photos as `data:` addresses, of about as many pixels each, with digests of their images."""
    pixels, area = frozen.transform.pixels, PHOTO_PIXELS // len(indices)

    def reduction(height: int, width: int) -> int:
        return next(factor for factor in (8, 4, 2, 1) if factor == 1 or height * width >= area * factor**2)

    def draw(index: int) -> tuple[str, str]:
        item = read_item(source, index, pixels.max_pixels)
        picture = as_picture(decode_item(item, source.name(index), pixels, reduction))
        shorter, longer = sorted(picture.shape[1:])
        side = min(PHOTO_SIDE, math.isqrt(area * longer // shorter))
        content = item if isinstance(item, bytes) else item.numpy().tobytes()
        identity = digest_of(source.name(index).encode() + content)
        return data_uri(resize_sides(picture, None, side), quality=60), identity

    with progress("Drawing images", len(indices)) as advance:
        return in_threads(draw, indices, lambda _: advance(1), frozen.threads or 1)
