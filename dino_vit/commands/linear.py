"""Linear classifiers on a frozen backbone: a grid of probes, logistic regressions, or the protocol of 2021.

The first two train on features that are computed once and cached: the CLS tokens of the last blocks, then the
mean patch token of the last block. Each head reads a contiguous range of these columns.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch

from dino_vit.config.settings import Count, CountOrZero, Positive, Settings, setting
from dino_vit.core.progress import progress
from dino_vit.eval.accuracy import Accuracy, accuracy, per_class_accuracy, top_k_accuracy
from dino_vit.eval.datasets import (
    Labelled,
    LabelledSets,
    hold_out,
    labelled_features,
    open_part,
    open_sets,
)
from dino_vit.eval.features.extraction import FeatureSpec
from dino_vit.eval.features.frozen import EvaluationConfig, FrozenBackbone, frozen_backbone
from dino_vit.eval.linear.logistic import sweep
from dino_vit.eval.linear.probes import TOP_K, LinearHeads, count_correct, top_classes, train_heads
from dino_vit.eval.linear.published import Dino2021, probe_features, read_probe, train_probe
from dino_vit.eval.results import results_path, write_results

log = logging.getLogger("dino_vit")

# From DINOv2's linear evaluation, which takes 12,500 steps of 1,024 images: ten epochs of ImageNet.
RATES = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1)
EPOCHS, MIN_STEPS, MAX_STEPS = 10, 1250, 12_500
CS = tuple(float(c) for c in np.logspace(-6, 5, 45))
CONVERGED = 1e-4  # the largest gradient of a logistic regression that counts as the optimum

Evaluated = tuple[dict[str, Any], str]  # results for JSON, and the text to print


class Grid(Settings):
    """method=grid: one head for each learning rate and input, all trained side by side."""

    rates: tuple[Positive, ...] = setting(RATES, "learning rates at a batch of 256")
    blocks: tuple[Count, ...] = setting((1, 4), "read the CLS tokens of this many last blocks")
    mean: tuple[bool, ...] = setting((False, True), "without and with the mean patch token")
    steps: Count | None = setting(None, "of SGD; null: ten epochs, but at least 1,250 and at most 12,500")
    batch: Count = setting(1024, "images per step; all images if there are fewer")


class Logistic(Settings):
    """method=logistic: the optimum for each strength of the penalty."""

    cs: tuple[Positive, ...] = setting(CS, "inverse strengths of the penalty")
    blocks: Count = setting(1, "read the CLS tokens of this many last blocks")
    mean: bool = setting(False, "also read the mean patch token")
    iterations: Count = setting(1000, "maximum iterations of L-BFGS for each C")


class LinearConfig(EvaluationConfig):
    """Train linear classifiers on a frozen backbone, and report their accuracy."""

    method: Literal["grid", "logistic", "dino2021"] = setting("grid", "how the classifiers are trained")
    train: str | None = setting(None, "images to train on; null: source, except a fifth for evaluation")
    train_labels: str | None = setting(
        None, "CSV or JSON file with the labels of train; null: the source's own"
    )
    select: Literal["source", "train"] = setting(
        "source", "choose the best head on source, as published, or on a held-out tenth of train"
    )
    seed: CountOrZero = setting(0, "of all random numbers")
    output: str | None = setting(
        None, "JSON file to write; null: eval/linear.json in the run folder, or beside the weights file"
    )
    grid: Grid = Grid()
    logistic: Logistic = Logistic()
    dino2021: Dino2021 = Dino2021()

    positional: ClassVar = ("source",)
    also_known_as: ClassVar = {
        **EvaluationConfig.also_known_as,
        "source": "images data data_path val",
        "grid.rates": "learning_rates lrs",
        "grid.blocks": "n_last_blocks_list",
        "dino2021.blocks": "n_last_blocks",
        "dino2021.mean": "avgpool_patchtokens",
        "dino2021.probe": "pretrained_linear",
        "dino2021.epochs": "epochs",
    }


def run(config: LinearConfig) -> int:
    """Train and evaluate, print the accuracies and write the JSON."""
    with frozen_backbone(config) as frozen:
        path = results_path("linear", weights=config.weights, output=config.output)
        if config.method != "dino2021":
            results, text = _train_on_features(config, frozen)
        elif config.dino2021.probe:
            results, text = _load_dino2021(config, frozen, config.dino2021.probe)
        else:
            results, text = _train_dino2021(config, frozen, path.with_suffix(".pth"))
        if frozen.main:
            write_results(path, {**_about(config, frozen), **results})
            print(f"{text}\n{path}")
    return 0


def _about(config: LinearConfig, frozen: FrozenBackbone) -> dict[str, Any]:
    """Return what the results are about: the weights and the settings."""
    known = frozen.model.provenance
    assert known is not None, "loaded weights have a provenance"
    weights = {key: getattr(known, key) for key in ("source", "sha256", "network", "step")}
    other_methods = {"grid", "logistic", "dino2021"} - {config.method}
    settings = config.model_dump(mode="json", exclude=other_methods)
    return {"method": config.method, "weights": weights, "settings": settings}


def _open_sets(config: LinearConfig) -> LabelledSets:
    return open_sets(
        config.source,
        labels=config.labels,
        train=config.train,
        train_labels=config.train_labels,
        seed=config.seed,
    )


def _train_on_features(config: LinearConfig, frozen: FrozenBackbone) -> Evaluated:
    """Train heads on cached features, evaluate all of them and choose the best."""
    sets = _open_sets(config)
    inputs = _inputs(config, frozen.model.depth)
    with_mean = any(spec.tokens == "cls+mean" for spec in inputs)
    cached = FeatureSpec(
        tokens="cls+mean" if with_mean else "cls", blocks=max(spec.blocks for spec in inputs)
    )
    train = labelled_features(frozen, sets.train, cached, "training features")
    val = labelled_features(frozen, sets.val, cached, "evaluation features")
    held_out = None
    if config.select == "train":
        train, held_out = hold_out(train, config.seed)
    columns = [columns_of(spec, cached, frozen.model.width) for spec in inputs]
    train_probes = _train_grid if config.method == "grid" else _fit_logistic
    probes = train_probes(config, train, dict(zip(inputs, columns, strict=True)), sets.classes, frozen.device)
    results, text = _compare(probes, val, held_out, sets.classes)
    sizes = {"images": {"train": len(train), "val": len(val)}, "chosen_on": config.select}
    title = (
        f"top-1 in % of {len(val):,} images of {len(sets.classes)} classes, trained on {len(train):,} images"
    )
    return sizes | results, f"{title}\n{text}"


def _inputs(config: LinearConfig, depth: int) -> list[FeatureSpec]:
    """Return what the heads read; a backbone with fewer blocks gives all it has."""
    if config.method == "grid":
        blocks, means = config.grid.blocks, config.grid.mean
    else:
        blocks, means = (config.logistic.blocks,), (config.logistic.mean,)
    if beyond := [count for count in blocks if count > depth]:
        log.warning("the backbone has only %d blocks: all of them are read for blocks=%s", depth, beyond)
    counts = dict.fromkeys(min(count, depth) for count in blocks)
    return [
        FeatureSpec(tokens="cls+mean" if mean else "cls", blocks=count)
        for count, mean in product(counts, dict.fromkeys(means))
    ]


def columns_of(part: FeatureSpec, whole: FeatureSpec, width: int) -> slice:
    """Return the columns of some tokens among the features of a spec that has more of them."""
    end = whole.blocks + (part.tokens == "cls+mean")
    return slice((whole.blocks - part.blocks) * width, end * width)


class Probes(NamedTuple):
    """Trained heads: a row for each value of a setting, a column for each input."""

    setting: str
    values: Sequence[float]
    inputs: Sequence[FeatureSpec]
    heads: Sequence[LinearHeads]  # one per input, each with a head for every value
    notes: list[str]

    def accuracies(self, images: Labelled) -> list[Accuracy]:
        """Return the top-1 accuracy of every head, row by row."""
        correct = [count_correct(each, images.features, images.targets) for each in self.heads]
        return [accuracy(count, len(images)) for count in torch.stack(correct, dim=1).flatten().tolist()]


def _train_grid(
    config: LinearConfig,
    train: Labelled,
    columns: Mapping[FeatureSpec, slice],
    classes: Sequence[str],
    device: torch.device,
) -> Probes:
    grid, batch = config.grid, min(config.grid.batch, len(train))
    steps = grid.steps or min(max(EPOCHS * len(train) // batch, MIN_STEPS), MAX_STEPS)
    heads = train_heads(
        train.features,
        train.targets,
        columns=list(columns.values()),
        rates=[rate * batch / 256 for rate in grid.rates],
        classes=len(classes),
        steps=steps,
        batch_size=batch,
        seed=config.seed,
        device=device,
    )
    note = f"{steps:,} steps of {batch:,} images; rates are for a batch of 256 and scale with the batch"
    return Probes("rate", grid.rates, list(columns), heads, [note])


def _fit_logistic(
    config: LinearConfig,
    train: Labelled,
    columns: Mapping[FeatureSpec, slice],
    classes: Sequence[str],
    device: torch.device,
) -> Probes:
    """Fit every C in every process: each fit starts from the previous one, so they cannot be shared."""
    cs, iterations = sorted(config.logistic.cs), config.logistic.iterations
    (read,) = columns.values()
    features, targets = train.features[:, read].to(device, torch.float32), train.targets.to(device)
    fits = []
    with progress("Fitting logistic regressions", len(cs)) as advance:
        for fit in sweep(features, targets, cs=cs, classes=len(classes), max_iterations=iterations):
            fits.append(fit)
            advance(1, f"C = {fit.c:.1e}: {fit.iterations} iterations")
    weight, bias = torch.cat([fit.head.weight for fit in fits]), torch.cat([fit.head.bias for fit in fits])
    unfinished = ", ".join(f"{fit.c:.1e}" for fit in fits if fit.gradient > CONVERGED)
    notes = [f"not at the optimum after {iterations:,} iterations: C = {unfinished}"] if unfinished else []
    return Probes("C", cs, list(columns), [LinearHeads(weight, bias, read)], notes)


def _compare(probes: Probes, val: Labelled, held_out: Labelled | None, classes: Sequence[str]) -> Evaluated:
    """Evaluate all heads, and choose the best one on `val` or on held-out training images."""
    setting, values, inputs, heads, notes = probes
    top1 = probes.accuracies(val)
    cells = [
        {setting: value, "blocks": spec.blocks, "mean": spec.tokens == "cls+mean", "top1": one._asdict()}
        for (value, spec), one in zip(product(values, inputs), top1, strict=True)
    ]
    chosen_by, choice = (
        top1,
        (
            "chosen on the images that it is evaluated on, as published, which is slightly optimistic; "
            "select=train chooses on a tenth of the training images"
        ),
    )
    if held_out is not None:
        chosen_by = probes.accuracies(held_out)
        cells = [cell | {"held_out": one._asdict()} for cell, one in zip(cells, chosen_by, strict=True)]
    best = max(range(len(cells)), key=lambda index: chosen_by[index].correct)
    if held_out is not None:
        choice = f"chosen on {len(held_out):,} training images that no head was trained on: {chosen_by[best]}"
    row, column = divmod(best, len(inputs))
    accuracies, line = _evaluate_head(heads[column], val, classes, head=row)
    results = {"classes": len(classes), "best": cells[best] | accuracies, "table": cells, "notes": notes}

    titles = [_title(spec) for spec in inputs]
    lines = ["  ".join([f"{setting:>8}", *titles])]
    for start, value in zip(range(0, len(cells), len(inputs)), values, strict=True):
        shown = [
            f"{top1[start + index].percent:.2f}{'*' if start + index == best else ' '}".rjust(len(title))
            for index, title in enumerate(titles)
        ]
        lines.append("  ".join([f"{value:>8.3g}", *shown]))
    lines.append(f"* best, {setting} {values[row]:.3g}, {titles[column].strip()}: {line}")
    return results, "\n".join([*lines, choice, *notes])


def _title(spec: FeatureSpec) -> str:
    """Return the heading of a column, wide enough for its figures."""
    title = "CLS" if spec.blocks == 1 else f"CLS of {spec.blocks} blocks"
    return f"{title} + mean patch" if spec.tokens == "cls+mean" else f"{title:>6}"


def _evaluate_head(heads: LinearHeads, val: Labelled, classes: Sequence[str], *, head: int = 0) -> Evaluated:
    """Return the top-1, top-5 and per-class accuracy of one head."""
    ranked = top_classes(heads, val.features, head=head)
    targets = val.targets.to(ranked.device)
    top1, top5 = top_k_accuracy(ranked, targets), top_k_accuracy(ranked, targets, TOP_K)
    per_class = {classes[label]: one._asdict() for label, one in per_class_accuracy(ranked, targets).items()}
    results = {"top1": top1._asdict(), "top5": top5._asdict(), "per_class": per_class}
    return results, f"top-1 {top1}, top-5 {top5}"


def _train_dino2021(config: LinearConfig, frozen: FrozenBackbone, path: Path) -> Evaluated:
    """Train one head as in 2021, and write it to `path`."""
    sets, settings = _open_sets(config), config.dino2021
    val = probe_features(frozen, sets.val, settings)
    head, percents = train_probe(sets, val, frozen, settings, seed=config.seed, path=path)
    results, text = _evaluate_probe(head, val, sets.classes)
    best = max(percents)
    text += (
        f"\ntrained on {len(sets.train):,} images for {settings.epochs} epochs; best after epoch "
        f"{percents.index(best) + 1}: {best:.2f} %, which is what the 2021 code reports\n{path}"
    )
    return {**results, "probe": str(path), "percents": percents}, text


def _load_dino2021(config: LinearConfig, frozen: FrozenBackbone, probe: str) -> Evaluated:
    """Evaluate a head from a file; its classes are those of the source, in the same order."""
    subset, classes = open_part(config.source, config.labels)
    head = read_probe(probe, frozen, config.dino2021)
    known = head.bias.shape[1]
    if known != len(classes):
        raise ValueError(
            f"{probe} has {known} classes, but {config.source} has {len(classes)}; give images with the "
            "classes that it was trained on, one folder for each"
        )
    results, text = _evaluate_probe(head, probe_features(frozen, subset, config.dino2021), classes)
    return {**results, "probe": probe}, text


def _evaluate_probe(head: LinearHeads, val: Labelled, classes: Sequence[str]) -> Evaluated:
    results, text = _evaluate_head(head, val, classes)
    sizes = {"images": len(val), "classes": len(classes)}
    return sizes | results, f"{text} of {len(val):,} images of {len(classes)} classes"
