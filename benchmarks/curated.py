"""Curation: what the weights of `dino-vit curate` are worth on a long-tailed set with copies.

    python -m benchmarks.curated FOLDER --out benchmarks/results/cpu/curated.json

FOLDER holds train.parquet and test.parquet of CIFAR-10. The set has 5,000 images of the first class and 50 of the
last, and near copies of images of the first two. Each seed has one run as it is, and others that go on from its
first checkpoint with weights: those of `curate`, from the embeddings of that checkpoint, and those that a user
without labels cannot have, by class and without copies. So all take the same steps of the same network. Judged
by images of CIFAR-10 as it is, in which classes are alike.
"""

from __future__ import annotations

import io
import shutil
import time
from pathlib import Path
from statistics import mean

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

import dino_vit
from benchmarks import small
from benchmarks.cifar10 import labels
from benchmarks.measure import Row, Table, arguments, report
from dino_vit.commands.embeddings.curate import write_weights
from dino_vit.data.sources.open import open_source
from dino_vit.eval.features import FrozenBackbone
from dino_vit.reports.record import read_run
from dino_vit.views.build import build_eval_transform
from dino_vit.weights import load_backbone

LARGEST, RATIO, COPIES, COPIED_CLASSES = 5000, 100, 4000, 2
BANK = 10_000
FIRST, STEPS = 100, 500
SETTINGS = [f"budget.steps={STEPS}", f"run.checkpoint_every={FIRST}", f"run.keep_every={FIRST}"]
SETTINGS += ["run.eval_every=null", "run.log_every=25", "model.width=64", "model.depth=3", "model.heads=2"]


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.set_defaults(repeats=0, threads=1)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind (default %(default)s)")
    parser.add_argument("--runs", type=Path, default=Path("runs/curated"), help="their folders go here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.runs.mkdir(parents=True, exist_ok=True)
    long_tailed = options.runs / "train.parquet"
    if not long_tailed.exists():
        write_long_tailed(options.folder / "train.parquet", long_tailed)
    rows, notes = [], []
    for seed in range(options.seeds):
        figures, note = compare(options.runs, seed, options.folder)
        notes.append(f"Seed {seed}: {note}")
        rows += [row(f"seed {seed}: {name}", values) for name, values in figures.items()]
    for name in ("k-NN", "linear"):
        of_seeds = [each.speed for each in rows if each.name.endswith(name)]
        rows.append(row(f"mean: {name}", {key: mean(each[key] for each in of_seeds) for key in of_seeds[0]}))
    title = f"CIFAR-10, long-tailed with copies, {STEPS} steps of 64, weights from step {FIRST} on"
    report([Table(title, "per cent", rows, " ".join(notes), ratio="curated / plain")], options)


def row(name: str, values: dict[str, float]) -> Row:
    return Row(name, values, values["curated"] / values["plain"])


def write_long_tailed(source: Path, target: Path) -> None:
    """Write a part of the images, and copies of some: cropped a little, resized and compressed."""
    table, random = pq.read_table(source), np.random.default_rng(0)
    classes = table["label"].to_numpy()
    of_class = [random.permutation(np.flatnonzero(classes == label)) for label in range(10)]
    sizes = [round(LARGEST * RATIO ** (-label / 9)) for label in range(10)]
    kept = np.concatenate([rows[:size] for rows, size in zip(of_class, sizes, strict=True)])
    copied = random.choice(kept[classes[kept] < COPIED_CLASSES], COPIES)
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
    label = classes[np.concatenate([kept, copied])][order]
    pq.write_table(pa.table({"image": [records[index] for index in order], "label": label}), target)


def compare(runs: Path, seed: int, folder: Path) -> tuple[dict[str, dict[str, float]], str]:
    """Return the figures of the runs of a seed, and a note on the weights."""
    plain, files = runs / f"plain-{seed}", {}
    small.train([small.Job("cifar10", seed, plain, SETTINGS)], {"cifar10": runs})
    first = plain / "checkpoints" / f"step-{FIRST:08}.safetensors"
    start = time.process_time()
    embedded = dino_vit.embed(runs / "train.parquet", first, cache=str(runs / "features"), verbose=False)
    curated = dino_vit.curate(embedded, verbose=False)
    seconds = time.process_time() - start
    classes = np.array([int(str(label)) for label in embedded.labels])
    originals = np.array(["copy" not in name for name in embedded.names])
    by_class = originals / np.bincount(classes[originals])[classes]
    note = f"embeddings and weights in {seconds:.0f} s; of the draws, the two first classes had 73 % without"
    for kind, weights in (("curated", curated.weights), ("by class", by_class)):
        files[kind] = runs / f"{kind.replace(' ', '-')}-{seed}"
        write_weights(files[kind].with_suffix(".csv"), embedded.names, weights)
        if not files[kind].exists():
            (files[kind] / "checkpoints").mkdir(parents=True)
            shutil.copy(first, files[kind] / "checkpoints")
        weighted = [f"data.weights={files[kind].with_suffix('.csv')}", "run.resume=changed"]
        small.train([small.Job("cifar10", seed, files[kind], [*SETTINGS, *weighted])], {"cifar10": runs})
        note += f", {weights[classes < COPIED_CLASSES].sum() / weights.sum():.0%} {kind}"
    outputs = {"curated": files["curated"], "plain": plain, "by class": files["by class"]}
    judged = {kind: judge(output, folder) for kind, output in outputs.items()}
    names = ("k-NN", "linear")
    return {name: {kind: judged[kind][number] for kind in outputs} for number, name in enumerate(names)}, note


def judge(output: Path, folder: Path) -> tuple[float, float]:
    """Return the accuracies of k-NN and a linear probe on all test images, learned from some training images."""
    values = []
    for part, most in (("train", BANK), ("test", None)):
        source = open_source(str(folder / f"{part}.parquet"))
        indices = torch.randperm(len(source), generator=torch.Generator().manual_seed(0))[:most]
        frozen = FrozenBackbone(
            model=load_backbone(output),
            transform=build_eval_transform(read_run(output).config),
            batch_size=256,
        )
        values += [frozen.extract(source, indices.tolist()).values, labels(source, indices)]
    return small.knn(*values), small.linear(*values)


if __name__ == "__main__":
    main()
