"""`dino-vit report`: write the page of a run, or serve it while the run goes on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, TypeVar

import torch
from pydantic import Field

from dino_vit.config.settings import Settings, setting
from dino_vit.core.checkpoint import Checkpoint
from dino_vit.core.runtime import start_processes
from dino_vit.core.storage import write_bytes
from dino_vit.data.images.decode import UnreadableImage
from dino_vit.data.sources.open import Source, open_source
from dino_vit.report.explorer import MOST_IMAGES, chosen, explore, page_data
from dino_vit.report.network import load_teacher
from dino_vit.report.page import Pictures, render
from dino_vit.report.record import RunRecord, newest_checkpoint, read_run
from dino_vit.report.serving import Page, serve
from dino_vit.report.sheets import attention_rows, neighbour_rows, view_rows

log = logging.getLogger("dino_vit")

T = TypeVar("T")


class ReportConfig(Settings):
    """Write one HTML file that tells of a run."""

    positional: ClassVar = ("run",)
    switches: ClassVar = {"serve": "serve"}

    run: str = Field(description="folder of the run")
    output: str | None = setting(None, "file to write; null: report.html in that folder")
    source: str | None = setting(None, "where the images lie now; null: where the run found them")
    images: int = Field(3000, ge=3, le=MOST_IMAGES, description="images on the map")
    serve: bool = setting(False, "show the page in a browser instead, and keep it up to date")
    address: str = setting("127.0.0.1", "address to serve on; others than your own machine's let others look")
    port: int = Field(8765, ge=0, le=65535, description="port to serve on; 0: any that is free")

    also_known_as: ClassVar = {"run": "weights folder", "source": "images data", "output": "out html"}


def run(config: ReportConfig) -> int:
    """Write the page, or serve it until ctrl-C."""
    accelerator = start_processes(trackers=(), folder=Path(config.run))
    if not accelerator.is_main_process:
        return 0
    record = read_run(Path(config.run))
    device: torch.device = accelerator.device
    if config.serve:
        page = Page(record.folder, lambda record, found: draw(record, found, config, device))
        serve(page, config.address, config.port)
        return 0
    output = Path(config.output or record.folder / "report.html")
    page_bytes = render(record, draw(record, newest_checkpoint(record.folder), config, device)).encode()
    write_bytes(output, page_bytes)
    print(f"{output}: {len(page_bytes) / 1e6:.1f} MB, opens in any browser")
    return 0


def draw(record: RunRecord, found: Checkpoint | str, config: ReportConfig, device: torch.device) -> Pictures:
    """Draw what the images and a checkpoint (or why there is none) allow; say what is missing and why."""
    pictures = Pictures()
    spec = config.source or record.config.data.source
    source = _try(pictures, ("views", "attention", "neighbours", "explorer"), lambda: _open(spec))
    if source is None:
        return pictures
    epoch = int(record.records[-1]["epoch"]) if record.records else 0
    views = _try(pictures, ("views",), lambda: view_rows(record.config, source, epoch))
    pictures.views = views or []
    if isinstance(found, str):
        pictures.reasons |= dict.fromkeys(("attention", "neighbours", "explorer"), f"Not drawn: {found}.")
        return pictures
    if found.metadata["source"] != source.fingerprint:
        pictures.notes.append(f"The images of {spec} are not, or no longer, those that the run began with.")
    _try(
        pictures,
        ("attention", "neighbours", "explorer"),
        lambda: _draw_features(pictures, record, source, found, config.images, device),
    )
    return pictures


def _open(spec: str) -> Source:
    try:
        return open_source(spec)
    except (ValueError, OSError) as error:
        raise ValueError(f"{error} If they lie elsewhere now, say source=...") from error


def _draw_features(
    pictures: Pictures,
    record: RunRecord,
    source: Source,
    checkpoint: Checkpoint,
    count: int,
    device: torch.device,
) -> None:
    teacher = load_teacher(checkpoint, record.config, device)
    began = time.monotonic()
    explored = explore(teacher, source, chosen(source, count, record.config.seed))
    log.info("looked at %d images in %.0f s", len(explored.indices), time.monotonic() - began)
    pictures.attention = attention_rows(teacher, source, explored)
    pictures.neighbours = neighbour_rows(teacher, source, explored)
    pictures.explorer = page_data(explored)
    pictures.notes.append(f"The pictures are of the teacher at step {teacher.step:,}.")
    if explored.missing_layout:
        pictures.notes.append(f"The map has no places that keep neighbours: {explored.missing_layout}.")
    if explored.unreadable:
        pictures.notes.append(f"{explored.unreadable} images cannot be read and are left out.")


def _try(pictures: Pictures, sections: tuple[str, ...], work: Callable[[], T]) -> T | None:
    """Do what depends on files that may be gone; what fails is said where it would have stood."""
    try:
        return work()
    except (ValueError, OSError, UnreadableImage) as error:
        log.warning("the report has no %s: %s", ", no ".join(sections), error)
        pictures.reasons |= dict.fromkeys(sections, f"Not drawn: {error}")
        return None
