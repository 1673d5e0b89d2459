"""Features of labelled images and of those to label, computed together, and what may be read of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor, nn

from dino_vit.config.commands import PredictConfig
from dino_vit.config.sections import BASELINES
from dino_vit.core import log
from dino_vit.core.text import plural
from dino_vit.eval.cross_validation import FOLDS
from dino_vit.eval.origins import Origins, join_groups
from dino_vit.eval.sets import LabelledFeatures, LabelledSubset, Rows
from dino_vit.features.frozen import FrozenBackbone
from dino_vit.features.readings import (
    LEVELLED,
    Reading,
    fit_levelling,
    fit_reading,
    joined_features,
    select_parts,
)
from dino_vit.models.backbone import Backbone, FeatureSpec
from dino_vit.models.classifiers import Levelling

OF_IMAGE = "edges", "pixels"  # parts that are of an image itself
MOST_NUMBERS = 2**30  # of all features: 4 GiB


@dataclass(frozen=True)
class PooledFeatures:
    """The features (n, d) of all readable images, on the device of the backbone."""

    frozen: FrozenBackbone
    spec: FeatureSpec
    readings: Sequence[Reading]  # to choose from, the simplest first
    features: Tensor
    learned: LabelledSubset  # the labelled images that could be read
    origins: Origins  # of their labels
    rows: Tensor  # (m,), of these
    others: Tensor  # the rows of those to label
    indices: Rows  # of the latter in their source

    def select(self, tokens: str, rows: Tensor | slice = slice(None)) -> Tensor:
        """Return some parts of the features of some images."""
        features = self.features[rows]
        if tokens == self.spec.tokens:  # of several backbones, perhaps
            return features
        return select_parts(features, self.spec, self.frozen.model, tokens)

    @cached_property
    def folds(self) -> Tensor:
        """The fold of each labelled image, (m,); those of a burst or of a group are in one."""
        folds = self.learned.folds(FOLDS, seed=0, join=partial(join_groups, origins=self.origins))
        return torch.from_numpy(folds).to(self.rows.device)

    @cached_property
    def levelling(self) -> Levelling:
        """What levels each part, fitted by all images, or by many of them, without labels."""
        whiten = max(reading.whiten for reading in self.readings)
        return fit_levelling(self.features, self.spec.widths(self.frozen.model), whiten)

    def reader(self, reading: Reading) -> Callable[[Tensor], Tensor]:
        """Return what reads the parts of a reading."""
        if self.frozen.beside:
            return fit_reading(self.frozen, self.features, self.spec, reading.whiten)
        if not reading.whiten:
            return nn.Identity()
        return self.levelling.of_parts([*map(self.spec.parts.index, reading.tokens.split("+"))])

    def read(self, reading: Reading) -> LabelledFeatures:
        """Return what is read of the labelled images."""
        values, subset = self.reader(reading)(self.select(reading.tokens, self.rows)), self.learned
        targets = torch.from_numpy(subset.targets).to(values.device)
        return LabelledFeatures(values, targets, subset.indices, subset.classes, subset.task)


def spec_to_choose_from(model: Backbone) -> FeatureSpec:
    """Return all that `predict` chooses from, of one forward pass; `label` shares its cached file."""
    return FeatureSpec(tokens="+".join(["cls", *["mean", "cells"] * model.has_patches, *OF_IMAGE]))


def choose_readings(config: PredictConfig, frozen: FrozenBackbone, images: int) -> tuple[str, list[Reading]]:
    """Return the parts to compute of some images, and what may be read of them: of what is given, that."""
    model, whole = frozen.model, spec_to_choose_from(frozen.model).tokens
    usual = "cls+mean" if model.has_patches else "cls"
    is_given = frozen.beside or {"tokens", "blocks", "whiten"} & config.given
    numbers = images * sum(FeatureSpec(tokens=whole).widths(model))
    if not is_given and numbers > MOST_NUMBERS:
        log.info("%s are too many to choose what is read of them: it is %s", plural(images, "image"), usual)
        return usual, [Reading(usual)]
    if is_given or model.architecture.get("name") in BASELINES:
        tokens = config.tokens or usual
        return "+".join([tokens, *OF_IMAGE * (not frozen.beside)]), [Reading(tokens, config.whiten)]
    more = "cls+cells+edges" if model.has_patches else "cls+edges"
    return whole, [Reading(usual, LEVELLED), Reading(more, LEVELLED)]


def pool_features(
    config: PredictConfig,
    frozen: FrozenBackbone,
    learned: LabelledSubset,
    others: LabelledSubset,
    origins: Origins,
) -> PooledFeatures:
    """Compute the features of all images of a source, which are cached whichever of them have labels."""
    is_apart = learned.source is not others.source
    tokens, readings = choose_readings(config, frozen, len(others.source) + is_apart * len(learned))
    spec = FeatureSpec(tokens=tokens, blocks=config.blocks)
    values, kept = joined_features(frozen, others.source, spec=spec, title=f"features of {others.name}")
    to_label = np.flatnonzero(np.isin(kept, others.indices))
    if is_apart:
        title = "features of the labelled images"
        more, given = joined_features(frozen, learned.images, spec=spec, title=title)
        rows, values = np.arange(len(kept), len(kept) + len(given)), np.concatenate([values, more])
        found = learned.indices[given]
    else:
        rows = np.flatnonzero(np.isin(kept, learned.indices))
        found = kept[rows]
    if is_apart and not len(to_label):
        raise ValueError(f"none of {len(others):,} images can be read")
    readable = np.isin(learned.indices, found)
    return PooledFeatures(
        frozen=frozen,
        spec=spec,
        readings=readings,
        features=torch.from_numpy(values).to(frozen.device),
        learned=learned.part(readable, learned.name),
        origins=origins[readable],
        rows=torch.from_numpy(rows).to(frozen.device),
        others=torch.from_numpy(to_label).to(frozen.device),
        indices=kept[to_label],
    )
