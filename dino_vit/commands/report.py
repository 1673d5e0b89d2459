"""`dino-vit report`: write a page about a run."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from dino_vit.commands import Written
from dino_vit.config.commands import BackboneConfig, ReportConfig
from dino_vit.config.objects import check_trusted
from dino_vit.core import log
from dino_vit.core.checkpoint import Checkpoints
from dino_vit.core.outputs import claim, write_output
from dino_vit.core.runtime import start_processes
from dino_vit.data.image_set import ImageSet
from dino_vit.data.images.decode import UnreadableImage
from dino_vit.data.labels import join_labels
from dino_vit.data.sources.files import SourceLost
from dino_vit.data.sources.open import open_source
from dino_vit.eval.frozen import frozen_backbone
from dino_vit.eval.online import random_indices
from dino_vit.models.vit import VisionTransformer
from dino_vit.reports.page import render
from dino_vit.reports.pictures import Pictures, attention_rows, build_map, view_rows
from dino_vit.reports.record import RunRecord, read_run


def run(config: ReportConfig) -> Written:
    """Write the page and return its file; rank 0 writes it."""
    record = read_run(Path(config.run))
    output = Path(config.output or record.folder / "report.html")
    claim(output)
    if not start_processes().is_main_process:
        return Written(path=output, text="")
    pictures = draw(record, config)
    if output.exists() and not (pictures.views or pictures.map):
        text = f"{output} stays as it is: a new page would have no pictures, as the images cannot be read"
        raise ValueError(f"{text}; say where they are with source=..., or give another output")
    html = render(record, pictures).encode()
    write_output(output, html)
    return Written(path=output, text=f"{output}: {len(html) / 1e6:.1f} MB; open it in any browser")


def draw(record: RunRecord, config: ReportConfig) -> Pictures:
    """Draw what the images and the checkpoints allow; a note explains what is missing."""
    pictures, labels = Pictures(), record.config.data.labels
    settings = record.folder / "config.yaml"
    with _noted(pictures, "Pictures are missing; if the images have moved, say where with source=..."):
        data = record.config.data
        mix = None if isinstance(config.source, str) else data.mix
        check_trusted(() if config.source else data.sources, settings, trust=config.trust)
        source = open_source(config.source or data.source or "", None, mix)
        with _noted(pictures, "The map has no labels"):
            source = join_labels(source, labels) if labels else source
        epoch = math.ceil(record.history[-1].epoch) - 1 if record.history else 0
        with _noted(pictures, "The views are missing"):
            check_trusted([record.config.augment.module], settings, trust=config.trust)
            pictures.views = view_rows(record.config, source, max(epoch, 0))
        _draw_network(pictures, record, source, config.images)
    return pictures


def _draw_network(pictures: Pictures, record: RunRecord, source: ImageSet, count: int) -> None:
    checkpoint = Checkpoints(record.folder).newest()
    if checkpoint is None:
        pictures.notes.append("The run has not written a checkpoint yet.")
        return
    images, weights = record.config.data.images, str(checkpoint.path)
    teacher = frozen_backbone(BackboneConfig(source=images, weights=weights, precision="no"))
    indices = random_indices(source, record.config.seed)[:count]
    readable, pictures.map = build_map(teacher, source, indices)
    if isinstance(teacher.model, VisionTransformer):
        pictures.attention = attention_rows(teacher, source, readable)
    pictures.notes.append(f"Map and attention: teacher at step {checkpoint.step:,}.")
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
