"""Classify images by their nearest neighbours on frozen features, and rank them: mAP and recall at 1."""

from collections.abc import Iterator, Sequence
from statistics import mean, stdev
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from dino_vit.commands import format_table
from dino_vit.commands.classification import Classification
from dino_vit.config.settings import Count, Few, NonEmpty, Positive, setting
from dino_vit.core import log
from dino_vit.core.distributed import all_gather, is_main_process, rank_slice
from dino_vit.core.text import plural, progress
from dino_vit.data.sources.source import spread
from dino_vit.eval.accuracy import (
    Accuracy,
    Predictions,
    accuracy,
    classification_results,
    describe_guess,
    measured_share,
    results_path,
    top_k_accuracy,
    write_results,
)
from dino_vit.eval.frozen import CachedConfig, frozen_backbone
from dino_vit.eval.knn import rank_all, weighted_knn
from dino_vit.eval.labelled import (
    LabelledFeatures,
    SupervisedConfig,
    few_shot_rows,
    given_sets,
    labelled_features,
)

_CLASSES_SHOWN = 20
_PAIRS_RANKED = 2**33  # of queries and bank images: more would take longer than the classification


class KnnConfig(SupervisedConfig, CachedConfig):
    """Classify images by their nearest neighbours, on features of a frozen backbone."""

    examples: ClassVar = ("knn photos weights=runs/demo", "knn val train=train weights=runs/demo")
    train: str | None = setting(
        None, "labelled images of the bank; null: the split train of source, or for each image the others"
    )
    k: NonEmpty[Count] = setting((10, 20, 100, 200), "numbers of neighbours")
    temperature: Positive = setting(0.07, "a neighbour's vote is exp(cosine / temperature)")
    shots: tuple[Count, ...] = setting(
        (), "also classify by only this many images per class, such as 1 and 5"
    )
    repeats: Few = setting(5, "random choices of the images for each of shots")
    output: str | None = setting(
        None, "JSON file; null: knn[-leave-one-out].json, in eval/ of the run or beside the weights"
    )


def run(config: KnnConfig) -> Classification:
    """Classify and write the JSON; the result's own figures are those of the first k."""
    frozen = frozen_backbone(config)
    train, val = given_sets(config)
    if train is None:  # each image is classified by the others
        name, among = "knn-leave-one-out", "the others"
        bank = queries = labelled_features(frozen, val)
    else:
        bank = labelled_features(frozen, train, title="features of the bank")
        queries = labelled_features(frozen, val, title="features of the query images")
        name, among = "knn", f"{len(bank):,} of {train.name}"
    classes = val.classes
    path = results_path(name, weights=config.weights, output=config.output)
    ranked = _classify(config, bank, queries, config.k, frozen.device)
    results: dict[str, Any] = {
        "weights": frozen.describe_weights(),
        "settings": config.model_dump(mode="json"),
        "images": len(queries),
        "bank": len(bank) - (queries is bank),  # no image is its own neighbour
        "classes": len(classes),
        "results": [
            {"k": k, **classification_results(of_k, queries.targets, classes)} for k, of_k in ranked.items()
        ],
        "ranking": _rank(bank, queries, frozen.device),
        "few_shot": list(_few_shot(config, bank, queries, frozen.device)),
    }
    if is_main_process():
        write_results(path, results)
    title = f"{len(queries):,} images of {val.name} by their neighbours among {among}"
    text = "\n\n".join([title, *_tables(config, results), str(path)])
    predicted = ranked[config.k[0]][:, 0].cpu().numpy()
    predictions = Predictions(queries.indices, predicted, queries.targets.cpu().numpy(), classes)
    best = results["results"][0]
    return Classification.of(best, predictions=predictions, path=path, details=results, text=text)


def _classify(
    config: KnnConfig,
    bank: LabelledFeatures,
    queries: LabelledFeatures,
    k: Sequence[int],
    device: torch.device,
    title: str = "neighbours",
) -> dict[int, Tensor]:
    """Return the best classes of all queries for each k; each process classifies a share of the queries."""
    mine = rank_slice(range(len(queries)))
    with progress(title, len(mine)) as advance:
        ranked = weighted_knn(
            bank.features,
            bank.targets,
            queries.features[mine.start : mine.stop],
            k=k,
            temperature=config.temperature,
            self_offset=mine.start if queries is bank else None,
            device=device,
            progress=advance,
        )
    return {k: all_gather(best).to(queries.targets.device) for k, best in ranked.items()}


def _rank(bank: LabelledFeatures, queries: LabelledFeatures, device: torch.device) -> dict[str, Any] | None:
    """Return mAP and recall at 1 of the queries with an image of their class in the bank, if there are any.

    Each query ranks the whole bank, or all other images, by cosine.
    """
    chosen = spread(len(queries), max(1, _PAIRS_RANKED // len(bank)))
    rows = torch.tensor(rank_slice(chosen), dtype=torch.long, device=queries.targets.device)
    with progress("ranking all images", len(rows)) as advance:
        ranking = rank_all(
            bank.features,
            bank.targets,
            queries.features[rows],
            queries.targets[rows],
            own_rows=rows if queries is bank else None,
            progress=advance,
        )
    precision, first = (all_gather(each.to(device)) for each in ranking)
    first, precision = first[~precision.isnan()], precision[~precision.isnan()]
    if not len(precision):
        return None
    mean = measured_share("mAP", np.arange(len(precision)), precision).interval
    recall = accuracy(int(first.sum()), len(first))
    return {"queries": len(chosen), "map": mean._asdict(), "recall_at_1": recall._asdict()}


def _few_shot(
    config: KnnConfig, bank: LabelledFeatures, queries: LabelledFeatures, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Yield, for each of `shots` and each k, the accuracies of all repeats, their mean and deviation."""
    targets = bank.targets.cpu().numpy()
    counts = np.unique(targets, return_counts=True)[1]
    for shots in config.shots:
        images = f"{plural(shots, 'image')} per class"
        if short := int((counts < shots).sum()):
            text = "%s: %s of %d with fewer, all of whose images are taken"
            log.warning(text, images, plural(short, "class", "classes"), len(counts))
        top1: dict[int, list[Accuracy]] = {}
        for repeat in range(config.repeats):
            rows = few_shot_rows(targets, bank.indices, shots, config.seed, repeat)
            # Without a bank of their own the queries are the images that were not chosen.
            rest = bank[np.delete(np.arange(len(bank)), rows)] if queries is bank else queries
            if not len(rest):
                raise ValueError(f"with {images}, all {len(bank)} are taken, which leaves none to classify")
            title = f"neighbours, {images}, {repeat + 1} of {config.repeats}"
            possible = sorted({min(k, len(rows)) for k in config.k})
            for k, ranked in _classify(config, bank[rows], rest, possible, device, title).items():
                top1.setdefault(k, []).append(top_k_accuracy(ranked, rest.targets))
        for k, of_k in top1.items():
            percents = [of_repeat.percent for of_repeat in of_k]
            yield {
                "shots": shots,
                "images": len(rows),
                "k": k,
                "mean": mean(percents),
                "standard_deviation": stdev(percents) if len(percents) > 1 else None,
                "top1": [of_repeat._asdict() for of_repeat in of_k],
            }


def _tables(config: KnnConfig, results: dict[str, Any]) -> list[str]:
    """Return the tables as texts: by k, by shots, and by class for the first k."""
    first = results["results"][0]
    rows = [[str(of_k["k"]), _cell(of_k["top1"]), _cell(of_k["top5"])] for of_k in results["results"]]
    lines = [format_table(["k", "top-1 %", "top-5 %"], rows), describe_guess(first)]
    if ranking := results["ranking"]:
        precision, recall = _cell(ranking["map"]), _cell(ranking["recall_at_1"])
        line = f"ranking all images by cosine: mAP {precision} %, recall at 1 {recall} %"
        if ranking["queries"] < results["images"]:
            line += f", of {ranking['queries']:,} of the {results['images']:,} images"
        lines.append(line)
    tables = ["\n".join(lines)]
    if results["few_shot"]:
        rows = []
        for few in results["few_shot"]:
            deviation = "-" if few["standard_deviation"] is None else f"{few['standard_deviation']:.2f}"
            counts = [f"{few[name]:,}" for name in ("shots", "images", "k")]
            rows.append([*counts, f"{few['mean']:.2f}", deviation])
        header = ["images per class", "images", "k", "top-1 %", f"std of {config.repeats}"]
        tables.append(format_table(header, rows))
    classes = sorted(first["per_class"].items(), key=lambda item: item[1]["percent"])[:_CLASSES_SHOWN]
    lowest = ", the lowest" if len(first["per_class"]) > _CLASSES_SHOWN else ""
    rows = [[name, _cell(of_class), f"{of_class['images']:,}"] for name, of_class in classes]
    return [*tables, format_table([f"class, k={first['k']}{lowest}", "top-1 %", "images"], rows)]


def _cell(figure: dict[str, Any]) -> str:
    return f"{figure['percent']:.2f} ({figure['low']:.2f} to {figure['high']:.2f})"
