"""`dino-vit report`: write a page about a run."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from dino_vit.commands import Result
from dino_vit.config.settings import Settings, setting
from dino_vit.core import log
from dino_vit.core.checkpoint import Checkpoints
from dino_vit.core.runtime import start_processes
from dino_vit.core.storage import write_bytes
from dino_vit.data.images.decode import UnreadableImage
from dino_vit.data.labels import join_labels
from dino_vit.data.sources.open import Source, open_source
from dino_vit.eval.frozen import BackboneConfig, frozen_backbone
from dino_vit.eval.online import random_indices
from dino_vit.models.vit import VisionTransformer
from dino_vit.reports.explorer import MAX_IMAGES, MIN_IMAGES, build_map, to_json, write_embedding
from dino_vit.reports.page import SECTIONS, Pictures, render
from dino_vit.reports.record import RunRecord, read_run
from dino_vit.reports.sheets import attention_rows, neighbour_rows, view_rows


class ReportConfig(Settings):
    """Write one HTML file about a run."""

    examples: ClassVar = ("report runs/pretrain",)
    positional: ClassVar = ("run",)

    run: str = Field(description="folder of the run")
    output: str | None = setting(None, "file to write; null: report.html in the folder of the run")
    source: str | None = setting(None, "where the images are now; null: where the run read them")
    images: int = Field(3000, ge=MIN_IMAGES, le=MAX_IMAGES, description="number of images on the map")


@dataclass(frozen=True, kw_only=True)
class ReportFile(Result):
    """The page that was written."""

    path: Path


def run(config: ReportConfig) -> ReportFile | None:
    """Write the page and return its file; only rank 0 does."""
    if not start_processes().is_main_process:
        return None
    record = read_run(Path(config.run))
    output = Path(config.output or record.folder / "report.html")
    html = render(record, draw(record, config=config)).encode()
    write_bytes(output, html)
    return ReportFile(path=output, text=f"{output}: {len(html) / 1e6:.1f} MB; open it in any browser")


def draw(record: RunRecord, *, config: ReportConfig) -> Pictures:
    """Draw what the images and the checkpoints allow; the page explains what is missing."""
    pictures, labels = Pictures(), record.config.data.labels
    with _explained(pictures, *SECTIONS, advice=" If the images have moved, say where with source=..."):
        source = open_source(config.source or record.config.data.source)
        with _explained(pictures, "labels"):
            source = join_labels(source, labels) if labels else source
        with _explained(pictures, "views"):
            epoch = int(record.history[-1].epoch) if record.history else 0
            pictures.views = view_rows(record.config, source, epoch)
        with _explained(pictures, *SECTIONS[1:]):
            _draw_network(pictures, record, source, config)
    return pictures


def _draw_network(pictures: Pictures, record: RunRecord, source: Source, config: ReportConfig) -> None:
    checkpoint = Checkpoints(record.folder).newest()
    if checkpoint is None:
        raise ValueError("the run has not written a checkpoint yet")
    teacher = frozen_backbone(BackboneConfig(source=record.config.data.source, weights=str(checkpoint.path)))
    indices = random_indices(source, record.config.seed)[: config.images]
    images = build_map(teacher, source, indices)
    if isinstance(teacher.model, VisionTransformer):
        pictures.attention = attention_rows(teacher, source, images)
    else:
        pictures.missing["attention"] = f"{record.config.model.title} has no attention of a CLS token."
    pictures.neighbours = neighbour_rows(teacher, source, images)
    pictures.map = to_json(images)
    unreadable = len(indices) - len(images.indices)
    notes = {
        f"Map, attention and neighbours: teacher at step {checkpoint.step:,}.": True,
        f"Unreadable images, left out of the map: {unreadable}.": unreadable > 0,
        "The images differ from those that the run started with.": (
            checkpoint.metadata.get("source") != source.fingerprint
        ),
        "The map is a PCA; for a t-SNE run `pip install scikit-learn`.": find_spec("sklearn") is None,
    }
    pictures.notes = [note for note, holds in notes.items() if holds]
    if "tensorboard" in record.config.run.trackers:
        write_embedding(images, record.folder / "logs" / "embedding", checkpoint.step)


@contextmanager
def _explained(pictures: Pictures, *sections: str, advice: str = "") -> Iterator[None]:
    """Note why sections of the page are empty, instead of raising what missing or damaged files raise."""
    try:
        yield
    except (ValueError, OSError, UnreadableImage) as error:
        log.warning("the report lacks %s: %s", ", ".join(sections), error)
        pictures.missing |= dict.fromkeys(sections, f"Not available: {error}{advice}")
