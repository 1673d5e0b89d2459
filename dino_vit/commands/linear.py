"""Linear classifiers on a frozen backbone: a grid of probes, logistic regressions, or the protocol of 2021.

The first two work on features that are computed once and kept: the CLS tokens of the last blocks and the mean
patch token of the last, of which every head reads some neighbouring columns.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from dino_vit.config.settings import Count, CountOrZero, Positive, Settings, setting
from dino_vit.core.distributed import all_gather, is_main_process, share
from dino_vit.core.progress import progress
from dino_vit.eval.accuracy import results_path, write_results
from dino_vit.eval.datasets import (
    LabelledFeatures,
    LabelledSets,
    LabelledSubset,
    SupervisedLoader,
    hold_out,
    labelled_features,
    open_sets,
    open_subset,
)
from dino_vit.eval.features.extraction import FeatureSpec
from dino_vit.eval.features.frozen import EvaluationConfig, FrozenBackbone, frozen_backbone
from dino_vit.eval.linear.candidates import Candidates, choose, one_head
from dino_vit.eval.linear.logistic import sweep
from dino_vit.eval.linear.probes import Heads, train_heads
from dino_vit.eval.linear.published import Published, interleave, read_probe, train_probe, training_view

log = logging.getLogger("dino_vit")

# Of DINOv2's linear evaluation, which takes 12,500 steps of 1,024 images: ten epochs of ImageNet.
RATES = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1)
EPOCHS, FEWEST_STEPS, MOST_STEPS = 10, 1250, 12_500
CS = tuple(float(c) for c in np.logspace(-6, 5, 45))
AT_THE_OPTIMUM = 1e-4  # a gradient beyond this is not


class Grid(Settings):
    """method=grid: heads of every rate on every input, all trained side by side."""

    rates: tuple[Positive, ...] = setting(RATES, "learning rates at a batch of 256")
    blocks: tuple[Count, ...] = setting((1, 4), "the CLS tokens of how many last blocks are read")
    mean: tuple[bool, ...] = setting((False, True), "without and with the mean patch token")
    steps: Count | None = setting(None, "of SGD; null: ten epochs, but 1,250 to 12,500")
    batch: Count = setting(1024, "images a step, or all there are")


class Logistic(Settings):
    """method=logistic: the optimum for every strength of the penalty."""

    cs: tuple[Positive, ...] = setting(CS, "inverse strengths of the penalty")
    blocks: Count = setting(1, "the CLS tokens of how many last blocks are read")
    mean: bool = setting(False, "read the mean patch token too")
    iterations: Count = setting(1000, "of L-BFGS, at most, for each C")


class LinearConfig(EvaluationConfig):
    """Train linear classifiers on a frozen backbone, and count how often they are right."""

    method: Literal["grid", "logistic", "dino2021"] = setting("grid", "how they are trained")
    train: str | None = setting(None, "images to learn from; null: source, but for a fifth that is tried on")
    train_labels: str | None = setting(None, "CSV or JSON file of the labels of train; null: its own")
    select: Literal["source", "train"] = setting(
        "source", "choose the best head on source, as published, or on a tenth of train that none learns from"
    )
    seed: CountOrZero = setting(0, "of every random number")
    output: str | None = setting(
        None, "JSON to write; null: eval/linear.json of the run, or beside the weights"
    )
    grid: Grid = Grid()
    logistic: Logistic = Logistic()
    dino2021: Published = Published()

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
    """Train, choose, print the table and write the JSON."""
    with frozen_backbone(config) as frozen:
        path = results_path("linear", weights=config.weights, output=config.output)
        if config.method != "dino2021":
            found, text = _on_features(config, frozen)
        elif config.dino2021.probe:
            found, text = _try_probe(config, frozen, config.dino2021.probe)
        else:
            found, text = _train_published(config, frozen, path)
        if is_main_process():
            write_results(path, {**_about(config, frozen), **found})
            print(f"{text}\n{path}")
    return 0


def _about(config: LinearConfig, frozen: FrozenBackbone) -> dict[str, Any]:
    """Return what the figures are of."""
    known = frozen.model.provenance
    assert known is not None, "loaded weights know where they are from"
    others = {"grid", "logistic", "dino2021"} - {config.method}
    return {
        "method": config.method,
        "weights": {
            "source": known.source,
            "sha256": known.sha256,
            "network": known.network,
            "step": known.step,
        },
        "settings": config.model_dump(mode="json", exclude=others),
    }


def _open_sets(config: LinearConfig) -> LabelledSets:
    return open_sets(
        config.source,
        labels=config.labels,
        train=config.train,
        train_labels=config.train_labels,
        seed=config.seed,
    )


def _on_features(config: LinearConfig, frozen: FrozenBackbone) -> tuple[dict[str, Any], str]:
    """Train all candidates on kept features, and find the best."""
    sets = _open_sets(config)
    inputs = _inputs(config, frozen.model.depth)
    blocks = max(one.blocks for one in inputs)
    spec = FeatureSpec(
        tokens="cls+mean" if any(one.tokens == "cls+mean" for one in inputs) else "cls", blocks=blocks
    )
    train, val = (
        labelled_features(frozen, part, spec, title)
        for part, title in ((sets.train, "features to learn from"), (sets.val, "features to try on"))
    )
    chosen_on = val
    if config.select == "train":
        train, chosen_on = hold_out(train, config.seed)
    columns = [columns_of(one, spec, frozen.model.width) for one in inputs]
    train_them = _train_grid if config.method == "grid" else _fit_logistic
    candidates = train_them(config, frozen, train, inputs, columns, len(sets.classes))
    choice = choose(candidates, chosen_on, val)
    found = {"images": {"train": len(train), "val": len(val)}, "chosen_on": config.select}
    return found | choice.results(sets.classes), choice.text(sets.classes, len(train))


def _inputs(config: LinearConfig, depth: int) -> tuple[FeatureSpec, ...]:
    """Return what the heads read; a network of fewer blocks gives all it has."""
    one, grid = config.logistic, config.grid
    blocks, mean = (grid.blocks, grid.mean) if config.method == "grid" else ((one.blocks,), (one.mean,))
    if beyond := [count for count in blocks if count > depth]:
        log.warning("the backbone has %d blocks: all of them are read for blocks = %s", depth, beyond)
    counts = dict.fromkeys(min(count, depth) for count in blocks)
    return tuple(
        FeatureSpec(tokens="cls+mean" if both else "cls", blocks=count)
        for count in counts
        for both in dict.fromkeys(mean)
    )


def columns_of(part: FeatureSpec, whole: FeatureSpec, width: int) -> slice:
    """Return where some tokens stand among the features of a kind that has more of them."""
    assert part.blocks <= whole.blocks
    end = whole.blocks + (part.tokens == "cls+mean")
    return slice((whole.blocks - part.blocks) * width, end * width)


def _train_published(config: LinearConfig, frozen: FrozenBackbone, path: Path) -> tuple[dict[str, Any], str]:
    """Train one head as in 2021, and write it beside the results."""
    sets, settings = _open_sets(config), config.dino2021
    val = _published_features(frozen, sets.val, settings)
    feed = SupervisedLoader(
        sets.train,
        view=training_view(frozen.preparation.size),
        preparation=frozen.preparation,
        batch_size=config.batch_size,
        seed=config.seed,
        workers=settings.workers,
        device=frozen.device,
    )
    heads = path.with_suffix(".pth")
    trained = train_probe(
        feed,
        frozen,
        settings,
        val=val,
        classes=len(sets.classes),
        seed=config.seed,
        path=heads,
        metadata=_trained_with(config, frozen, sets, feed.global_batch),
    )
    found, text = one_head(trained.head, val, sets.classes)
    best = max(range(len(trained.percents)), key=trained.percents.__getitem__)
    said = (
        f"{text}\nlearned from {len(sets.train):,} images in {settings.epochs} epochs; best after epoch "
        f"{best + 1}: {trained.percents[best]:.2f} %, which is what the 2021 code reports\n{heads}"
    )
    return {**found, "probe": str(heads), "percents": list(trained.percents)}, said


def _try_probe(config: LinearConfig, frozen: FrozenBackbone, probe: str) -> tuple[dict[str, Any], str]:
    """Count how often a head from a file is right; its classes are those of the source, in their order."""
    settings = config.dino2021
    part = open_subset(config.source, config.labels)
    classes = part.source.classes
    head = read_probe(probe, inputs=settings.width(frozen.model))
    known = head.bias.shape[1]
    if known != len(classes):
        raise ValueError(
            f"{probe} tells {known} classes apart, but {config.source} has {len(classes)}; give the images "
            "that it is for, with a folder for every class"
        )
    found, text = one_head(head.to(frozen.device), _published_features(frozen, part, settings), classes)
    return {**found, "probe": probe}, text


def _published_features(
    frozen: FrozenBackbone, part: LabelledSubset, settings: Published
) -> LabelledFeatures:
    """Return what a published head reads of some images."""
    kept = labelled_features(frozen, part, settings.spec, "features to try on")
    return replace(kept, features=interleave(kept.features, mean=settings.mean))


def _trained_with(config: LinearConfig, frozen: FrozenBackbone, sets: LabelledSets, global_batch: int) -> str:
    """Return all that the training of a head is a function of."""
    known = frozen.model.provenance
    facts = {
        "weights": known and known.sha256,
        "network": known and known.network,
        "sets": [part.images.fingerprint for part in (sets.train, sets.val)],
        "classes": sets.classes,
        "settings": config.dino2021.model_dump(exclude={"workers", "probe"}),
        "preparation": asdict(frozen.preparation),
        "global_batch": global_batch,
        "seed": config.seed,
    }
    return json.dumps(facts, sort_keys=True)


def _train_grid(
    config: LinearConfig,
    frozen: FrozenBackbone,
    train: LabelledFeatures,
    inputs: tuple[FeatureSpec, ...],
    columns: Sequence[slice],
    classes: int,
) -> Candidates:
    """Train this process's share of the rates on every input."""
    grid, count = config.grid, len(train)
    batch = min(grid.batch, count)
    steps = grid.steps or min(max(EPOCHS * count // batch, FEWEST_STEPS), MOST_STEPS)
    mine = share(grid.rates)
    with progress("Training probes, steps", steps) as advance:
        heads = train_heads(
            train.features,
            train.targets,
            columns=columns,
            rates=[rate * batch / 256 for rate in mine],
            classes=classes,
            steps=steps,
            batch_size=batch,
            seed=config.seed,
            device=frozen.device,
            advance=lambda: advance(1),
        )
    said = f"{steps:,} steps of {batch:,} images; rates are for 256 images a step, and grow with it"
    return Candidates("rate", grid.rates, inputs, heads, (said,))


def _fit_logistic(
    config: LinearConfig,
    frozen: FrozenBackbone,
    train: LabelledFeatures,
    inputs: tuple[FeatureSpec, ...],
    columns: Sequence[slice],
    classes: int,
) -> Candidates:
    """Fit the penalties up to the end of this process's share, each from the one before.

    All processes begin with the first, so that what is found does not depend on how many there are.
    """
    cs = tuple(sorted(config.logistic.cs))
    mine = share(range(len(cs)))
    first, end = (mine[0], mine[-1] + 1) if mine else (0, 0)
    features = train.features[:, columns[0]].to(frozen.device, torch.float32)
    fits = []
    with progress("Fitting logistic regressions", end) as advance:
        for fit in sweep(
            features,
            train.targets.to(frozen.device),
            cs=cs[:end],
            classes=classes,
            max_iterations=config.logistic.iterations,
        ):
            fits.append(fit)
            advance(1, f"C = {fit.c:.1e}: {fit.iterations} iterations")
    heads = Heads(
        columns[0],
        torch.cat(
            [features.new_empty(0, classes, features.shape[1]), *(fit.head.weight for fit in fits[first:])]
        ),
        torch.cat([features.new_empty(0, classes), *(fit.head.bias for fit in fits[first:])]),
    )
    slopes = all_gather(torch.tensor([fit.gradient for fit in fits[first:]], device=frozen.device)).tolist()
    far = [f"{c:.1e}" for c, slope in zip(cs, slopes, strict=True) if slope > AT_THE_OPTIMUM]
    notes = (f"not at the optimum after {config.logistic.iterations:,} iterations: C = {', '.join(far)}",)
    return Candidates("C", cs, inputs, [heads], notes if far else ())
