"""What a step costs as views, images and prototypes grow, and a resume as the data set does.

    python -m benchmarks.scaling --repeats 3

A ViT-Ti/4 on small images, 16 at a time, our step beside the 2021 code's (`benchmarks/step.py` says how they
are compared). A resume is timed from the middle of an epoch to the names of its next images, beside PyTorch's
DistributedSampler, which lists the epoch and steps over what has been.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any, cast

import torch
from torch.utils.data import Dataset, DistributedSampler

from benchmarks import step
from benchmarks.end_to_end import SMALL
from benchmarks.measure import Row, Table, Work, arguments, compare, report, where
from dino_vit.views.sampler import Sampler

ON_CUDA = "the same rows"
IMAGES = 16
GROWTH: tuple[tuple[str, tuple[tuple[str, Mapping[str, Any]], ...]], ...] = (
    ("Local views", tuple((f"{n} of 16 px", {"views.local_count": n}) for n in (0, 2, 4, 8, 16))),
    (
        "Size of the views",
        tuple(
            (f"{side} and {side // 2} px", {"views.global_size": side, "views.local_size": side // 2})
            for side in (32, 48, 64, 96)
        ),
    ),
    ("Prototypes", tuple((f"{n:,}", {"head.prototypes": n}) for n in (1024, 4096, 16384, 65536))),
)


def measure_step(name: str, changes: Mapping[str, Any], repeats: int) -> Row:
    """Measure our step and the other's."""
    case = step.Case(IMAGES, "bf16", changes={**SMALL, **changes})
    ours = step.Ours(case)
    device = ours.state.device
    works: dict[str, Work] = {
        "dino_vit": ours,
        "reference": step.Reference(case.config, device, ours.state),
    }
    return compare(name, works, items=IMAGES, repeats=repeats, device=device.type)


def resumes(images: int) -> dict[str, Callable[[], Iterable[int]]]:
    """Return what finds the next images in the middle of an epoch."""
    sampler = Sampler(length=images, batch_size=64, seed=0)
    middle = sampler.steps_per_epoch // 2
    numbers = cast("Dataset[int]", range(images))
    other: DistributedSampler[int] = DistributedSampler(numbers, num_replicas=1, rank=0)
    return {
        "dino_vit": lambda: next(sampler.batch_specs(middle)).samples,
        "DistributedSampler": lambda: list(islice(iter(other), middle * 64, middle * 64 + 64)),
    }


def run(*, repeats: int, threads: int) -> list[Table]:
    """Measure all of it."""
    torch.set_num_threads(threads)
    tables = []
    for title, cases in GROWTH:
        rows = [measure_step(name, changes, repeats) for name, changes in cases]
        slower = rows[0].speed["dino_vit"] / rows[-1].speed["dino_vit"]
        others = rows[0].speed["reference"] / rows[-1].speed["reference"]
        note = (
            f"From the first row to the last ours takes {slower:.1f} times as long, the other {others:.1f}."
        )
        tables.append(Table(f"{title}, {where(threads)}", "images a second", rows, note))
    rows = [
        compare(f"{images:,} images", resumes(images), items=1, repeats=repeats)
        for images in (10_000, 100_000, 1_000_000, 10_000_000)
    ]
    tables.append(Table("Resuming in the middle of an epoch", "resumes a second", rows))
    return tables


if __name__ == "__main__":
    options = arguments(__doc__.splitlines()[0]).parse_args()
    report(run(repeats=options.repeats, threads=options.threads), options)
