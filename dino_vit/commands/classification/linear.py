"""Linear classifiers on a frozen backbone: a grid of probes, logistic regressions, or the protocol of 2021.

The first two train on features that are computed once and cached: the CLS tokens of the last blocks, then the
mean patch token of the last block. Each head reads a contiguous range of these columns.
"""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch

from dino_vit.commands import format_table
from dino_vit.commands.classification import Classification, classification
from dino_vit.commands.classification.dino2021 import train_on_views
from dino_vit.config.commands import LinearConfig
from dino_vit.core import log
from dino_vit.core.text import plural, progress
from dino_vit.eval.accuracy import Accuracy, Predictions, accuracy
from dino_vit.eval.features import FrozenBackbone
from dino_vit.eval.frozen import frozen_backbone
from dino_vit.eval.labelled import LabelledFeatures, LabelledSubset, hold_out, labelled_features, open_sets
from dino_vit.eval.linear import (
    LinearHeads,
    count_correct,
    grid_steps,
    join_heads,
    sweep,
    top_classes,
    train_heads,
)
from dino_vit.models.tokens import CLS, FeatureSpec, simple_specs

BATCH = 1024  # images per step of a grid
CONVERGED = 1e-4  # the largest gradient of a logistic regression that counts as the optimum


def run(config: LinearConfig) -> Classification:
    """Train and evaluate; with an output, write the JSON. The figures are those of the best classifier."""
    return evaluate(config, frozen_backbone(config))


def evaluate(config: LinearConfig, frozen: FrozenBackbone) -> Classification:
    """Do the same with a backbone that is loaded already."""
    train, val = open_sets(config)
    if config.method == "dino2021":
        if config.output is None:
            raise ValueError("method=dino2021 needs output=FILE.json: the head and its state go beside it")
        head = Path(config.output).with_suffix(".pth")
        results, text, predictions = train_on_views(config.dino2021, frozen, train, val, config.seed, head)
    else:
        results, text, predictions = _train_on_features(config, frozen, train, val)
    settings = config.model_dump(mode="json", exclude={"grid", "logistic", "dino2021"} - {config.method})
    weights = frozen.describe_weights()
    details = {"method": config.method, "weights": weights, "settings": settings, **results}
    return classification("linear", config.output, "linear top-1", predictions, details, text)


def _train_on_features(
    config: LinearConfig, frozen: FrozenBackbone, train_set: LabelledSubset, val_set: LabelledSubset
) -> tuple[dict[str, Any], str, Predictions]:
    """Train heads on cached features, evaluate all of them and choose the best."""
    inputs = sorted(simple_specs(frozen.model), key=lambda spec: spec.blocks)
    if config.method == "logistic":
        inputs = [CLS]
    train = labelled_features(frozen, train_set, inputs[-1], "training features")
    val = labelled_features(frozen, val_set, inputs[-1], "evaluation features")
    train, chosen_on = hold_out(train, config.seed) if config.select == "train" else (train, val)
    values: Sequence[float]
    if config.method == "grid":
        setting, values = "rate", config.grid.rates
        columns = [spec.columns_in(inputs[-1], frozen.model.width) for spec in inputs]
        heads = _train_grid(config, train, columns, frozen.device)
    else:
        setting, values = "C", sorted(config.logistic.cs)
        heads = [_fit_logistic(values, train, frozen.device)]
    top1 = _top1(heads, val)
    chosen_by = top1 if chosen_on is val else _top1(heads, chosen_on)
    cells: list[dict[str, Any]] = [
        {setting: value, "blocks": spec.blocks, "mean": spec.with_mean, "top1": of_head}
        for (value, spec), of_head in zip(product(values, inputs), top1, strict=True)
    ]
    best = max(range(len(cells)), key=lambda index: chosen_by[index].correct)
    how_chosen = (
        "chosen on the images that it is evaluated on, as published: slightly optimistic; "
        "select=train chooses on a tenth of the training images"
    )
    if config.select == "train":
        for cell, on_held_out in zip(cells, chosen_by, strict=True):
            cell["held_out"] = on_held_out
        images = f"{plural(len(chosen_on), 'training image')} that no head was trained on"
        how_chosen = f"chosen on {images}: {chosen_by[best]} %"
    row, column = divmod(best, len(inputs))
    predictions = val.predictions(top_classes(heads[column], val.features, head=row))
    results = {
        "images": {"train": len(train), "val": len(val)},
        "chosen_on": config.select,
        "classes": len(val.classes),
        "best": cells[best] | predictions.figures(),
        "table": cells,
    }
    text = [
        f"per cent, on {plural(len(val), 'image')}, trained on {len(train):,}",
        _table(setting, values, inputs, top1, best),
        f"* best, {setting} {values[row]:.3g}, {inputs[column].title}: {predictions.summary()}",
        how_chosen,
    ]
    return results, "\n".join(text), predictions


def _train_grid(
    config: LinearConfig, train: LabelledFeatures, columns: Sequence[slice], device: torch.device
) -> list[LinearHeads]:
    batch = min(BATCH, len(train))
    steps = config.grid.steps or grid_steps(len(train), batch)
    log.info("%d steps of %d images; rates are for 256 images and scale with the batch", steps, batch)
    return train_heads(
        train.features,
        train.targets,
        columns=columns,
        rates=[rate * batch / 256 for rate in config.grid.rates],
        classes=len(train.classes),
        steps=steps,
        batch_size=batch,
        seed=config.seed,
        device=device,
    )


def _fit_logistic(cs: Sequence[float], train: LabelledFeatures, device: torch.device) -> LinearHeads:
    """Fit every C in every process: each fit starts from the previous one, so they cannot be shared."""
    features, targets = train.features.to(device, torch.float32), train.targets.to(device)
    fits = []
    with progress("Fitting logistic regressions", len(cs)) as advance:
        for fit in sweep(features, targets, cs=cs, classes=len(train.classes)):
            fits.append(fit)
            advance(1, f"C = {fit.c:.1e}")
    if unfinished := [fit for fit in fits if fit.gradient > CONVERGED]:
        log.warning(
            "L-BFGS stopped before the optimum for C = %s: the largest gradient is %.1e, and the optimum "
            "begins at %.0e",
            ", ".join(f"{fit.c:.1e}" for fit in unfinished),
            max(fit.gradient for fit in unfinished),
            CONVERGED,
        )
    return join_heads(fits)


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
