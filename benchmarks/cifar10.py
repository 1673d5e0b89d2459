"""CIFAR-10: what pretraining without a label comes to, beside the untrained network and raw pixels.

    python -m benchmarks.cifar10 FOLDER --out benchmarks/results/cpu/cifar10.json [key=value ...]

FOLDER holds train.parquet and test.parquet. The run goes on where it was, and one that has ended is judged as
it is: k-NN (k = 20) on the test images, with 20,000 training images in the bank and with all of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.measure import Row, Table, arguments, here, report
from dino_vit.config.loading import load
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.core.runtime import DTYPES, choose_precision
from dino_vit.data.image_set import ImageSet
from dino_vit.data.sources.open import open_source
from dino_vit.eval.features import FrozenBackbone
from dino_vit.eval.neighbours import weighted_knn
from dino_vit.eval.reading import Features, pixel_features
from dino_vit.models.backbone import Backbone
from dino_vit.reports.record import read_run
from dino_vit.training.pretrain import pretrain
from dino_vit.training.setup import build_untrained
from dino_vit.views.build import build_eval_transform
from dino_vit.weights import load_backbone

ON_CUDA = "configs/pretrain/cifar10.yaml, 200 epochs: k-NN to reach 85 per cent"
CONFIGS = Path(__file__).parents[1] / "configs" / "pretrain"
BANK, K = 20_000, 20
LabelledSets = tuple[tuple[ImageSet, Sequence[int]], ...]  # the bank and the queries


def judge(config: PretrainConfig, train: ImageSet, test: ImageSet) -> list[Row]:
    """Return the accuracies of the run's network, of the one it started from, and of raw pixels."""
    transform = build_eval_transform(config)
    order = np.random.default_rng(0).permutation(len(train))  # files may be sorted by class
    sets: LabelledSets = ((train, order.tolist()), (test, range(len(test))))
    device = here()
    precision = choose_precision("auto", device)

    def features(model: Backbone) -> list[Features]:
        return [
            FrozenBackbone(
                model=model.to(device),
                transform=transform,
                batch_size=256,
                autocast=None if precision == "no" else DTYPES[precision],
            ).extract(source, places)
            for source, places in sets
        ]

    contenders = {
        "trained": features(load_backbone(config.output)),
        "untrained": features(build_untrained(config)[1].backbone),
        "raw pixels": [pixel_features(source, places, transform=transform) for source, places in sets],
    }
    rows = []
    for size in (min(BANK, len(train)), len(train)):
        found = {
            name: accuracy(bank, queries, train, test, size) for name, (bank, queries) in contenders.items()
        }
        best = max(value for name, value in found.items() if name != "trained")
        rows.append(Row(f"{size:,} images in the bank", found, found["trained"] / best))
    return rows


def accuracy(bank: Features, queries: Features, train: ImageSet, test: ImageSet, size: int) -> float:
    """Return how many per cent of the queries the first so many of a bank classify rightly."""
    places = bank.indices[:size]
    ranked = weighted_knn(bank.values[:size], labels(train, places), queries.values, k=(K,))
    right = ranked[K][:, 0].cpu() == labels(test, queries.indices)
    return 100 * float(right.float().mean())


def labels(source: ImageSet, places: Tensor) -> Tensor:
    """Return the labels of some images, on the host."""
    return torch.tensor([source.label(int(place)) for place in places])


def story(config: PretrainConfig, images: int) -> str:
    """Say what was trained, how fast, and what its own evaluations showed on the way."""
    lines = (Path(config.output) / "metrics.jsonl").read_text().splitlines()
    records: list[Mapping[str, float]] = [json.loads(line) for line in lines]
    last = records[-1]
    speed, wait = (float(np.median([r[key] for r in records])) for key in ("images_per_second", "data_wait"))
    baseline = json.loads((Path(config.output) / "baseline.json").read_text())
    curve = ", ".join(f"{r['knn']:.1f}" for r in records if r.get("knn") is not None)
    width, depth, heads = config.model.shape
    return (
        f"ViT/{config.model.patch_size} of width {width}, {depth} blocks, {heads} heads; "
        f"{last['step']:,} steps, {last['epoch']:.1f} epochs of {images:,} images; "
        f"{speed:.0f} images a second (median of {len(records)} log lines), {wait:.1%} of the time waiting "
        f"for data. k-NN of 5,000 training images among each other, an evaluation after the other: "
        f"{baseline['knn']:.1f} untrained, then {curve}; raw pixels {baseline['raw_pixels']:.1f}."
    )


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.set_defaults(repeats=0)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="of the pretraining")
    options = parser.parse_intermixed_args()
    torch.set_num_threads(options.threads)
    cuda = here().type == "cuda"
    path = CONFIGS / ("cifar10.yaml" if cuda else "cifar10_cpu.yaml")
    config = load(
        PretrainConfig, path, [f"data.source={options.folder / 'train.parquet'}", *options.settings]
    )
    pretrain(config)
    config = read_run(Path(config.output)).config  # with what recipe=auto chose
    train, test = (open_source(str(options.folder / f"{name}.parquet")) for name in ("train", "test"))
    title = f"CIFAR-10, configs/pretrain/{path.name}, {'CUDA' if cuda else 'CPU'}"
    rows, note = judge(config, train, test), story(config, len(train))
    report([Table(title, "k-NN top-1, per cent", rows, note, ratio="trained / best other")], options)


if __name__ == "__main__":
    main()
