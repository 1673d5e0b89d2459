"""The whole program: JPEG files on a disk to the next teacher, images a second.

    python -m benchmarks.end_to_end --repeats 3

`dino_vit` is the training loop with its loader, on a state set up from a config; `reference` is the 2021
code's pipeline (PIL, one view after the other) and its step; `lightly` is that library's transform, head and
loss around a timm backbone. Each reads the same files with as many loader processes; a round is timed once
they all run and have filled what they fill.
A second table is of ours alone: the photometry on the device, and in the loader processes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler

from benchmarks import step
from benchmarks.input import Photos, published_views
from benchmarks.measure import Row, Table, Work, arguments, compare, here, report, where
from dino_vit.config.loading import replace
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.core.runtime import start_processes
from dino_vit.training.loop import take_step
from dino_vit.training.setup import set_up

ON_CUDA = "both tables, ViT-S/16 with 64 images and ViT-Ti/4 with 512"
Views = Callable[[Image.Image], list[Tensor]]
SMALL: dict[str, Any] = {
    "model.arch": "vit_tiny",
    "model.patch_size": 4,
    "head.prototypes": 2048,
    "views.global_size": 32,
    "views.local_size": 16,
    "views.local_count": 4,
}


@dataclass(frozen=True)
class Case:
    """What is trained, on images of what width, how many at once, and how many steps a round takes."""

    name: str
    width: int
    batch: int
    steps: int
    changes: Mapping[str, Any]


class Files(Dataset[Sequence[Tensor]]):
    """The views of image files, as the others' loaders make them."""

    def __init__(self, folder: Path, views: Views) -> None:
        self.paths, self.views = sorted(folder.iterdir()), views

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Sequence[Tensor]:
        with Image.open(self.paths[index]) as image:
            return self.views(image.convert("RGB"))


class Ours:
    """Our loop: its loader and its steps; no evaluation, no checkpoint."""

    def __init__(self, config: PretrainConfig, steps: int) -> None:
        self.started = set_up(config, start_processes())
        self.state, self.steps = self.started.state, steps
        self.waits: list[float] = []

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Keep the loader's processes running, and past their first batches."""
        with closing(self.state.loader.batches(self.state.step)) as self.batches:
            for _ in range(warm_up(self.state.config)):
                self.step()
            yield

    def __call__(self) -> None:
        self.state.interval.restart()
        for _ in range(self.steps):
            self.step()
        self.waits.append(self.state.interval.read()["data_wait"])

    def step(self) -> None:
        """Take one step."""
        take_step(self.state, self.batches)


class Theirs:
    """A loader of PyTorch's and somebody's step."""

    def __init__(
        self, files: Files, config: PretrainConfig, steps: int, take: Callable[[list[Tensor]], object]
    ) -> None:
        batch, self.warm_up = config.data.batch_size, warm_up(config)
        self.loader: DataLoader[Sequence[Tensor]] = DataLoader(
            files,
            batch_size=batch,
            # Epoch after epoch, or the processes would be started again for each of these short ones.
            sampler=RandomSampler(files, num_samples=(self.warm_up + steps) * batch),
            num_workers=config.data.workers or 0,
            pin_memory=here().type == "cuda",
        )
        self.steps, self.take = steps, take
        self.device = here()

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Keep the loader's processes running, and past their first batches."""
        self.batches = iter(self.loader)
        for _ in range(self.warm_up):
            self.step()
        yield
        del self.batches  # ends them

    def __call__(self) -> None:
        for _ in range(self.steps):
            self.step()

    def step(self) -> None:
        """Take one step."""
        self.take([view.to(self.device, non_blocking=True) for view in next(self.batches)])


def warm_up(config: PretrainConfig) -> int:
    """Return the steps after which each loader process has given its first batch."""
    return max(1, config.data.workers or 0)


def contenders(config: PretrainConfig, steps: int) -> dict[str, Work]:
    """Return those that can be had here, our own first."""
    ours, folder = Ours(config, steps), Path(config.data.images)
    device = ours.state.device
    published = step.Reference(config, device, ours.state)
    files = Files(folder, published_views(config))
    works: dict[str, Work] = {"dino_vit": ours, "reference": Theirs(files, config, steps, published.take)}
    try:
        from benchmarks import peer
    except ImportError:
        print("lightly is not installed (pip install lightly): no row of it", file=sys.stderr)
    else:
        theirs = Files(folder, peer.transform(config))
        works["lightly"] = Theirs(theirs, config, steps, peer.Peer(config, device).step)
    return works


@contextmanager
def files_of(case: Case, workers: int) -> Iterator[PretrainConfig]:
    """Write the images of a case; yield what ours trains on them with."""
    with TemporaryDirectory() as folder:
        photos = Path(folder) / "photos"
        photos.mkdir()
        for number, data in enumerate(Photos(max(64, case.batch), case.width).files):
            (photos / f"{number:03}.jpg").write_bytes(data)
        own = {"data.source": str(photos), "data.batch_size": case.batch, "data.workers": workers}
        own |= {"output": str(Path(folder) / "run"), "run.precision": "bf16"}
        yield replace(PretrainConfig(), {**step.FIXED, **own, **case.changes})


def measure(case: Case, repeats: int, workers: int) -> tuple[Row, str]:
    """Measure one row, and say how ours spent its time."""
    with files_of(case, workers) as config:
        works = contenders(config, case.steps)
        items = case.batch * case.steps
        row = compare(case.name, works, items=items, repeats=repeats, device=here().type, queued=1)
        ours = works["dino_vit"]
        assert isinstance(ours, Ours)
        rate = row.speed["dino_vit"] / case.batch
        with ours.opened():
            share = step.matrix_share(ours.step, ours.state.device, rate)
        waited = median(ours.waits[1:])
    return row, f"{case.name}: ours waits for data {waited:.1%} of its time and does {share}."


def measure_photometry(case: Case, repeats: int, workers: int) -> tuple[Row, str]:
    """Measure ours with the photometry here and there, and say what each waits for data."""
    with files_of(case, workers) as config:
        works = {
            name: Ours(replace(config, {"data.augment_on": place}), case.steps)
            for name, place in (("on the device", "device"), ("in the workers", "worker"))
        }
        items = case.batch * case.steps
        row = compare(case.name, works, items=items, repeats=repeats, device=here().type, queued=1)
    waited = " and ".join(f"{median(work.waits[1:]):.1%} {name}" for name, work in works.items())
    return row, f"{case.name}: waits for data {waited}."


def run(*, repeats: int, threads: int) -> list[Table]:
    """Measure both sizes."""
    torch.set_num_threads(threads)
    cuda = here().type == "cuda"
    workers = max(1, (os.cpu_count() or 1) - 2)
    large, small = (64, 512) if cuda else (8, 64)
    steps = max(8, 4 * workers)
    cases = (
        Case("ViT-S/16, 2 × 224 + 8 × 96 px of JPEGs of 500 × 375", 500, large, steps, {}),
        Case("ViT-Ti/4, 2 × 32 + 4 × 16 px of JPEGs of 40 × 30", 40, small, steps, SMALL),
    )
    rows, notes = zip(*(measure(case, repeats, workers) for case in cases), strict=True)
    reference = f"reference in {'fp16' if cuda else 'float32'}"
    title = f"The whole program, {where(threads)}, {reference}, lightly in bf16, loader processes: {workers}"
    whole = Table(title, "images a second", list(rows), "\n".join(notes))
    rows, notes = zip(*(measure_photometry(case, repeats, workers) for case in cases), strict=True)
    title = f"AugmentSettings, {where(threads)}, loader processes: {workers}"
    return [whole, Table(title, "images a second", list(rows), "\n".join(notes))]


if __name__ == "__main__":
    options = arguments(__doc__.splitlines()[0]).parse_args()
    report(run(repeats=options.repeats, threads=options.threads), options)
