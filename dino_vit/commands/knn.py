"""Judge a frozen backbone by the labels of each image's nearest neighbours: top-1, top-5 and per class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dino_vit.config.settings import Count, CountOrZero, Positive, setting
from dino_vit.core.distributed import all_gather, rank, world_size
from dino_vit.core.progress import progress
from dino_vit.eval.accuracy import Accuracy, per_class_accuracy, top_k_accuracy
from dino_vit.eval.datasets import LabelledSubset, open_part, open_sets
from dino_vit.eval.features.frozen import EvaluationConfig, FrozenBackbone, frozen_backbone
from dino_vit.eval.knn.shortlist import Search
from dino_vit.eval.knn.voting import few_shot_rows, weighted_knn
from dino_vit.eval.results import results_path, write_results

_CLASSES_SHOWN = 20


class KnnConfig(EvaluationConfig):
    """Classify images by their nearest neighbours, on features of a frozen backbone."""

    train: str | None = setting(
        None, "labelled images to find neighbours in; null: source, where no image finds itself"
    )
    train_labels: str | None = setting(None, "CSV or JSON file of the labels of train; null: its own")
    k: tuple[Count, ...] = setting((10, 20, 100, 200), "numbers of neighbours that vote")
    temperature: Positive = setting(0.07, "a neighbour's vote is exp(cosine / temperature)")
    shots: tuple[Count, ...] = setting((), "also classify by so many images of each class alone")
    repeats: Count = setting(5, "sets of such images for each number of shots")
    seed: CountOrZero = setting(0, "of the choice of these images")
    search: Search = setting("auto", "faiss, torch, or the faster one here; the results are the same")
    output: str | None = setting(None, "JSON to write; null: eval/knn.json of the run, or beside the weights")

    positional: ClassVar = ("source",)
    also_known_as: ClassVar = {
        **EvaluationConfig.also_known_as,
        "source": "images data data_path val queries",
        "train": "bank gallery train_data",
        "k": "nb_knn neighbours neighbors",
        "shots": "few_shot n_per_class",
        "repeats": "n_tries tries",
        "output": "output_file out",
    }


@dataclass(frozen=True)
class Labelled:
    """Features of images, (n, D), and their labels and places in the source, (n,)."""

    features: NDArray[Any]  # memory-mapped
    labels: NDArray[np.int64]
    keys: NDArray[np.int64]

    def __getitem__(self, rows: slice | NDArray[Any]) -> Labelled:
        return Labelled(self.features[rows], self.labels[rows], self.keys[rows])

    def __len__(self) -> int:
        return len(self.labels)


def run(config: KnnConfig) -> int:
    """Classify, print the tables and write the JSON."""
    with frozen_backbone(config) as frozen:
        path = results_path("knn", weights=config.weights, output=config.output)
        bank, queries, classes = _open(config, frozen)
        ranked = _classify(config, frozen, bank, queries, config.k)
        labels = torch.from_numpy(queries.labels)
        figures = [_figures(k, best, labels, classes) for k, best in ranked.items()]
        few = [_few_shot(config, frozen, bank, queries, shots) for shots in config.shots]
        if frozen.main:
            found = {"results": figures, "few_shot": [one for of_shots in few for one in of_shots]}
            write_results(path, {**_about(config, frozen, bank, queries, classes), **found})
            print("\n\n".join([*_tables(config, bank, queries, found), str(path)]))
    return 0


def _open(config: KnnConfig, frozen: FrozenBackbone) -> tuple[Labelled, Labelled, Sequence[str]]:
    """Return bank and queries, which are the same where one set is given, and the names of the classes."""
    if config.train is not None:
        sets = open_sets(
            config.source, labels=config.labels, train=config.train, train_labels=config.train_labels
        )
        bank = _features(frozen, sets.train, "features of train")
        return bank, _features(frozen, sets.val, "features of source"), sets.classes
    part, classes = open_part(config.source, config.labels)
    if len(set(part.targets.tolist())) < 2:
        raise ValueError(
            f"all labelled images of {config.source} are of one class, {classes[part.targets[0]]}: every "
            "answer would be right, which says nothing"
        )
    both = _features(frozen, part, "features")
    return both, both, classes


def _features(frozen: FrozenBackbone, part: LabelledSubset, title: str) -> Labelled:
    indices = None if part.whole else part.indices.tolist()
    stored = frozen.features(part.source, indices=indices, title=title)
    labels = part.targets[np.searchsorted(part.indices, stored.indices)]
    return Labelled(stored.values, labels, stored.indices)


def _classify(
    config: KnnConfig,
    frozen: FrozenBackbone,
    bank: Labelled,
    queries: Labelled,
    k: Sequence[int],
    title: str = "neighbours",
) -> dict[int, Tensor]:
    """Return the best classes of all queries, of which each process classifies a share."""
    first, last = (len(queries) * part // world_size() for part in (rank(), rank() + 1))
    with progress(title, last - first) as advance:
        ranked = weighted_knn(
            bank.features,
            torch.from_numpy(bank.labels),
            queries.features[first:last],
            k=k,
            temperature=config.temperature,
            own=first if queries is bank else None,
            search=config.search,
            device=frozen.device,
            progress=advance,
        )
    return {k: all_gather(best).cpu() for k, best in ranked.items()}


def _figures(k: int, best: Tensor, labels: Tensor, classes: Sequence[str]) -> dict[str, Any]:
    of_class = per_class_accuracy(best, labels)
    return {
        "k": k,
        "top1": top_k_accuracy(best, labels, 1)._asdict(),
        "top5": top_k_accuracy(best, labels, 5)._asdict(),
        "per_class": {classes[label]: one._asdict() for label, one in of_class.items()},
    }


def _few_shot(
    config: KnnConfig, frozen: FrozenBackbone, bank: Labelled, queries: Labelled, shots: int
) -> list[dict[str, Any]]:
    """Return, for each k, mean and deviation of the accuracies by a few images of each class."""
    found: dict[int, list[Accuracy]] = {}
    for repeat in range(config.repeats):
        rows = few_shot_rows(bank.labels, bank.keys, shots=shots, seed=config.seed, repeat=repeat)
        # In one set the others are the queries.
        asked = queries if queries is not bank else bank[np.delete(np.arange(len(bank)), rows)]
        if not len(asked):
            raise ValueError(f"shots={shots} takes all {len(bank)} images, and leaves none to classify")
        title = f"neighbours, {shots} shots, {repeat + 1} of {config.repeats}"
        possible = sorted({min(k, len(rows)) for k in config.k})
        for k, best in _classify(config, frozen, bank[rows], asked, possible, title).items():
            found.setdefault(k, []).append(top_k_accuracy(best, torch.from_numpy(asked.labels)))
    return [
        {
            "shots": shots,
            "k": k,
            "mean": mean(one.percent for one in top1),
            "standard_deviation": stdev([one.percent for one in top1]) if len(top1) > 1 else None,
            "top1": [one._asdict() for one in top1],
        }
        for k, top1 in found.items()
    ]


def _about(
    config: KnnConfig, frozen: FrozenBackbone, bank: Labelled, queries: Labelled, classes: Sequence[str]
) -> dict[str, Any]:
    """Return what the figures are of."""
    known = frozen.model.provenance
    assert known is not None, "loaded weights know where they are from"
    return {
        "weights": {
            "source": known.source,
            "sha256": known.sha256,
            "network": known.network,
            "step": known.step,
        },
        "settings": config.model_dump(mode="json"),
        "images": len(queries),
        "bank": len(bank) - (queries is bank),
        "classes": len(classes),
    }


def _tables(
    config: KnnConfig, bank: Labelled, queries: Labelled, found: dict[str, list[dict[str, Any]]]
) -> list[str]:
    """Return the tables as texts: by k, by shots, and by class for the first k."""
    where = "the others" if queries is bank else f"{len(bank):,} of {config.train}"
    tables = [f"{len(queries):,} images of {config.source} by their neighbours among {where}"]
    rows = [[str(one["k"]), _cell(one["top1"]), _cell(one["top5"])] for one in found["results"]]
    tables.append(_table(["k", "top-1 %", "top-5 %"], rows))
    if found["few_shot"]:
        rows = [
            [str(one["shots"]), str(one["k"]), f"{one['mean']:.2f}", _deviation(one["standard_deviation"])]
            for one in found["few_shot"]
        ]
        tables.append(_table(["shots", "k", "top-1 %", f"deviation of {config.repeats}"], rows))
    first = found["results"][0]
    classes = sorted(first["per_class"].items(), key=lambda item: item[1]["percent"])
    title = f"class, k={first['k']}" + (", the lowest" if len(classes) > _CLASSES_SHOWN else "")
    rows = [[name, _cell(one), f"{one['images']:,}"] for name, one in classes[:_CLASSES_SHOWN]]
    return [*tables, _table([title, "top-1 %", "images"], rows)]


def _cell(one: dict[str, Any]) -> str:
    return f"{one['percent']:.2f} ({one['low']:.2f} to {one['high']:.2f})"


def _deviation(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _table(head: list[str], rows: list[list[str]]) -> str:
    """Return columns: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = ([cell.rjust(width) for cell, width in zip(row, widths, strict=True)] for row in [head, *rows])
    return "\n".join("  ".join([line[0].strip().ljust(widths[0]), *line[1:]]) for line in lines)
