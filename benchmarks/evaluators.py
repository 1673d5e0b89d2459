"""What evaluators say of small networks: which copies are found, linear classifiers, labels of chance.

    python -m benchmarks.evaluators FOLDER RUNS --out benchmarks/results/cpu/evaluators.json

FOLDER is that of `benchmarks.small`, RUNS has a run on each of its sets, as `runs/race/now-5` of the race. In
each set 150 images get a mild copy, cut by 5 %, as JPEG at quality 60 or reduced to 80 %, by Pillow and not
by the code that chooses the threshold, and `duplicates` looks for them. `linear` judges hands by its methods,
and two classes that were drawn at random.
"""

from __future__ import annotations

import io
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from PIL import Image
from torch import Tensor

import dino_vit
from benchmarks.measure import Row, Table, arguments, report
from dino_vit.data.image_set import ImageSet
from dino_vit.data.images.formats import format_of
from dino_vit.data.sources.open import open_source
from dino_vit.eval.embeddings.duplicates import DuplicatesResult
from dino_vit.reports.record import read_run
from dino_vit.training.setup import build_untrained
from dino_vit.weights import load_backbone
from dino_vit.weights.reading import save_backbone

SETS = ("hands", "groceries", "flowers", "cifar10")
COPIES, MOST, FIXED = 150, 5000, 0.95  # copies and images of a set, and the other threshold
RANDOM, SEEDS = 192, 5  # images with labels that say nothing, and drawings of them
METHODS: dict[str, dict[str, Any]] = {
    "regressions": {"method": "logistic"},
    "grid": {"method": "grid"},
    "grid select=source": {"method": "grid", "select": "source"},
}


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("runs", type=Path, metavar="RUNS")
    parser.set_defaults(repeats=0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    hands, run = options.folder / "hands", options.runs / "hands"
    with TemporaryDirectory() as folder:
        work = Path(folder)
        found = [copies(options.folder / name, options.runs / name, work / name) for name in SETS]
        judged = [classified(hands, run, work, method) for method in METHODS]
        drawn = [guessed(hands, run, method) for method in METHODS]
    minutes = f"networks of {read_run(run).config.budget.minutes:g} minutes of one core"
    title = f"Copies that duplicates finds, {COPIES} in each set, {minutes}"
    note = "Found: per cent of the copies, paired with their image. Others: pairs that are no such copy."
    tables = [
        Table(title, "per cent, or pairs", found, note, ratio="found at the chosen / at 0.95"),
        Table(f"linear on hands, {minutes}", "per cent", judged, ratio="trained / untrained"),
        Table(
            f"linear with two classes that are drawn at random, {RANDOM} images of hands, {minutes}",
            "per cent",
            drawn,
            f"Chance is 50 per cent; means of {SEEDS} drawings.",
            ratio="right / chance",
        ),
    ]
    report(tables, options)


def copies(images: Path, run: Path, work: Path) -> Row:
    """Add copies to a set, and count those that are found and the other pairs."""
    files = pq.read_table(images / "train.parquet")["image"].to_pylist()[:MOST]
    generator = np.random.default_rng(0)
    chosen = generator.choice(len(files), COPIES, replace=False).tolist()
    work.mkdir()
    for number, file in enumerate(files):
        (work / f"{number:05}.{format_of(file['bytes']).lower()}").write_bytes(file["bytes"])
    for kind, number in enumerate(chosen):
        data, ending = altered(files[number]["bytes"], kind % 3, generator)
        (work / f"{number:05}-copy{ending}").write_bytes(data)
    embedded = work.with_suffix(".parquet")
    dino_vit.embed(str(work), str(run), output=str(embedded))
    figures: dict[str, float] = {}
    for name, threshold in (("0.95", FIXED), ("chosen", None)):
        result = dino_vit.duplicates(str(embedded), threshold=threshold, pairs=1_000_000)
        right = sum(original(a) == original(b) for a, b in pairs(result))
        figures |= {f"found at {name}": 100 * right / COPIES, f"others at {name}": result.pairs.total - right}
    title = f"{images.name}, {len(files):,} images, {result.threshold.value:.4f} chosen"
    title += ", with the warning" * result.threshold.is_weak
    return Row(title, figures, figures["found at chosen"] / figures["found at 0.95"])


def pairs(result: DuplicatesResult) -> list[tuple[str, str]]:
    return [pair.images for pair in result.pairs.closest]


def original(name: str) -> str:
    return Path(name).stem.removesuffix("-copy")


def altered(data: bytes, kind: int, generator: np.random.Generator) -> tuple[bytes, str]:
    """Return a copy of an image file: cut, as JPEG of less quality, or reduced; and how its name ends."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    width, height = image.size
    if kind == 0:
        kept = round(0.95 * width), round(0.95 * height)
        left, top = (
            int(generator.integers(side - part + 1)) for side, part in zip(image.size, kept, strict=True)
        )
        image = image.crop((left, top, left + kept[0], top + kept[1]))
    elif kind == 2:
        image = image.resize((round(0.8 * width), round(0.8 * height)), Image.Resampling.BICUBIC)
    file, (form, quality) = io.BytesIO(), (("JPEG", 60) if kind == 1 else ("PNG", None))
    image.save(file, form, **({"quality": quality} if quality else {}))
    return file.getvalue(), f".{form.lower()}"


def classified(images: Path, run: Path, work: Path, method: str) -> Row:
    """Classify the test images by a linear classifier, on the trained and the untrained network."""
    trained, start = load_backbone(run), work / "untrained.safetensors"
    untrained = build_untrained(read_run(run).config)[1].backbone
    untrained.provenance = trained.provenance
    save_backbone(untrained, start)
    test, train = (str(images / f"{part}.parquet") for part in ("test", "train"))
    values = {
        name: dino_vit.linear(test, str(weights), train=train, **METHODS[method]).figure.value
        for name, weights in (("trained", run), ("untrained", start))
    }
    return Row(method, values, values["trained"] / values["untrained"])


def guessed(images: Path, run: Path, method: str) -> Row:
    """Classify as many test images as training images by labels that are drawn at random."""
    shares = []
    for seed in range(SEEDS):
        drawn = np.random.default_rng(seed)
        train, test = (
            Drawn(open_source(str(images / f"{part}.parquet")), drawn) for part in ("train", "test")
        )
        shares.append(dino_vit.linear(test, str(run), train=train, seed=seed, **METHODS[method]).figure.value)
    return Row(method, {"right": mean(shares)}, mean(shares) / 50)


class Drawn:
    """Images of a set with one of two labels, drawn at random."""

    def __init__(self, source: ImageSet, generator: np.random.Generator) -> None:
        self.source = source
        self.places = generator.choice(len(source), RANDOM, replace=False).tolist()
        self.targets = generator.integers(2, size=RANDOM).tolist()

    def __len__(self) -> int:
        return RANDOM

    def read(self, index: int) -> bytes | Tensor:
        return self.source.read(self.places[index])


if __name__ == "__main__":
    main()
