"""Curation: what the weights of `dino-vit curate` are worth on long-tailed sets with copies.

    python -m benchmarks.curated FOLDER --out benchmarks/results/cpu/curated.json

FOLDER holds train.parquet and test.parquet of CIFAR-10, of which a run sees 5,000 images of the first class,
50 of the last, and copies; another goes on from its first checkpoint with weights by its embeddings there.
"""

from __future__ import annotations

import io
import shutil
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

import dino_vit
from benchmarks import small
from benchmarks.cifar10 import labels
from benchmarks.measure import Row, Table, arguments, report
from dino_vit.data.sources.open import open_source
from dino_vit.eval.features import FrozenBackbone
from dino_vit.reports.record import read_run
from dino_vit.views.build import build_eval_transform

LARGEST, RATIO, FIRST_CLASSES, COPIES, BANK = 5000, 100, 2, 4000, 10_000
FIRST, STEPS, KINDS = 100, 500, ("curated", "plain")
SETTINGS = [f"budget.steps={STEPS}", f"run.checkpoint_every={FIRST}", f"run.keep_every={FIRST}"]
SETTINGS += ["run.eval_every=null", "run.log_every=25", "model.width=64", "model.depth=3", "model.heads=2"]


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.set_defaults(repeats=0)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind (default %(default)s)")
    parser.add_argument("--runs", type=Path, default=Path("runs/curated"), help="their folders go here")
    options, rows = parser.parse_args(), []
    torch.set_num_threads(1)
    options.runs.mkdir(parents=True, exist_ok=True)
    if not (options.runs / "train.parquet").exists():
        write_long_tailed(options.folder / "train.parquet", options.runs / "train.parquet")
    results = [compare(options.runs, seed, options.folder) for seed in range(options.seeds)]
    *figures, notes = zip(*results, strict=True)
    for title, of_seeds in zip(("k-NN", "linear"), figures, strict=True):
        pairs = {f"seed {seed}": pair for seed, pair in enumerate(of_seeds)}
        pairs["mean"] = np.mean(of_seeds, axis=0).tolist()
        for of, pair in pairs.items():
            rows.append(Row(f"{of}: {title}", dict(zip(KINDS, pair, strict=True)), pair[0] / pair[1]))
    title = f"CIFAR-10, long-tailed, {COPIES:,} copies: {STEPS} steps of 64, weights from step {FIRST} on"
    report([Table(title, "per cent", rows, " ".join(notes), ratio=" / ".join(KINDS))], options)


def write_long_tailed(source: Path, target: Path) -> None:
    """Write a part of the images, and copies of some: cropped a little, resized and compressed."""
    table, random = pq.read_table(source), np.random.default_rng(0)
    classes = table["label"].to_numpy()
    of_class = [random.permutation(np.flatnonzero(classes == label)) for label in range(10)]
    parts = [rows[: round(LARGEST * RATIO ** (-label / 9))] for label, rows in enumerate(of_class)]
    kept = np.concatenate(parts)
    copied = random.choice(kept[classes[kept] < FIRST_CLASSES], COPIES)
    images = [image["bytes"] for image in table["image"].take(kept).to_pylist()]
    for image in table["image"].take(copied).to_pylist():
        x, y = random.integers(0, 3, 2).tolist()
        picture = Image.open(io.BytesIO(image["bytes"])).convert("RGB").crop((x, y, x + 30, y + 30))
        file = io.BytesIO()
        picture.resize((32, 32)).save(file, "JPEG", quality=int(random.integers(75, 95)))
        images.append(file.getvalue())
    names = [f"{row:05}.png" for row in kept]
    names += [f"copy-{number:04}-of-{row:05}.jpg" for number, row in enumerate(copied)]
    records = [{"bytes": image, "path": name} for image, name in zip(images, names, strict=True)]
    order = random.permutation(len(records))
    label = classes[np.concatenate([kept, copied])[order]]
    pq.write_table(pa.table({"image": [records[index] for index in order], "label": label}), target)


def compare(runs: Path, seed: int, folder: Path) -> tuple[list[float], list[float], str]:
    """Return the k-NN and the linear probe of the two runs of a seed, and a note on the weights."""
    curated, plain = (runs / f"{kind}-{seed}" for kind in KINDS)
    small.train([small.Job("cifar10", seed, plain, SETTINGS)], {"cifar10": runs})
    first, file = plain / f"checkpoints/step-{FIRST:08}.safetensors", f"{curated}.csv"
    embedded = dino_vit.embed(runs / "train.parquet", first, cache=str(runs / "features"), verbose=False)
    start = time.process_time()
    weights = dino_vit.curate(embedded, output=file, verbose=False).weights
    seconds = time.process_time() - start
    (curated / "checkpoints").mkdir(parents=True, exist_ok=True)
    shutil.copy(first, curated / "checkpoints")
    weighted = [*SETTINGS, f"data.weights={file}", "run.resume=changed"]
    small.train([small.Job("cifar10", seed, curated, weighted)], {"cifar10": runs})
    knn, linear = zip(*(judge(output, folder) for output in (curated, plain)), strict=True)
    of_first = np.array([int(str(label)) for label in embedded.labels]) < FIRST_CLASSES
    note = (
        f"Seed {seed}: {np.mean(weights == 0):.0%} never drawn, {of_first @ weights / weights.sum():.0%} of "
    )
    note += f"the draws from the first two classes, not {of_first.mean():.0%}; weighed in {seconds:.0f} s."
    return list(knn), list(linear), note


def judge(output: Path, folder: Path) -> tuple[float, float]:
    """Return the accuracies of k-NN and a linear probe of some training images on all test images."""
    values, transform = list[torch.Tensor](), build_eval_transform(read_run(output).config)
    frozen = FrozenBackbone(model=dino_vit.load_backbone(output), transform=transform, batch_size=256)
    for part, most in (("train", BANK), ("test", None)):
        source = open_source(str(folder / f"{part}.parquet"))
        indices = torch.randperm(len(source), generator=torch.Generator().manual_seed(0))[:most]
        values += [frozen.extract(source, indices.tolist()).values, labels(source, indices)]
    return small.knn(*values), small.linear(*values)


if __name__ == "__main__":
    main()
