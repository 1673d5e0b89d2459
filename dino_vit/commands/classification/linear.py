"""Linear classifiers on a frozen backbone: a grid of probes, logistic regressions, or the protocol of 2021.

The first two train on features that are computed once and cached: the CLS tokens of the last blocks, then the
mean patch token of the last block. Each head reads a contiguous range of these columns.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from dino_vit.commands import format_table
from dino_vit.commands.classification import Classification
from dino_vit.commands.classification.dino2021 import Dino2021, probe_features, train_probe
from dino_vit.config.settings import Count, Few, NonEmpty, Positive, Settings, setting
from dino_vit.core import log
from dino_vit.core.distributed import is_main_process
from dino_vit.core.text import plural, progress
from dino_vit.eval.accuracy import (
    Accuracy,
    Predictions,
    accuracy,
    classification_results,
    results_path,
    summary,
    write_results,
)
from dino_vit.eval.features import CLS, FeatureSpec, FrozenBackbone
from dino_vit.eval.frozen import CachedConfig, frozen_backbone
from dino_vit.eval.labelled import (
    LabelledFeatures,
    SupervisedConfig,
    hold_out,
    labelled_features,
    open_sets,
)
from dino_vit.eval.linear import (
    CS,
    RATES,
    LinearHeads,
    count_correct,
    grid_steps,
    join_heads,
    sweep,
    top_classes,
    train_heads,
)
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
    """method=logistic: the optimum for each strength of the penalty, on the CLS token."""

    cs: NonEmpty[Positive] = setting(CS, "inverse strengths of the penalty")


class LinearConfig(SupervisedConfig, CachedConfig):
    """Train linear classifiers on a frozen backbone, and report their accuracy."""

    examples: ClassVar = (
        "linear photos/val train=photos/train weights=runs/pretrain",
        "linear photos weights=runs/pretrain method=logistic",
    )
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

    def contradictions(self) -> Iterator[str]:
        if self.method == "dino2021" and self.dino2021.mean and self.dino2021.blocks != 1:
            text = f"dino2021.mean=true needs dino2021.blocks=1, not {self.dino2021.blocks}"
            yield text


def run(config: LinearConfig) -> Classification:
    """Train and evaluate, and write the JSON; the result's own figures are those of the best classifier."""
    frozen = frozen_backbone(config)
    method = "" if config.method == "grid" else f"-{config.method}"
    held_out = "-held-out" if config.select == "train" and config.method != "dino2021" else ""
    path = results_path(f"linear{method}{held_out}", weights=config.weights, output=config.output)
    if config.method == "dino2021":
        results, text, predictions = _train_on_views(config, frozen, path.with_suffix(".pth"))
    else:
        results, text, predictions = _train_on_features(config, frozen)
    settings = config.model_dump(mode="json", exclude={"grid", "logistic", "dino2021"} - {config.method})
    weights = frozen.describe_weights()
    details = {"method": config.method, "weights": weights, "settings": settings, **results}
    if is_main_process():
        write_results(path, details)
    best = results.get("best", results)
    return Classification.of(
        best, predictions=predictions, path=path, details=details, text=f"{text}\n{path}"
    )


def _train_on_features(config: LinearConfig, frozen: FrozenBackbone) -> Evaluated:
    """Train heads on cached features, evaluate all of them and choose the best."""
    train_set, val_set = open_sets(config)
    inputs, device = _inputs(config, frozen.model), frozen.device
    with_mean, blocks = any(spec.with_mean for spec in inputs), max(spec.blocks for spec in inputs)
    cached = FeatureSpec(tokens="cls+mean" if with_mean else "cls", blocks=blocks)
    train = labelled_features(frozen, train_set, cached, "training features")
    val = labelled_features(frozen, val_set, cached, "evaluation features")
    train, chosen_on = hold_out(train, config.seed) if config.select == "train" else (train, val)
    columns = [spec.columns_in(cached, frozen.model.width) for spec in inputs]
    classes = len(train_set.classes)
    values: Sequence[float]
    if config.method == "grid":
        setting, values = "rate", config.grid.rates
        heads = _train_grid(config, train, columns, classes, device)
    else:
        setting, values = "C", sorted(config.logistic.cs)
        heads = _fit_logistic(config, train, classes, device)
    top1 = _top1(heads, val)
    chosen_by = top1 if config.select == "source" else _top1(heads, chosen_on)
    cells: list[dict[str, Any]] = []
    for (value, spec), on_val, on_held_out in zip(product(values, inputs), top1, chosen_by, strict=True):
        cells.append(
            {setting: value, "blocks": spec.blocks, "mean": spec.with_mean, "top1": on_val._asdict()}
        )
        if config.select == "train":
            cells[-1]["held_out"] = on_held_out._asdict()
    best = max(range(len(cells)), key=lambda index: chosen_by[index].correct)
    row, column = divmod(best, len(inputs))
    accuracies, predictions = _evaluate_head(heads[column], val, train_set.classes, head=row)
    results: dict[str, Any] = {
        "images": {"train": len(train), "val": len(val)},
        "chosen_on": config.select,
        "classes": classes,
        "best": cells[best] | accuracies,
        "table": cells,
    }
    how_chosen = (
        "chosen on the images that it is evaluated on, as published, which is slightly optimistic; "
        "select=train chooses on a tenth of the training images"
    )
    if config.select == "train":
        images = f"{len(chosen_on):,} training images that no head was trained on"
        how_chosen = f"chosen on {images}: {chosen_by[best]}"
    text = [
        f"top-1 in %, trained on {len(train):,} images",
        _table(setting, values, inputs, top1, best),
        f"* best, {setting} {values[row]:.3g}, {inputs[column].title}: {summary(accuracies, classes)}",
        how_chosen,
    ]
    return results, "\n".join(text), predictions


def _inputs(config: LinearConfig, model: Backbone) -> list[FeatureSpec]:
    """Return what the heads read; a backbone with fewer blocks, or without patches, gives all it has."""
    if config.method == "logistic":
        return [CLS]
    counts = dict.fromkeys(min(count, model.depth) for count in config.grid.blocks)
    means = dict.fromkeys(mean and model.has_patches for mean in config.grid.mean)
    return [
        FeatureSpec(tokens="cls+mean" if mean else "cls", blocks=count)
        for count, mean in product(counts, means)
    ]


def _train_grid(
    config: LinearConfig,
    train: LabelledFeatures,
    columns: Sequence[slice],
    classes: int,
    device: torch.device,
) -> list[LinearHeads]:
    grid, batch = config.grid, min(config.grid.batch, len(train))
    steps = grid.steps or grid_steps(len(train), batch)
    log.info("%d steps of %d images; rates are for 256 images and scale with the batch", steps, batch)
    return train_heads(
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


def _fit_logistic(
    config: LinearConfig, train: LabelledFeatures, classes: int, device: torch.device
) -> list[LinearHeads]:
    """Fit every C in every process: each fit starts from the previous one, so they cannot be shared."""
    features, targets = train.features.to(device, torch.float32), train.targets.to(device)
    fits = []
    with progress("Fitting logistic regressions", len(config.logistic.cs)) as advance:
        for fit in sweep(features, targets, cs=config.logistic.cs, classes=classes):
            fits.append(fit)
            advance(1, f"C = {fit.c:.1e}")
    if unfinished := [f"{fit.c:.1e}" for fit in fits if fit.gradient > CONVERGED]:
        log.warning("L-BFGS did not reach the optimum for C = %s", ", ".join(unfinished))
    return [join_heads(fits)]


def _top1(heads: Sequence[LinearHeads], images: LabelledFeatures) -> list[Accuracy]:
    """Return the accuracy of every head: for each rate or C that of each input."""
    correct = [count_correct(each, images.features, images.targets) for each in heads]
    return [accuracy(count, len(images)) for count in torch.stack(correct, dim=1).flatten().tolist()]


def _table(
    setting: str, values: Sequence[float], inputs: Sequence[FeatureSpec], top1: Sequence[Accuracy], best: int
) -> str:
    """Return a table with a row for each rate or C and a column for each input."""
    cells = [f"{of_head.percent:.2f}{'*' if index == best else ' '}" for index, of_head in enumerate(top1)]
    width = len(inputs)
    rows = [[f"{value:.3g}", *cells[row * width : (row + 1) * width]] for row, value in enumerate(values)]
    return format_table([setting, *(spec.title for spec in inputs)], rows)


def _evaluate_head(
    heads: LinearHeads, val: LabelledFeatures, classes: Sequence[str], *, head: int = 0
) -> tuple[dict[str, Any], Predictions]:
    """Return the top-1, top-5 and per-class accuracy of one head, and its predictions."""
    ranked = top_classes(heads, val.features, head=head)
    targets = val.targets.to(ranked.device)
    predicted = ranked[:, 0].cpu().numpy()
    predictions = Predictions(val.indices, predicted, targets.cpu().numpy(), tuple(classes))
    return classification_results(ranked, targets, classes), predictions


def _train_on_views(config: LinearConfig, frozen: FrozenBackbone, path: Path) -> Evaluated:
    """Train one head as in 2021 and write it to `path`."""
    settings, (train_set, val_set) = config.dino2021, open_sets(config)
    val = probe_features(frozen, val_set, settings)
    head, percents = train_probe(train_set, val_set, val, frozen, settings, seed=config.seed, path=path)
    accuracies, predictions = _evaluate_head(head, val, val_set.classes)
    classes, best = len(val_set.classes), max(percents)
    counts = {"images": len(val), "classes": classes}
    text = (
        f"{summary(accuracies, classes)}\n"
        f"trained on {len(train_set):,} images for {plural(settings.epochs, 'epoch')}; best after "
        f"epoch {percents.index(best) + 1}: {best:.2f} %, which is what the 2021 code reports\n{path}"
    )
    return {**counts, **accuracies, "head": str(path), "percents": percents}, text, predictions
