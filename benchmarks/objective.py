"""A step with DINOv2's loss beside one with DINO's, and beside the same loss with lightly's modules.

    python -m benchmarks.objective --repeats 5 --batch 8

ViT-S/16, 2 × 224 and 8 × 96 pixels, 65,536 prototypes that learn, AdamW, views that are ready; with DINOv2's
loss half of the global views have 10 to 50 % of their patches masked, and there is KoLeo. Memory is all that
two steps take on top of the imports.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.measure import Apart, Row, Table, Work, arguments, compare, here, peak_memory, report, where
from benchmarks.step import LABELS, Case, Ours, make_batch
from dino_vit.core.runtime import Precision

DINOV2 = {"loss.patch_weight": 1.0, "loss.koleo_weight": 0.1}
NAMES = "dino_vit, DINOv2", "dino_vit, DINO", "lightly, DINOv2"
ON_CUDA = "ViT-S/16 with 64 images in bf16: a step with DINOv2's loss beside DINO's and lightly's"


def build(name: str, case: Case, device: torch.device) -> Work:
    """Return the step of a contender."""
    if name != NAMES[2]:
        return Ours(case)
    from benchmarks.peer import MaskedPeer

    config = case.config
    batch = make_batch(config, device)
    assert batch.masks is not None
    peer = MaskedPeer(config, batch.masks, device)
    views = [view for of_a_size in batch.views.values() for view in torch.split(of_a_size, case.batch)]
    return lambda: peer.step(views)


def build_run(name: str, case: Case, device: torch.device) -> Work:
    """Return what memory is measured of: building everything, and two steps."""

    def run() -> None:
        step = build(name, case, device)
        step()
        step()

    return run


def measure(
    images: int, precision: Precision, names: Sequence[str], repeats: int, changes: Mapping[str, Any]
) -> tuple[Row, str]:
    """Measure one row, and say what it comes to."""
    device = here()
    cases = {
        name: Case(images, precision, {**changes, **({} if name == NAMES[1] else DINOV2)}) for name in names
    }
    works = {name: Apart(build, name, case, device) for name, case in cases.items()}
    title = f"{LABELS[precision]}, {images} images"
    row = compare(title, works, items=images, repeats=repeats, device=device.type)
    for work in works.values():
        work.pool.shutdown()
    for name, case in cases.items():
        row.memory[name] = peak_memory(build_run, name, case, device, device=device.type)
    ours, plain = (row.speed[name] for name in NAMES[:2])
    said = f"{title}: DINOv2's step takes {plain / ours:.2f} times as long as DINO's"
    peak, of_dino = (row.memory[name] for name in NAMES[:2])
    if peak and of_dino:
        said += f", and {peak / of_dino:.2f} times the memory"
    if NAMES[2] in row.speed:
        said += f"; it is {ours / row.speed[NAMES[2]]:.2f} times as fast as with lightly's modules"
    return row, f"{said}."


def run(*, repeats: int, threads: int, batch: int | None = None) -> list[Table]:
    """Measure all rows."""
    torch.set_num_threads(threads)
    names = NAMES if find_spec("lightly") else NAMES[:2]
    if len(names) < len(NAMES):
        print("lightly is not installed (pip install lightly): no column of it", file=sys.stderr)
    on_cuda = here().type == "cuda"
    precisions: tuple[Precision, ...] = ("bf16",) if on_cuda else ("bf16", "no")
    images = batch or (64 if on_cuda else 8)
    measured = [measure(images, precision, names, repeats, {}) for precision in precisions]
    rows, notes = [row for row, _ in measured], [said for _, said in measured]
    return [Table(f"DINOv2's loss, {where(threads)}", "images a second", rows, "\n".join(notes))]


if __name__ == "__main__":
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, help="images (default: 8 on a CPU, 64 on CUDA)")
    options = parser.parse_args()
    report(run(repeats=options.repeats, threads=options.threads, batch=options.batch), options)
