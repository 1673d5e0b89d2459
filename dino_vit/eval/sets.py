"""Which images are learned from, and which are judged by them (`divide`) or labelled; and their features."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dino_vit.config.commands import LabelledConfig
from dino_vit.config.objects import is_object
from dino_vit.config.settings import Task
from dino_vit.core import log
from dino_vit.core.distributed import agree
from dino_vit.core.text import brief, plural, public
from dino_vit.data.image_set import ImageSet, with_same_labels
from dino_vit.data.labels import HELD_OUT, TRAIN, alike_names
from dino_vit.data.open import has_cells, open_source
from dino_vit.eval.holdout import choose_folds, find_runs, numbers_of, series_of
from dino_vit.features.frozen import FrozenBackbone
from dino_vit.features.readings import joined_features
from dino_vit.models.backbone import CLS, FeatureSpec

Rows = NDArray[np.int64]

VAL_SHARE = 5  # one in so many images is for validation where no training set is given
_DEVICE_SHARE = 0.25  # of the free memory, for the features of a set


@dataclass(frozen=True)
class LabelledSubset:
    """Images of a source that have a label, and what is to be predicted of them; −1 where nobody knows."""

    name: str  # for messages
    source: ImageSet
    indices: Rows  # in the source, ascending
    targets: NDArray[Any]  # (n,) classes from 0 on; (n, c) several labels
    classes: tuple[str, ...]  # or the names of labels
    task: Task = "multiclass"

    def __len__(self) -> int:
        return len(self.indices)

    def first(self, count: int) -> "LabelledSubset":
        return replace(self, indices=self.indices[:count], targets=self.targets[:count])

    def part(self, rows: NDArray[np.bool_], name: str) -> "LabelledSubset":
        return replace(self, name=name, indices=self.indices[rows], targets=self.targets[rows])

    @property
    def images(self) -> ImageSet:
        """These images as a source of their own."""
        return self.source if len(self) == len(self.source) else self.source.subset(self.indices)

    @property
    def fingerprint(self) -> str:
        """Tell the images and their classes from others."""
        labels = hashlib.sha256("\0".join(self.classes).encode() + self.targets.tobytes())
        return f"{self.images.fingerprint}-{labels.hexdigest()[:16]}"

    def folds(self, count: int, seed: int, *, join: Callable[[Rows], Rows] | None = None) -> Rows:
        """Return the fold of each image, by blocks of neighbours in the order of their names.

        With `join` each run of photos with the same labels is in one fold; it joins some runs (n,) to one.
        """

        def name(row: int) -> str:
            return self.source.name(int(self.indices[row]))

        series = (series_of(name(row)) for row in range(len(self)))
        classes = self.targets.tolist() if self.task == "multiclass" else None
        alike = np.unique(self.targets, axis=0, return_inverse=True)[1].ravel().tolist() if join else []
        runs = join(find_runs([*map(name, range(len(self)))], len(self.source), alike)) if join else None
        return choose_folds(series, count, seed, lambda row: numbers_of(name(row)), classes, runs)

    def require_two_classes(self) -> None:
        """Raise an error unless there is something to predict."""
        if (self.targets == self.targets[0]).all():
            same = "have the same labels"
            if self.task == "multiclass":
                same = f"are of one class, {self.classes[int(self.targets[0])]}"
            raise ValueError(f"all labelled images of {self.name} {same}; two or more are needed")


Sets = tuple[LabelledSubset, LabelledSubset]  # the images to learn from, and those to judge by


def choose_splits(images: ImageSet) -> tuple[str, str] | None:
    """Return the splits to learn from and to judge on; None unless the set has both, with labels."""
    names = {name.lower(): name for name in images.splits.names}

    def first(wanted: Sequence[str]) -> str | None:
        splits = (names[name] for name in wanted if name in names)
        return next((split for split in splits if (images.codes(images.split(split)) >= 0).any()), None)

    train, held_out = first(TRAIN), first(HELD_OUT)
    return (train, held_out) if train and held_out else None


def describe_use(images: ImageSet, train: str, held_out: str, name: str) -> str:
    """Return what a set is split into and how that is used, as a sentence."""
    sizes = (f"{split} ({plural(count, 'image')})" for split, count in images.split_sizes().items())
    return f"{name} has the splits {', '.join(sizes)}: {held_out} is evaluated against {train}"


def divide(
    images: LabelledSubset,
    train: LabelledSubset | None = None,
    *,
    blocks: int | None = None,
    seed: int = 0,
) -> Sets:
    """Return the images to learn from and those to judge by:

    - those of `train`, if it is given, and all of `images`
    - those of the split train, and those of val or test, if the source has both
    - with `blocks` one in so many to judge by, in blocks of neighbours that the seed draws, and the others
    - otherwise all images twice: each is classified by the others (leave-one-out)
    """
    if train is not None:
        return train, images
    name, source = images.name, images.source
    if splits := choose_splits(source):
        train, val = (
            images.part(np.isin(images.indices, source.split(split)), f"{name}/{split}") for split in splits
        )
        return train, val
    if blocks:
        chosen = images.folds(blocks, seed) == 0
        return images.part(~chosen, f"the rest of {name}"), images.part(chosen, f"one in {blocks} of {name}")
    return images, images


def images_to_label(name: str, source: ImageSet, learned: LabelledSubset) -> LabelledSubset:
    """Return the images to label by others that were learned from: all of a source but these."""
    rows = np.arange(len(source))
    if learned.source is source:
        rows = np.setdiff1d(rows, learned.indices)
    return LabelledSubset(name, source, rows, np.full(len(rows), -1), learned.classes, learned.task)


def check_classes(train: LabelledSubset, val: LabelledSubset) -> None:
    """Raise an error if images to judge by have a class that none of those to learn from has."""
    if train.task == "multilabel":
        return
    known = np.unique(train.targets)
    if unknown := [val.classes[code] for code in np.setdiff1d(val.targets, known).tolist()]:
        text = f"{val.name} has classes that are not among the {len(known)} of the training set"
        raise ValueError(f"{text}: {brief(', '.join(unknown), 200)}. They are matched by name")


def open_sets(config: LabelledConfig, blocks: int | None = VAL_SHARE, source: ImageSet | None = None) -> Sets:
    """Open the images to learn from and those to judge by, but for a source that is open already.

    All processes must see the same.
    """
    return agree(
        "labelled images",
        lambda: _open_sets(config, blocks, source),
        lambda sets: " and ".join(f"{plural(len(each), 'image')} ({each.fingerprint})" for each in sets),
    )


def _open_sets(config: LabelledConfig, blocks: int | None, source: ImageSet | None) -> Sets:
    several = config.several and (config.train is None or has_cells(config.source, config.labels))
    source, train = source or open_source(config.source, config.labels, several=several), None
    if config.train is not None:
        several = config.several and has_cells(config.train, config.train_labels)
        train_source = open_source(config.train, config.train_labels, several=several)
        train = open_subset(config.train, train_source)
    images = open_subset(config.source, source)
    (images if train is None else train).require_two_classes()
    if train is not None:
        sources = with_same_labels(train.source, source)
        train, images = map(labelled_subset, (train.name, images.name), sources)
    splits = choose_splits(source) if train is None else None
    if splits:
        log.info("%s", describe_use(source, *splits, images.name))
    is_given = train is not None
    train, val = divide(images, train, blocks=blocks, seed=getattr(config, "seed", 0))
    train.require_two_classes()
    if is_given or splits:
        name = f"train={train.name}" if is_given else train.name
        refuse_same_images(val.name, val.images, name, train.images)
        check_classes(train, val)
    return train, val


def refuse_same_images(name: str, source: ImageSet, train_name: str, train: ImageSet) -> None:
    """Refuse the very images that were learned from, whatever paths lead to them, and warn if some are."""
    name, learned = public(name), set(train.origins())
    shared = sum(origin in learned for origin in source.origins())
    if shared == len(source):
        advice = "give other images" + ", or leave out train" * train_name.startswith("train=")
        raise ValueError(f"all {plural(shared, 'image')} of {name} are in {train_name} too; {advice}")
    if shared:
        text = "%d of the %d images of %s are in %s too: the accuracy on these is too high"
        log.warning(text, shared, len(source), name, train_name)


def labelled_subset(name: str, source: ImageSet) -> LabelledSubset:
    """Return the labelled images of a source, which may be none."""
    codes, labels = source.codes(), source.labels
    indices = np.flatnonzero(codes >= 0)
    values = labels.values(codes[indices])
    return LabelledSubset(public(name), source, indices, values, labels.names, labels.task)


def open_subset(name: str, source: ImageSet) -> LabelledSubset:
    """Return the labelled images of a source, say what their labels are, or raise if there are none."""
    labelled = labelled_subset(name, source)
    unlabelled = len(source) - len(labelled)
    if unlabelled == len(source):
        advice = "sort them into one folder per class (a folder that all share is none), or give a CSV of "
        advice += "names and labels, as `dino-vit label` makes one: labels=FILE (train_labels=FILE of train=)"
        advice = "let it have `targets` or `label(i)`, or " + advice if is_object(name) else advice
        raise ValueError(f"none of the {len(source)} images of {labelled.name} has a label; {advice}")
    left_out = f"; {plural(unlabelled, 'image')} without a label" if unlabelled else ""
    log.info("%s: %s%s", labelled.name, source.labels.describe(source.codes(labelled.indices)), left_out)
    for line in alike_names(source.labels.names):
        log.warning("labels of %s %s", labelled.name, line)
    return labelled


@dataclass(frozen=True)
class LabelledFeatures:
    """Features of images and what is to be predicted of them, as in a `LabelledSubset`."""

    features: Tensor  # (n, D)
    targets: Tensor  # (n,) or (n, c)
    indices: Rows  # (n,), in the source
    classes: tuple[str, ...]
    task: Task = "multiclass"

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, rows: Rows) -> "LabelledFeatures":
        features, targets, indices = self.features[rows], self.targets[rows], self.indices[rows]
        return replace(self, features=features, targets=targets, indices=indices)


def labelled_features(
    frozen: FrozenBackbone, subset: LabelledSubset, spec: FeatureSpec = CLS, title: str = "features"
) -> LabelledFeatures:
    """Return the features of the readable images of a subset, on the device if they fit there."""
    stored, rows = joined_features(frozen, subset.images, spec=spec, title=title)
    values, targets = torch.from_numpy(stored), torch.from_numpy(subset.targets[rows])
    device = frozen.device
    if device.type != "cuda" or values.nbytes < _DEVICE_SHARE * torch.cuda.mem_get_info(device)[0]:
        values, targets = values.to(device), targets.to(device)
    return LabelledFeatures(values, targets, subset.indices[rows], subset.classes, subset.task)


def features_of_sets(
    frozen: FrozenBackbone, sets: Sets, spec: FeatureSpec = CLS
) -> tuple[LabelledFeatures, LabelledFeatures]:
    """Return the features of both sets, computed together if they are of one source."""
    first, second = sets
    if first.source is not second.source:
        titles = "features of the images to learn from", "features of the images to judge by"
        train, val = (
            labelled_features(frozen, each, spec, title) for each, title in zip(sets, titles, strict=True)
        )
        return train, val
    if first is second:
        features = labelled_features(frozen, first, spec)
        return features, features
    indices = np.concatenate([each.indices for each in sets])
    targets, order = np.concatenate([each.targets for each in sets]), np.argsort(indices)
    joined = labelled_features(frozen, replace(first, indices=indices[order], targets=targets[order]), spec)
    train, val = (joined[np.flatnonzero(np.isin(joined.indices, each.indices))] for each in sets)
    if not (len(train) and len(val)):
        raise ValueError(f"none of the {len(second if len(train) else first):,} images of a set can be read")
    return train, val
