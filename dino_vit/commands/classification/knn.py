"""Evaluate a frozen backbone by weighted k-NN classification: top-1, top-5 and per class."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from dino_vit.commands import format_table
from dino_vit.commands.classification import Classification, Predictions
from dino_vit.commands.classification.robustness import draw_robustness, robustness_tables
from dino_vit.config.settings import Count, NonEmpty, Positive, setting
from dino_vit.core.distributed import all_gather, is_main_process, share
from dino_vit.core.progress import progress
from dino_vit.eval.accuracy import (
    Accuracy,
    classification_results,
    describe_guess,
    results_path,
    top_k_accuracy,
    write_results,
)
from dino_vit.eval.classification.datasets import (
    LabelledFeatures,
    LabelledSubset,
    labelled_features,
    sets_or_images,
)
from dino_vit.eval.classification.knn import weighted_knn
from dino_vit.eval.classification.robustness import (
    RobustnessConfig,
    check_corruptions,
    corrupted_rows,
    corruption_results,
    few_shot_banks,
    few_shot_result,
)
from dino_vit.eval.features.frozen import EvaluationConfig, FrozenBackbone, frozen_backbone
from dino_vit.eval.neighbours import Search

_CLASSES_SHOWN = 20


class KnnConfig(RobustnessConfig, EvaluationConfig):
    """Classify images by their nearest neighbours, on features of a frozen backbone."""

    train: str | None = setting(
        None, "labelled images of the bank; null: the split train of source, or for each image the others"
    )
    k: NonEmpty[Count] = setting((10, 20, 100, 200), "numbers of neighbours")
    temperature: Positive = setting(0.07, "a neighbour's vote is exp(cosine / temperature)")
    search: Search = setting("auto", "faiss or torch, equal up to rounding; auto: the faster one here")
    output: str | None = setting(
        None, "JSON file; null: knn[-leave-one-out].json, in eval/ of the run or beside the weights"
    )


def run(config: KnnConfig) -> Classification:
    """Classify and write the JSON; the result's own figures are those of the first k."""
    frozen = frozen_backbone(config)
    check_corruptions(config, frozen)
    sets = sets_or_images(config)
    if isinstance(sets, LabelledSubset):  # each image is classified by the others
        name, bank_name, queries_name = "knn-leave-one-out", None, config.source
        bank = queries = labelled_features(frozen, sets)
        asked = sets
        classes = tuple(sets.source.classes)
    else:
        name, bank_name, queries_name = "knn", sets.train_name, sets.val_name
        bank = labelled_features(frozen, sets.train, title="features of the bank")
        queries = labelled_features(frozen, sets.val, title="features of the query images")
        classes, asked = sets.classes, sets.val
    path = results_path(name, weights=config.weights, output=config.output)
    ranked = _classify(config, frozen, bank, queries, config.k, own=queries is bank)
    results: dict[str, Any] = {
        "weights": frozen.describe_weights(),
        "settings": config.model_dump(mode="json"),
        "images": len(queries),
        "bank": len(bank) - (queries is bank),  # no image is its own neighbour
        "classes": len(classes),
        "results": [
            {"k": k, **classification_results(of_k, queries.targets, classes)} for k, of_k in ranked.items()
        ],
        "few_shot": list(_few_shot(config, frozen, bank, queries)),
    }
    if config.corruptions:
        results["corruptions"] = _corrupted(config, frozen, bank, queries, asked)
    if is_main_process():
        write_results(path, results)
    drawn = draw_robustness(results, path)
    others = f"{results['bank']:,} of {bank_name}" if bank_name else "the others"
    title = f"{len(queries):,} images of {queries_name} by their neighbours among {others}"
    text = "\n\n".join([title, *_tables(config, results), "\n".join(map(str, [path, *drawn]))])
    predictions = Predictions.of(ranked[config.k[0]], queries.targets, queries.indices, classes)
    return Classification.of(
        results["results"][0], predictions=predictions, path=path, details=results, text=text
    )


def _classify(
    config: KnnConfig,
    frozen: FrozenBackbone,
    bank: LabelledFeatures,
    queries: LabelledFeatures,
    k: Sequence[int],
    title: str = "neighbours",
    own: bool = False,
) -> dict[int, Tensor]:
    """Return the best classes of all queries for each k; each process classifies a share of the queries.

    With `own`, query i is row i of the bank and does not find itself.
    """
    mine = share(range(len(queries)))
    with progress(title, len(mine)) as advance:
        ranked = weighted_knn(
            bank.features,
            bank.targets,
            queries.features[mine.start : mine.stop],
            k=k,
            temperature=config.temperature,
            own=mine.start if own else None,
            search=config.search,
            device=frozen.device,
            progress=advance,
        )
    return {k: all_gather(best).to(queries.targets.device) for k, best in ranked.items()}


def _few_shot(
    config: KnnConfig, frozen: FrozenBackbone, bank: LabelledFeatures, queries: LabelledFeatures
) -> Iterator[dict[str, Any]]:
    """Yield, for each size of the bank and each k, the mean and deviation of the accuracies."""
    for few, banks in few_shot_banks(config, bank):
        top1: dict[int, list[Accuracy]] = {}
        for repeat, rows in enumerate(banks):
            # Without `train` the queries are the images that were not chosen.
            asked = bank[np.delete(np.arange(len(bank)), rows)] if queries is bank else queries
            if not len(asked):
                raise ValueError(f"with {few}, all {len(bank)} are taken, which leaves none to classify")
            title = f"neighbours, {few}, {repeat + 1} of {config.repeats}"
            possible = sorted({min(k, len(rows)) for k in config.k})
            for k, ranked in _classify(config, frozen, bank[rows], asked, possible, title).items():
                top1.setdefault(k, []).append(top_k_accuracy(ranked, asked.targets))
        for k, of_k in top1.items():
            yield few_shot_result(few, {"k": k}, of_k)


def _corrupted(
    config: KnnConfig,
    frozen: FrozenBackbone,
    bank: LabelledFeatures,
    queries: LabelledFeatures,
    images: LabelledSubset,
) -> dict[str, Any]:
    """Return the accuracies of the first k on corrupted query images; the bank stays clean."""
    rows = corrupted_rows(config, queries)
    own = queries is bank
    if own:  # the corrupted images first, so that none is classified by itself
        bank = bank[np.concatenate([rows, np.delete(np.arange(len(bank)), rows)])]

    def classify(asked: LabelledFeatures, title: str) -> Tensor:
        return _classify(config, frozen, bank, asked, config.k[:1], title, own)[config.k[0]][:, 0]

    return {"k": config.k[0], **corruption_results(config, frozen, queries[rows], images, classify)}


def _tables(config: KnnConfig, results: dict[str, Any]) -> list[str]:
    """Return the tables as texts: by k, by shots, and by class for the first k."""
    rows = [[str(one["k"]), _cell(one["top1"]), _cell(one["top5"])] for one in results["results"]]
    tables = [f"{format_table(['k', 'top-1 %', 'top-5 %'], rows)}\n{describe_guess(results['results'][0])}"]
    tables += robustness_tables(config, results, "k")
    first = results["results"][0]
    classes = sorted(first["per_class"].items(), key=lambda item: item[1]["percent"])
    title = f"class, k={first['k']}" + (", the lowest" if len(classes) > _CLASSES_SHOWN else "")
    rows = [[name, _cell(one), f"{one['images']:,}"] for name, one in classes[:_CLASSES_SHOWN]]
    return [*tables, format_table([title, "top-1 %", "images"], rows)]


def _cell(one: dict[str, Any]) -> str:
    return f"{one['percent']:.2f} ({one['low']:.2f} to {one['high']:.2f})"
