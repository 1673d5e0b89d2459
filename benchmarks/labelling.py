"""Labels chosen by `predict unsure=` against as many at random: accuracy on images that neither has seen.

    python -m benchmarks.labelling FOLDER/hands RUN [--labels 100] [--seeds 3]

From so many labels at random, each way adds as many again from train.parquet, whose own labels are filled in;
what is learned then is tested on test.parquet. RUN is a run or any weights file.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import dino_vit
from benchmarks.measure import Row, Table, arguments, report
from dino_vit.data.sources.open import open_source


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("weights", metavar="RUN")
    parser.add_argument(
        "--labels", type=int, default=100, help="at the start, and added (default %(default)s)"
    )
    parser.add_argument(
        "--seeds", type=int, default=3, help="of the labels at the start (default %(default)s)"
    )
    parser.set_defaults(repeats=0)
    options = parser.parse_args()
    pool, test = (str(options.folder / f"{part}.parquet") for part in ("train", "test"))
    labels = labels_of(pool)
    rows = []
    for seed in range(options.seeds):
        names = sorted(labels)
        random.Random(seed).shuffle(names)
        start, more = names[: options.labels], names[options.labels : 2 * options.labels]
        with TemporaryDirectory() as folder:
            table = write(Path(folder) / "labels.csv", start, labels)
            found = dino_vit.predict(
                pool, options.weights, labels=table, unsure=options.labels, verbose=False
            )
        ways = {"start": start, "at random": start + more, "chosen": start + found.to_label}
        tested = {way: accuracy(pool, test, options.weights, chosen, labels) for way, chosen in ways.items()}
        rows.append(Row(f"seed {seed}", tested, tested["chosen"] / tested["at random"]))
    title = f"{options.folder.name}: accuracy on test after {options.labels} labels, and as many more"
    report([Table(title, "per cent", rows, ratio="chosen / at random")], options)


def labels_of(source: str) -> dict[str, str]:
    """Return the label of each image by its name."""
    images = open_source(source)
    numbers = {images.name(index): images.label(index) for index in range(len(images))}
    return {name: images.classes[number] for name, number in numbers.items() if number is not None}


def write(path: Path, names: Sequence[str], labels: dict[str, str]) -> Path:
    """Write the labels of some images."""
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("name", "label"), *((name, labels[name]) for name in names)])
    return path


def accuracy(pool: str, test: str, weights: str, names: Sequence[str], labels: dict[str, str]) -> float:
    """Return the share of test images whose label is right, learned from some of the pool."""
    with TemporaryDirectory() as folder:
        table = write(Path(folder) / "labels.csv", names, labels)
        found = dino_vit.predict(test, weights, train=pool, labels=table, verbose=False)
    true = labels_of(test)
    right = [true[name] == label for name, label in zip(found.names, found.labels, strict=True)]
    return 100 * sum(right) / len(right)


if __name__ == "__main__":
    main()
