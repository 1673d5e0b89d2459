"""`dino-vit report`: write a page about a run."""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from dino_vit.commands import Written
from dino_vit.config.commands import MIN_IMAGES, BackboneConfig, ReportConfig
from dino_vit.config.outputs import check_outputs
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.core import log
from dino_vit.core.checkpoint import Checkpoints
from dino_vit.core.runtime import start_processes
from dino_vit.core.storage import write_bytes
from dino_vit.core.text import progress
from dino_vit.data.image_set import ImageSet, random_indices
from dino_vit.data.images.decode import UnreadableImage, read_image
from dino_vit.data.label_files import join_labels
from dino_vit.data.labels import NO_LABELS
from dino_vit.data.open import open_source
from dino_vit.data.remote import SourceLost
from dino_vit.eval.attention import attention_of
from dino_vit.eval.neighbours import nearest
from dino_vit.features.frozen import FrozenBackbone, frozen_backbone
from dino_vit.features.readings import fit_levelling, levelled_spec
from dino_vit.models.vit import VisionTransformer
from dino_vit.reports.page import MAX_NAME, Pictures, Row, render
from dino_vit.reports.record import RecordedRun, read_run
from dino_vit.views.build import build_pixels, make_views
from dino_vit.views.pictures import (
    as_picture,
    data_uri,
    draw_patches,
    draw_tile,
    heat,
    overlay,
    principal_components,
    resize_sides,
    shorten,
)
from dino_vit.views.sampler import Sampler

NEIGHBOURS = 8
ROWS, HEADS = 6, 12  # at most, of views and attention
THUMBNAIL_SIDE, PHOTO_SIDE = 64, 320  # longer side in pixels: on the map, and of a selected image
# Of all images: the page stays below 8 MB with 500 of them, which are as large as their sides allow.
THUMBNAIL_PIXELS, PHOTO_PIXELS = 5_000_000, 500 * PHOTO_SIDE**2
PERPLEXITY = 30  # of t-SNE: about how many neighbours of an image it tries to keep
TINY = 1e-30


def view_rows(config: PretrainConfig, source: ImageSet, epoch: int) -> list[Row]:
    """Recreate the views of a few images in an epoch, as the networks saw them."""
    sampler = Sampler(length=len(source), global_batch=1, seed=config.seed)
    indices = sampler.order(epoch)[:ROWS].tolist()
    kinds = [f"global {n + 1}" for n in range(config.views.global_count)]
    kinds += [f"local {n + 1}" for n in range(config.views.local_count)]
    rows = []
    for index, views in zip(indices, make_views(config, source, indices, epoch), strict=True):
        name, tiles = shorten(source.name(index), MAX_NAME), []
        try:
            tiles.append(draw_tile(read_image(source, index, build_pixels(config)), "image"))
        except UnreadableImage as error:
            name += f": {error.reason}; replaced by another image"
        for kind, view in zip(kinds, views, strict=True):
            tiles.append(draw_tile(view, f"{kind}, {view.shape[-1]} × {view.shape[-2]} px"))
        rows.append(Row(name, tiles))
    return rows


def attention_rows(teacher: FrozenBackbone, source: ImageSet, indices: list[int]) -> list[Row]:
    """Draw the attention maps of a few whole images, by head of the last block."""
    rows = []
    for index in indices[:ROWS]:
        image, name = read_image(source, index, teacher.transform.pixels), source.name(index)
        picture, heads = attention_of(teacher, image)
        mean = overlay(as_picture(picture), heads.mean(dim=0), teacher.model.patch_size)
        tiles = [draw_tile(image, "image"), draw_tile(mean, "mean of heads")]
        tiles += [draw_patches(heat(head), f"head {n}") for n, head in enumerate(heads[:HEADS])]
        rows.append(Row(shorten(name, MAX_NAME), tiles))
    return rows


def images_of_map(source: ImageSet, seed: int, count: int) -> list[int]:
    """Draw the images to show: those with a label, then others, which are drawn below them."""
    order = np.array(random_indices(source, seed))
    labelled_first = np.argsort(source.codes(order) < 0, kind="stable")[:count]
    return order[labelled_first[::-1]].tolist()


def build_map(
    teacher: FrozenBackbone, source: ImageSet, indices: list[int]
) -> tuple[list[int], dict[str, Any]]:
    """Return the images that can be read, and what a teacher makes of them as `page.js` reads it."""
    spec = levelled_spec(teacher.model)
    found = teacher.extract(source, indices, spec)
    kept = found.indices.tolist()
    if len(kept) < MIN_IMAGES:
        raise ValueError(f"{len(kept)} of {len(indices)} images could be read; a map needs {MIN_IMAGES}")
    level = fit_levelling(found.values, spec.widths(teacher.model))
    features = F.normalize(level(found.values).cpu())
    cosines, neighbours = nearest(features, features, k=min(NEIGHBOURS, len(kept) - 1), self_offset=0)
    positions = tsne(features) if find_spec("sklearn") else principal_components(features, 2)
    labels = source.codes(kept).tolist()
    counts = Counter(label for label in labels if label >= 0).most_common()  # the largest first
    numbers = {label: number for number, (label, _) in enumerate(counts)}
    return kept, {
        "names": [shorten(source.name(index), MAX_NAME) for index in kept],
        "classes": [(", ".join(source.labels.names_of(label)) or "none", count) for label, count in counts],
        "labels": [numbers.get(label, -1) for label in labels],
        "total": len(source),
        "positions": _on_unit_square(positions),
        "neighbours": neighbours.tolist(),
        "cosines": cosines.double().round(decimals=4).tolist(),
        **_draw_images(teacher, source, kept),
    }


def _draw_images(teacher: FrozenBackbone, source: ImageSet, indices: list[int]) -> dict[str, Any]:
    """Return the pictures of images: as thumbnails, as photos, and the attention to them."""
    side = min(THUMBNAIL_SIDE, math.isqrt(THUMBNAIL_PIXELS // len(indices)))
    photo_side = min(PHOTO_SIDE, math.isqrt(PHOTO_PIXELS // len(indices)))
    square = replace(teacher.transform, size=(side, side), shorter_side=side)
    thumbnails, photos, attention = list[Tensor](), list[str](), list[str]()
    with progress("Drawing images and attention", len(indices)) as advance:
        for index in indices:
            image = read_image(source, index, teacher.transform.pixels)
            thumbnails.append(square.resize(as_picture(image)))
            photos.append(data_uri(resize_sides(as_picture(image), None, photo_side), quality=60))
            if isinstance(teacher.model, VisionTransformer):
                mean = attention_of(teacher, image)[1].mean(dim=0)
                attention.append(data_uri(heat(mean), quality=None))  # a pixel for each patch
            advance(1)
    return {"thumbnails": build_atlas(torch.stack(thumbnails)), "photos": photos, "attention": attention}


def tsne(features: Tensor) -> Tensor:
    """Return the t-SNE of features (n, d) of unit length."""
    from sklearn.manifold import TSNE

    # Like init="pca", which divides by zero where a collapse has made all features equal.
    start = principal_components(features, 2).float()
    start *= 1e-4 / start.std().clamp_min(TINY)
    perplexity = min(PERPLEXITY, (len(features) - 1) / 3)
    method = TSNE(perplexity=perplexity, init=start.numpy(), random_state=0)
    return torch.from_numpy(method.fit_transform(features.numpy()))


def _on_unit_square(positions: Tensor) -> list[list[float]]:
    """Turn positions (n, 2), whose axes mean nothing, to lie along their principal axes, each from 0 to 1."""
    positions = principal_components(positions, 2)
    low, high = positions.amin(0), positions.amax(0)
    scaled = (positions - (low + high) / 2) / (high - low).clamp_min(TINY) + 0.5
    return [[round(x, 4), round(y, 4)] for x, y in scaled.tolist()]


def build_atlas(images: Tensor) -> dict[str, Any]:
    """Join pictures (n, 3, y, x), row by row, into one."""
    columns = math.ceil(math.sqrt(len(images)))
    cells = torch.cat([images, images.new_zeros(-len(images) % columns, *images.shape[1:])])
    picture = rearrange(cells, "(row column) c y x -> c (row y) (column x)", column=columns)
    return {"uri": data_uri(picture, quality=75), "columns": columns, "size": list(images.shape[-2:])}


def run(config: ReportConfig) -> Written:
    """Write the page and return its file; rank 0 writes it."""
    record = read_run(Path(config.run))
    output = Path(config.output or record.folder / "report.html")
    if config.output:  # the page in the folder of the run is its own
        check_outputs(config, output)
    if not start_processes().is_main_process:
        return Written(path=output, text="")
    pictures = draw(record, config)
    if output.exists() and not (pictures.views or pictures.map):
        text = f"{output} stays as it is: a new page would have no pictures, as the images cannot be read"
        raise ValueError(f"{text}; say where they are with source=..., or give another output")
    html = render(record, pictures).encode()
    write_bytes(output, html)
    return Written(path=output, text=f"{output}: {len(html) / 1e6:.1f} MB; open it in any browser")


def draw(record: RecordedRun, config: ReportConfig) -> Pictures:
    """Draw what the images and the checkpoints allow; a note explains what is missing."""
    pictures, labels = Pictures(), config.labels or record.config.data.labels
    with _noted(pictures, "Pictures are missing; if the images have moved, say where with source=..."):
        data = record.config.data
        several = data.several and not labels
        source = open_source(config.source or data.source or "", labels and NO_LABELS, several=several)
        if labels not in (None, NO_LABELS):
            with _noted(pictures, "The map has no labels"):
                source = join_labels(source, labels, data.several)
        epoch = math.ceil(record.history[-1].epoch) - 1 if record.history else 0
        with _noted(pictures, "The views are missing"):
            pictures.views = view_rows(record.config, source, max(epoch, 0))
        _draw_network(pictures, record, source, config.images)
    return pictures


def _draw_network(pictures: Pictures, record: RecordedRun, source: ImageSet, count: int) -> None:
    checkpoint = Checkpoints(record.folder).newest()
    if checkpoint is None:
        pictures.notes.append("The run has not written a checkpoint yet.")
        return
    images, weights = record.config.data.images, str(checkpoint.path)
    teacher = frozen_backbone(BackboneConfig(source=images, weights=weights, precision="no"))
    indices = images_of_map(source, record.config.seed, count)
    readable, pictures.map = build_map(teacher, source, indices)
    if isinstance(teacher.model, VisionTransformer):
        pictures.attention = attention_rows(teacher, source, readable)
    pictures.notes.append(f"The map and the attention are of step {checkpoint.step:,}.")
    if unreadable := len(indices) - len(readable):
        pictures.notes.append(f"Unreadable images, left out of the map: {unreadable}.")
    if checkpoint.metadata.get("source") != source.fingerprint:
        pictures.notes.append("The images differ from those that the run started with.")
    if not find_spec("sklearn"):
        pictures.notes.append("The map is a PCA; for a t-SNE run `pip install scikit-learn`.")


@contextmanager
def _noted(pictures: Pictures, note: str) -> Iterator[None]:
    """Note on the page what missing or damaged files raise, instead of raising it."""
    try:
        yield
    except (ValueError, OSError, UnreadableImage, SourceLost) as error:
        log.warning("%s: %s", note, error)
        pictures.notes.append(f"{note}: {error}")
