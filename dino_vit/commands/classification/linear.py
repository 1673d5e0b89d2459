"""Linear classifiers on a frozen backbone: a grid of probes, logistic regressions, or the protocol of 2021.

The first two train on features that are computed once and cached: the CLS tokens of the last blocks, then the
mean patch token of the last block. Each head reads a contiguous range of these columns.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch

from dino_vit.commands import format_table
from dino_vit.commands.classification import Classification, Predictions
from dino_vit.commands.classification.robustness import draw_robustness, robustness_tables
from dino_vit.config.settings import Count, Few, NonEmpty, Positive, Problem, Settings, setting
from dino_vit.core import log
from dino_vit.core.distributed import is_main_process
from dino_vit.core.progress import progress
from dino_vit.eval.accuracy import (
    Accuracy,
    accuracy,
    classification_results,
    results_path,
    summary,
    write_results,
)
from dino_vit.eval.classification.datasets import (
    LabelledFeatures,
    hold_out,
    labelled_features,
    open_sets,
    open_subset,
)
from dino_vit.eval.classification.dino2021 import Dino2021, probe_features, read_probe, train_probe
from dino_vit.eval.classification.linear import (
    CS,
    RATES,
    LinearHeads,
    count_correct,
    grid_steps,
    sweep,
    sweep_each,
    top_classes,
    train_heads,
)
from dino_vit.eval.classification.robustness import (
    RobustnessConfig,
    check_corruptions,
    corrupted_rows,
    corruption_results,
    few_shot_banks,
    few_shot_result,
)
from dino_vit.eval.features.extraction import FeatureSpec
from dino_vit.eval.features.frozen import EvaluationConfig, FrozenBackbone, frozen_backbone
from dino_vit.models.backbone import Backbone

CONVERGED = 1e-4  # the largest gradient of a logistic regression that counts as the optimum

# Results for JSON, the text to print, and what the best classifier says of each image.
Evaluated = tuple[dict[str, Any], str, Predictions]


class ProbeGrid(Settings):
    """method=grid: one head for each learning rate and input, all trained side by side."""

    rates: NonEmpty[Positive] = setting(RATES, "learning rates at a batch of 256")
    blocks: NonEmpty[Few] = setting((1, 4), "read the CLS tokens of this many last blocks")
    mean: NonEmpty[bool] = setting((False, True), "without and with the mean patch token")
    steps: Count | None = setting(None, "of SGD; null: ten epochs, but at least 1,250 and at most 12,500")
    batch: Count = setting(1024, "images per step; all images if there are fewer")


class Logistic(Settings):
    """method=logistic: the optimum for each strength of the penalty."""

    cs: NonEmpty[Positive] = setting(CS, "inverse strengths of the penalty")
    blocks: Few = setting(1, "read the CLS tokens of this many last blocks")
    mean: bool = setting(False, "also read the mean patch token")
    iterations: Count = setting(1000, "maximum iterations of L-BFGS for each C")


class LinearConfig(RobustnessConfig, EvaluationConfig):
    """Train linear classifiers on a frozen backbone, and report their accuracy."""

    method: Literal["grid", "logistic", "dino2021"] = setting("grid", "how the classifiers are trained")
    select: Literal["source", "train"] = setting(
        "source", "choose the best head on source, as published, or on a held-out tenth of train"
    )
    output: str | None = setting(
        None, "JSON file; null: linear[-METHOD][-held-out].json, in eval/ of the run or beside the weights"
    )
    grid: ProbeGrid = ProbeGrid()
    logistic: Logistic = Logistic()
    dino2021: Dino2021 = Dino2021()

    def contradictions(self) -> Iterator[Problem]:
        yield from super().contradictions()
        if self.method != "logistic" and (self.shots or self.shares):
            text = (
                "few images are classified by logistic regression: set method=logistic for shots and shares"
            )
            yield Problem(text, ("method", "shots", "shares"))
        if self.method == "dino2021" and self.corruptions:
            text = "corruptions needs the cached features of method=grid or logistic, not dino2021"
            yield Problem(text, ("method", "corruptions"))


def run(config: LinearConfig) -> Classification:
    """Train and evaluate, and write the JSON; the result's own figures are those of the best classifier."""
    frozen = frozen_backbone(config)
    check_corruptions(config, frozen)
    method = "" if config.method == "grid" else f"-{config.method}"
    held_out = "-held-out" if config.select == "train" and config.method != "dino2021" else ""
    path = results_path(f"linear{method}{held_out}", weights=config.weights, output=config.output)
    if config.method == "dino2021":
        results, text, predictions = _run_dino2021(config, frozen, path.with_suffix(".pth"))
    else:
        results, text, predictions = _train_on_features(config, frozen)
    other_methods = {"grid", "logistic", "dino2021"} - {config.method}
    settings = config.model_dump(mode="json", exclude=other_methods)
    metadata = {"method": config.method, "weights": frozen.describe_weights(), "settings": settings}
    details = {**metadata, **results}
    if is_main_process():
        write_results(path, details)
    best = results.get("best", results)
    tables = robustness_tables(config, results, "C")
    drawn = draw_robustness(results, path)
    text = "\n\n".join([text, *tables]) + "".join(f"\n{one}" for one in [path, *drawn])
    return Classification.of(best, predictions=predictions, path=path, details=details, text=text)


def _train_on_features(config: LinearConfig, frozen: FrozenBackbone) -> Evaluated:
    """Train heads on cached features, evaluate all of them and choose the best."""
    sets = open_sets(config)
    inputs = _inputs(config, frozen.model)
    with_mean = any(spec.tokens == "cls+mean" for spec in inputs)
    blocks = max(spec.blocks for spec in inputs)
    cached = FeatureSpec(tokens="cls+mean" if with_mean else "cls", blocks=blocks)
    train = labelled_features(frozen, sets.train, cached, "training features")
    val = labelled_features(frozen, sets.val, cached, "evaluation features")
    train, chosen_on = hold_out(train, config.seed) if config.select == "train" else (train, val)
    columns = [spec.columns_in(cached, frozen.model.width) for spec in inputs]
    values: Sequence[float]
    if config.method == "grid":
        setting, values = "rate", config.grid.rates
        heads, notes = _train_grid(config, train, columns, len(sets.classes), frozen.device)
    else:
        setting, values = "C", sorted(config.logistic.cs)
        heads, notes = _fit_logistic(config, train, columns[0], len(sets.classes), frozen.device)

    top1 = _top1(heads, val)
    chosen_by = top1 if config.select == "source" else _top1(heads, chosen_on)
    cells: list[dict[str, Any]] = []
    for (value, spec), one, by in zip(product(values, inputs), top1, chosen_by, strict=True):
        mean = spec.tokens == "cls+mean"
        cells.append({setting: value, "blocks": spec.blocks, "mean": mean, "top1": one._asdict()})
        if config.select == "train":
            cells[-1]["held_out"] = by._asdict()
    best = max(range(len(cells)), key=lambda index: chosen_by[index].correct)
    row, column = divmod(best, len(inputs))
    accuracies, predictions = _evaluate_head(heads[column], val, sets.classes, head=row)
    line = summary(accuracies, len(sets.classes))
    results: dict[str, Any] = {
        "images": {"train": len(train), "val": len(val)},
        "chosen_on": config.select,
        "classes": len(sets.classes),
        "best": cells[best] | accuracies,
        "table": cells,
        "notes": notes,
    }
    if config.method == "logistic":
        few = _few_shot(config, train, [chosen_on, val], len(sets.classes), columns[0], frozen.device)
        results["few_shot"] = list(few)
    if config.corruptions:
        results["corruptions"] = corruption_results(
            config,
            frozen,
            val[corrupted_rows(config, val)],
            sets.val,
            lambda asked, _: top_classes(heads[column], asked.features, head=row, k=1)[:, 0],
            cached,
        )
    text = [
        f"top-1 in %, trained on {len(train):,} images",
        _table(setting, values, inputs, top1, best),
        f"* best, {setting} {values[row]:.3g}, {inputs[column].title}: {line}",
        _how_chosen(config, len(chosen_on), chosen_by[best]),
        *notes,
    ]
    return results, "\n".join(text), predictions


def _how_chosen(config: LinearConfig, images: int, by: Accuracy) -> str:
    """Say which images the best head was chosen on."""
    if config.select == "train":
        return f"chosen on {images:,} training images that no head was trained on: {by}"
    return (
        "chosen on the images that it is evaluated on, as published, which is slightly optimistic; "
        "select=train chooses on a tenth of the training images"
    )


def _inputs(config: LinearConfig, model: Backbone) -> list[FeatureSpec]:
    """Return what the heads read; a backbone with fewer blocks, or without patches, gives all it has."""
    depth = model.depth
    if config.method == "grid":
        blocks, means = config.grid.blocks, config.grid.mean
    else:
        blocks, means = (config.logistic.blocks,), (config.logistic.mean,)
    if beyond := [count for count in blocks if count > depth]:
        log.warning("the backbone has only %d blocks: all of them are read for blocks=%s", depth, beyond)
    if not model.has_patches and any(means):
        log.warning("the backbone has no patches whose mean could be read: CLS is read alone")
        means = (False,)
    counts = dict.fromkeys(min(count, depth) for count in blocks)
    return [
        FeatureSpec(tokens="cls+mean" if mean else "cls", blocks=count)
        for count, mean in product(counts, dict.fromkeys(means))
    ]


def _train_grid(
    config: LinearConfig,
    train: LabelledFeatures,
    columns: Sequence[slice],
    classes: int,
    device: torch.device,
) -> tuple[list[LinearHeads], list[str]]:
    grid, batch = config.grid, min(config.grid.batch, len(train))
    steps = grid.steps or grid_steps(len(train), batch)
    heads = train_heads(
        train.features,
        train.targets,
        columns=columns,
        rates=[rate * batch / 256 for rate in grid.rates],
        classes=classes,
        steps=steps,
        batch_size=batch,
        seed=config.seed,
        device=device,
    )
    return heads, [f"{steps:,} steps of {batch:,} images; rates are for 256 images and scale with the batch"]


def _fit_logistic(
    config: LinearConfig, train: LabelledFeatures, columns: slice, classes: int, device: torch.device
) -> tuple[list[LinearHeads], list[str]]:
    """Fit every C in every process: each fit starts from the previous one, so they cannot be shared."""
    iterations = config.logistic.iterations
    features, targets = train.features[:, columns].to(device, torch.float32), train.targets.to(device)
    fits = []
    with progress("Fitting logistic regressions", len(config.logistic.cs)) as advance:
        for fit in sweep(
            features, targets, cs=config.logistic.cs, classes=classes, max_iterations=iterations
        ):
            fits.append(fit)
            advance(1, f"C = {fit.c:.1e}: {fit.iterations} iterations")
    weight, bias = torch.cat([fit.head.weight for fit in fits]), torch.cat([fit.head.bias for fit in fits])
    unfinished = ", ".join(f"{fit.c:.1e}" for fit in fits if fit.gradient > CONVERGED)
    notes = [f"not at the optimum after {iterations:,} iterations: C = {unfinished}"] if unfinished else []
    return [LinearHeads(weight, bias, columns)], notes


def _few_shot(
    config: LinearConfig,
    train: LabelledFeatures,
    judged: Sequence[LabelledFeatures],
    classes: int,
    columns: slice,
    device: torch.device,
) -> Iterator[dict[str, Any]]:
    """Yield the accuracies on the second of `judged`, for the C that is best on the first on average."""
    cs, iterations = sorted(config.logistic.cs), config.logistic.iterations
    fit_on, *sets = [(each.features[:, columns], each.targets) for each in (train, *judged)]
    for few, banks in few_shot_banks(config, train):
        correct = sweep_each(
            fit_on,
            banks,
            sets,
            cs=cs,
            classes=classes,
            max_iterations=iterations,
            device=device,
            title=f"Fitting logistic regressions, {few}",
        )
        best = int(correct[:, 0].sum(dim=0).argmax())
        top1 = [accuracy(count, len(judged[1])) for count in correct[:, 1, best].tolist()]
        yield few_shot_result(few, {"C": cs[best]}, top1)


def _top1(heads: Sequence[LinearHeads], images: LabelledFeatures) -> list[Accuracy]:
    """Return the accuracy of every head: for each rate or C that of each input."""
    correct = [count_correct(each, images.features, images.targets) for each in heads]
    return [accuracy(count, len(images)) for count in torch.stack(correct, dim=1).flatten().tolist()]


def _table(
    setting: str, values: Sequence[float], inputs: Sequence[FeatureSpec], top1: Sequence[Accuracy], best: int
) -> str:
    """Return a table with a row for each rate or C and a column for each input."""
    cells = [f"{one.percent:.2f}{'*' if index == best else ' '}" for index, one in enumerate(top1)]
    width = len(inputs)
    rows = [[f"{value:.3g}", *cells[row * width : (row + 1) * width]] for row, value in enumerate(values)]
    return format_table([setting, *(spec.title for spec in inputs)], rows)


def _evaluate_head(
    heads: LinearHeads, val: LabelledFeatures, classes: Sequence[str], *, head: int = 0
) -> tuple[dict[str, Any], Predictions]:
    """Return the top-1, top-5 and per-class accuracy of one head, and its predictions."""
    ranked = top_classes(heads, val.features, head=head)
    targets = val.targets.to(ranked.device)
    return classification_results(ranked, targets, classes), Predictions.of(
        ranked, targets, val.indices, classes
    )


def _run_dino2021(config: LinearConfig, frozen: FrozenBackbone, path: Path) -> Evaluated:
    """Train one head as in 2021 and write it to `path`, or evaluate the one in a file."""
    settings, text = config.dino2021, ""
    training: dict[str, Any] = {"probe": settings.probe or str(path)}
    if settings.probe:
        subset = open_subset(config.source, config.labels)
        head, classes = read_probe(settings.probe, frozen, settings), tuple(subset.source.classes)
        if (known := head.bias.shape[1]) != len(classes):
            raise ValueError(
                f"{settings.probe} has {known} classes, but {config.source} has {len(classes)}; give images "
                "with the classes that it was trained on, one folder for each"
            )
        val = probe_features(frozen, subset, settings)
    else:
        sets = open_sets(config)
        classes, val = sets.classes, probe_features(frozen, sets.val, settings)
        head, percents = train_probe(sets, val, frozen, settings, seed=config.seed, path=path)
        training["percents"], best = percents, max(percents)
        text = (
            f"\ntrained on {len(sets.train):,} images for {settings.epochs} epochs; best after epoch "
            f"{percents.index(best) + 1}: {best:.2f} %, which is what the 2021 code reports\n{path}"
        )
    accuracies, predictions = _evaluate_head(head, val, classes)
    results = {"images": len(val), "classes": len(classes), **accuracies, **training}
    return results, summary(accuracies, len(classes)) + text, predictions
