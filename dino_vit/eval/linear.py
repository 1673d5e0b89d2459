"""Linear classifiers on a frozen backbone: logistic regressions, or a grid of probes as published.

They train on features that are computed once and cached: the CLS tokens of the last blocks, then the mean
patch token of the last block. Each head reads a contiguous range of these columns. Several labels of an image
are learned each for itself.
"""

import math
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dino_vit.config.commands import CS, LOGISTIC_IMAGES, STANDARD_CS, LinearConfig
from dino_vit.core.runtime import start_processes
from dino_vit.core.text import format_table, plural
from dino_vit.eval.features import FrozenBackbone, frozen_backbone
from dino_vit.eval.figures import TITLES, Figure, measure
from dino_vit.eval.logistic import train_logistic
from dino_vit.eval.probes import (
    count_correct,
    head_losses,
    head_scores,
    top_classes,
    train_heads,
)
from dino_vit.eval.results import (
    METRIC,
    EvaluationResult,
    asked_output,
    conclude_classes,
    few_images,
    few_text,
    judge,
    score,
)
from dino_vit.eval.sets import (
    LabelledFeatures,
    LabelledSubset,
    Sets,
    features_of_sets,
    hold_out,
    open_sets,
)
from dino_vit.models.backbone import CLS, FeatureSpec, simple_specs
from dino_vit.models.classifiers import LinearHeads, on_standardised
from dino_vit.weights.read_file import check_weights

_MEANING = {"C": "a weaker penalty on the weights if higher", "rate": "the learning rate"}
AS_PUBLISHED = "chosen on the images that it is evaluated on, as published: optimistic with few images"


def run(config: LinearConfig) -> EvaluationResult:
    """Train and evaluate; with an output, write the JSON. The figures are those of the best classifier."""
    start_processes()
    check_weights(config.weights)
    sets = open_sets(config)  # a mistake in labels is found before weights are loaded
    return evaluate(config, frozen_backbone(config), sets)


def evaluate(config: LinearConfig, frozen: FrozenBackbone, sets: Sets) -> EvaluationResult:
    """Evaluate a backbone that is loaded already."""
    path = asked_output(config, frozen.model.provenance.source, sets)
    protocol = choose_protocol(config, sets[0])
    settings = config.model_dump(mode="json") | protocol._asdict()
    details: dict[str, Any] = {"method": protocol.method, "settings": settings}
    details["weights"] = frozen.describe_weights()
    inputs = sorted(simple_specs(frozen.model), key=lambda spec: spec.blocks)
    if protocol.method == "logistic" and not protocol.standardise:  # as published
        inputs = [CLS]
    train, val = features_of_sets(frozen, sets, inputs[-1])
    train, chosen_on = hold_out(train, config.seed) if config.select == "train" else (train, val)
    columns = [spec.columns_in(inputs[-1], frozen.model.width) for spec in inputs]
    setting, values, heads = _fit(config, protocol, train, columns, frozen.device)
    judged = _judge_heads(heads, val)
    chosen_by = judged if chosen_on is val else _judge_heads(heads, chosen_on)
    name = "top1" if val.task == "multiclass" else "score"
    cells: list[dict[str, Any]] = [
        {setting: value, "blocks": spec.blocks, "mean": spec.with_mean, name: round(percent, 4)}
        for (value, spec), percent in zip(product(values, inputs), judged, strict=True)
    ]
    best = _best_head(heads, chosen_by, chosen_on)
    if config.select == "train":
        for cell, on_held_out in zip(cells, chosen_by, strict=True):
            cell["held_out"] = None if math.isnan(on_held_out) else round(on_held_out, 4)
    row, column = divmod(best, len(inputs))
    details |= {
        "images": {"train": len(train), "val": len(val)},
        "chosen_on": config.select,
        "classes": len(val.classes),
        "best": cells[best],
        "table": cells,
    }
    title = f"* best, {setting} {values[row]:.3g}, {inputs[column].title}"
    how_chosen = _how_chosen(config, setting, values, values[row], chosen_by[best], chosen_on)
    text = [
        f"{METRIC[val.task]} (%), on {plural(len(val), 'image')}, trained on {len(train):,}",
        _table(setting, values, inputs, judged, best),
        f"{setting}: {_MEANING[setting]}; CLS, mean patch: the class token, and the mean of the patch tokens",
    ]
    chosen = heads[column]
    best_head = LinearHeads(chosen.weight[row : row + 1], chosen.bias[row : row + 1], chosen.columns)
    if val.task != "multiclass":
        figures, metric = score(val, _outputs(best_head, val)[:, 0]), TITLES[val.task]
        text += [f"{title}: {metric} {figures[0].figure} %", how_chosen]
        return judge("linear", path, f"linear {metric}", figures, train, val, details, text)
    predictions = val.predictions(top_classes(best_head, val.features))
    few = few_images(train, val)
    details |= {"best": cells[best] | predictions.figures(), "few_images": few}
    text += [f"{title}: {predictions.summary()}", how_chosen, *few_text(few)]
    if len(val.classes) == len(set(val.targets.tolist())) == 2:
        details["best"]["auroc"] = auroc = _auroc(best_head, val)
        text.append(f"AUROC {auroc} %")
    return conclude_classes("linear", path, "linear top-1", predictions, details, text)


def _how_chosen(
    config: LinearConfig,
    setting: str,
    values: Sequence[float],
    value: float,
    percent: float,
    images: LabelledFeatures,
) -> str:
    """Say by which images the classifier was chosen, and whether its value is the last of those tried."""
    text = AS_PUBLISHED
    if config.select == "train":
        figure = "by their loss" if math.isnan(percent) else f"{percent:.2f} %"
        text = f"chosen on {plural(len(images), 'training image')} that no head was trained on: {figure}"
    if len(values) > 1 and value in (min(values), max(values)):
        key = {"rate": "rates", "C": "cs"}[setting]
        text += f"\nthe best {setting} is at the end of those that were tried; give others with {key}="
    return text


def _auroc(head: LinearHeads, images: LabelledFeatures) -> Figure:
    """Return the area under the ROC curve of the second of two classes."""
    outputs = _outputs(head, images)[:, 0]
    margins = outputs[:, 1:] - outputs[:, :1]
    return measure("multiclass", images.indices, margins, images.targets[:, None])[0].figure


class Protocol(NamedTuple):
    """What follows from the settings and the images."""

    method: str
    standardise: bool
    cs: tuple[float, ...]


def choose_protocol(config: LinearConfig, train_set: LabelledSubset) -> Protocol:
    """Return the method that was given, or else the one for so many images and such labels."""
    given, few = config.given, len(train_set) <= LOGISTIC_IMAGES
    is_grid = {"rates", "steps"} & given or not (few or "cs" in given)
    method = config.method or ("grid" if is_grid else "logistic")
    standardise = method == "logistic" if config.standardise is None else config.standardise
    return Protocol(method, standardise, config.cs or (STANDARD_CS if standardise else CS))


def _fit(
    config: LinearConfig,
    protocol: Protocol,
    train: LabelledFeatures,
    columns: Sequence[slice],
    device: torch.device,
) -> tuple[str, Sequence[float], list[LinearHeads]]:
    """Return the setting that differs between heads, its values, and for each choice of columns the heads."""
    classes = len(train.classes)
    if protocol.method == "grid":

        def probes(features: Tensor) -> list[LinearHeads]:
            return train_heads(
                features,
                train.targets,
                columns=columns,
                rates=config.rates,
                classes=classes,
                steps=config.steps,
                seed=config.seed,
                device=device,
            )

        return "rate", config.rates, on_standardised(probes, train.features, enabled=protocol.standardise)
    cs, targets = sorted(protocol.cs), train.targets.to(device)

    def regressions(features: Tensor) -> list[LinearHeads]:
        # In every process: each fit starts from the previous one, so they cannot be shared.
        each = [train_logistic(features[:, part], targets, cs=cs, classes=classes) for part in columns]
        return [heads._replace(columns=part) for heads, part in zip(each, columns, strict=True)]

    # Of many columns and few images the steps of L-BFGS become smaller than float32 resolves.
    exact = torch.float64 if protocol.standardise and device.type == "cpu" else torch.float32
    heads = on_standardised(regressions, train.features.to(device, exact), enabled=protocol.standardise)
    return "C", cs, [each._replace(weight=each.weight.float(), bias=each.bias.float()) for each in heads]


def _outputs(heads: LinearHeads, images: LabelledFeatures) -> Tensor:
    """Return what all heads predict: of several labels the probability of each, (n, r, c)."""
    scores = head_scores(heads, images.features)
    return scores.sigmoid() if images.task == "multilabel" else scores


def _judge_heads(heads: Sequence[LinearHeads], images: LabelledFeatures) -> list[float]:
    """Return the accuracy, or mAP, of every head in per cent: for each rate or C that of each input."""
    if images.task == "multiclass":
        correct = [count_correct(each, images.features, images.targets) for each in heads]
        return [100 * count / len(images) for count in torch.stack(correct, dim=1).flatten().tolist()]
    outputs = [_outputs(each, images).unbind(1) for each in heads]
    return [
        100 * measure(images.task, images.indices, head_outputs, images.targets)[0].mean
        for row in zip(*outputs, strict=True)
        for head_outputs in row
    ]


def _best_head(heads: Sequence[LinearHeads], percents: Sequence[float], images: LabelledFeatures) -> int:
    """Return the head with the best figure; of heads alike by it, the one with the lowest loss."""
    losses = [head_losses(each, images.features, images.targets, images.task) for each in heads]
    all_losses = torch.stack(losses, dim=1).flatten().tolist()
    judged = [-math.inf if math.isnan(percent) else percent for percent in percents]
    return max(range(len(judged)), key=lambda index: (judged[index], -all_losses[index]))


def _table(
    setting: str, values: Sequence[float], inputs: Sequence[FeatureSpec], percents: Sequence[float], best: int
) -> str:
    """Return a table with a row for each rate or C and a column for each input."""
    cells = [f"{percent:.2f}{'*' if index == best else ' '}" for index, percent in enumerate(percents)]
    width = len(inputs)
    rows = [[f"{value:.3g}", *cells[row * width : (row + 1) * width]] for row, value in enumerate(values)]
    return format_table([setting, *(spec.title for spec in inputs)], rows)
