"""Labelled images: as sets, as features, as augmented batches; and training on them epoch by epoch."""

import hashlib
import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn
from torch.optim import Optimizer

from dino_vit.config.objects import is_object
from dino_vit.config.settings import Count, Few, Problem, Seed, Settings, setting
from dino_vit.core import log
from dino_vit.core.checkpoint import Checkpoints, collect, restore
from dino_vit.core.distributed import all_equal, is_main_process, rank, world_size
from dino_vit.core.randomness import RngPurpose, random_bits
from dino_vit.core.runtime import cores_of_a_process
from dino_vit.core.text import brief, plural
from dino_vit.data.sources.open import open_source
from dino_vit.data.sources.source import Source, Subset
from dino_vit.data.splits import choose_splits, describe_use
from dino_vit.eval.features import CLS, FeatureSpec
from dino_vit.eval.frozen import FrozenBackbone
from dino_vit.views.augment import Augment
from dino_vit.views.eval_transform import EvalTransform
from dino_vit.views.geometry import View
from dino_vit.views.loader import Loader
from dino_vit.views.sampler import Sampler

Rows = NDArray[np.int64]

_NAMES_SHOWN = 5
_VAL_SHARE = 5  # one in so many images is for validation where no training set is given
_HELD_OUT_SHARE = 10  # one in so many training images is held out for model selection
_DEVICE_SHARE = 0.25  # of the free memory, for the features of a set


class SupervisedConfig(Settings):
    """Labelled images to evaluate a classifier on, and to train it on."""

    source: str = Field(description="labelled images to evaluate on: folder, list, archives, ...")
    labels: str | None = setting(None, "CSV or JSON file with the labels of source; null: the source's own")
    train: str | None = setting(
        None, "images to train on; null: the split train of source, or all of it but a fifth"
    )
    train_labels: str | None = setting(None, "CSV or JSON file with the labels of train; null: its own")
    seed: Seed = setting(0, "of all random numbers")

    positional: ClassVar = ("source",)


class FewShotConfig(SupervisedConfig):
    """Classify with few training images, too."""

    shots: tuple[Count, ...] = setting((), "also train on only this many images per class, such as 1 and 5")
    repeats: Few = setting(5, "random choices of the images for each of shots")

    def contradictions(self) -> Iterator[Problem]:
        """Yield settings that would have no effect."""
        if self.repeats != type(self).model_fields["repeats"].default and not self.shots:
            yield Problem("repeats has no effect without shots", ("repeats", "shots"))


@dataclass(frozen=True)
class LabelledSubset:
    """Images of a source that have a label, and their classes from 0 on."""

    source: Source
    indices: NDArray[np.int64]  # in the source, ascending
    targets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, rows: NDArray[np.bool_]) -> "LabelledSubset":
        return LabelledSubset(self.source, self.indices[rows], self.targets[rows])

    @property
    def is_whole_source(self) -> bool:
        return len(self.indices) == len(self.source)

    @property
    def images(self) -> Source:
        """These images as a source of their own."""
        return self.source if self.is_whole_source else Subset(self.source, self.indices)

    @property
    def fingerprint(self) -> str:
        """Tell the images and their classes from others."""
        return f"{self.images.fingerprint}-{hashlib.sha256(self.targets.tobytes()).hexdigest()[:16]}"

    def require_two_classes(self, name: str) -> None:
        """Raise an error that names the source unless there is something to classify."""
        if (self.targets == self.targets[0]).all():
            only = self.source.classes[int(self.targets[0])]
            raise ValueError(
                f"all labelled images of {name} are of one class, {only}; two or more are needed"
            )


@dataclass(frozen=True)
class LabelledSets:
    """A training and a validation set, what they are called, and the names of their classes."""

    train: LabelledSubset
    val: LabelledSubset
    classes: tuple[str, ...]
    train_name: str
    val_name: str


def sets_or_images(config: SupervisedConfig) -> LabelledSets | LabelledSubset:
    """Open both sets: those that are given, or the splits of the source; without these, all its images."""
    val = open_subset(config.source, config.labels)
    if config.train is None:
        splits = choose_splits(val.source)
        if splits is None:
            val.require_two_classes(config.source)
            return val
        log.info("%s", describe_use(val.source, splits, config.source))
        indices, held_out = val.indices, splits.held_out_images
        in_train = (indices >= splits.train_images.start) & (indices < splits.train_images.stop)
        in_val = (indices >= held_out.start) & (indices < held_out.stop)
        names = f"{config.source}/{splits.train}", f"{config.source}/{splits.held_out}"
        return _with_classes_of_train(val[in_train], val[in_val], *names)
    train = open_subset(config.train, config.train_labels, "train_labels")
    return _with_classes_of_train(train, val, config.train, config.source)


def open_sets(config: SupervisedConfig) -> LabelledSets:
    """Open both sets; of a source without splits a fifth, chosen by the seed, is for validation."""
    sets = sets_or_images(config)
    if isinstance(sets, LabelledSets):
        return sets
    bits = random_bits(config.seed, RngPurpose.EVALUATION, sets.indices)
    chosen = np.zeros(len(sets), dtype=bool)
    chosen[np.argsort(bits, kind="stable")[: max(1, len(sets) // _VAL_SHARE)]] = True
    classes, name = tuple(sets.source.classes), config.source
    return LabelledSets(sets[~chosen], sets[chosen], classes, f"the rest of {name}", f"a fifth of {name}")


def _with_classes_of_train(
    train: LabelledSubset, val: LabelledSubset, train_name: str, val_name: str
) -> LabelledSets:
    """Number the classes of both sets as the training set does."""
    train.require_two_classes(train_name)
    classes = train.source.classes
    present = np.unique(train.targets)
    numbers = renumber(
        val.targets, val.source.classes, [classes[target] for target in present], name=val_name
    )
    val = LabelledSubset(val.source, val.indices, present[numbers])
    return LabelledSets(train, val, tuple(classes), train_name, val_name)


def renumber(
    targets: NDArray[np.int64], classes: Sequence[str], train_classes: Sequence[str], *, name: str
) -> NDArray[np.int64]:
    """Return targets in `classes` as indices into the classes of the training set, matched by name.

    Two folders need not have the same classes, so equal numbers need not be equal classes.
    """
    number = {of_class: index for index, of_class in enumerate(train_classes)}
    unknown = [classes[target] for target in np.unique(targets) if classes[target] not in number]
    if unknown:
        more = f" and {len(unknown) - _NAMES_SHOWN} more" if len(unknown) > _NAMES_SHOWN else ""
        raise ValueError(
            f"{name} has classes that are not among the {len(number)} of the training set: "
            f"{', '.join(map(brief, unknown[:_NAMES_SHOWN]))}{more}. "
            "Classes of the two sets are matched by name."
        )
    return np.array([number.get(of_class, -1) for of_class in classes], dtype=np.int64)[targets]


def open_subset(spec: str, labels: str | None, labels_setting: str = "labels") -> LabelledSubset:
    """Open the labelled images of a source; an error names the setting that could give labels."""
    source = open_source(spec, labels)
    numbers = (source.label(index) for index in range(len(source)))
    targets = np.fromiter((-1 if number is None else number for number in numbers), np.int64, len(source))
    indices = np.flatnonzero(targets >= 0)
    if not len(indices):
        advice = "sort them into one folder per class"
        if is_object(spec):
            advice = "let the object have `targets` or `label(i)`"
        raise ValueError(
            f"none of the {len(source)} images of {spec} has a label; {advice}, or give "
            f"{labels_setting}=FILE with a line for each image"
        )
    return LabelledSubset(source, indices, targets[indices])


@dataclass(frozen=True)
class LabelledFeatures:
    """Features of images, (n, D), their classes, (n,), and their indices in the source, (n,)."""

    features: Tensor
    targets: Tensor
    indices: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, rows: NDArray[np.int64]) -> "LabelledFeatures":
        return LabelledFeatures(self.features[rows], self.targets[rows], self.indices[rows])


def labelled_features(
    frozen: FrozenBackbone, subset: LabelledSubset, spec: FeatureSpec = CLS, title: str = "features"
) -> LabelledFeatures:
    """Return the features of the readable images of a subset, on the device if they fit there."""
    indices = None if subset.is_whole_source else subset.indices.tolist()
    stored = frozen.features(subset.source, spec=spec, indices=indices, title=title)
    values = torch.from_numpy(stored.values)
    targets = torch.from_numpy(subset.targets[np.searchsorted(subset.indices, stored.indices)])
    device = frozen.device
    if device.type != "cuda" or values.nbytes < _DEVICE_SHARE * torch.cuda.mem_get_info(device)[0]:
        values, targets = values.to(device), targets.to(device)
    return LabelledFeatures(values, targets, stored.indices)


def hold_out(train: LabelledFeatures, seed: int) -> tuple[LabelledFeatures, LabelledFeatures]:
    """Split off a tenth for model selection by the seed; return the rest and the held-out part."""
    order = np.argsort(random_bits(seed, RngPurpose.EVALUATION, np.arange(len(train))), kind="stable")
    held_out = max(1, len(order) // _HELD_OUT_SHARE)
    return train[order[held_out:]], train[order[:held_out]]


def few_shot_banks(config: FewShotConfig, bank: LabelledFeatures) -> Iterator[tuple[int, list[Rows]]]:
    """Yield each number of shots with the rows of the bank that each repeat trains on."""
    targets = bank.targets.cpu().numpy()
    counts = np.unique(targets, return_counts=True)[1]
    for shots in config.shots:
        if short := int((counts < shots).sum()):
            text = "%s per class: %s of %d with fewer, all of whose images are taken"
            classes = plural(short, "class", "classes")
            log.warning(text, plural(shots, "image"), classes, len(counts))
        repeats = range(config.repeats)
        yield shots, [few_shot_rows(targets, bank.indices, shots, config.seed, repeat) for repeat in repeats]


def few_shot_rows(targets: Rows, keys: Rows, shots: int, seed: int, repeat: int) -> Rows:
    """Choose `shots` rows of each class, ascending: a function of the seed, the repeat and the rows' keys."""
    bits = random_bits(seed, RngPurpose.EVALUATION, repeat, keys)
    order = np.lexsort((bits, targets))
    sorted_targets = targets[order]
    rank_in_class = np.arange(len(targets)) - np.searchsorted(sorted_targets, sorted_targets)
    return np.sort(order[rank_in_class < shots])


class SupervisedLoader:
    """This process's share of every batch of augmented, normalised images and their classes, on the device.

    A global batch larger than the subset becomes the subset, rounded down to what processes share evenly.
    """

    def __init__(
        self,
        subset: LabelledSubset,
        *,
        view: View,
        transform: EvalTransform,
        batch_size: int,
        seed: int,
        workers: int | None,
        device: torch.device,
    ) -> None:
        processes = world_size()
        self.global_batch = processes * min(batch_size, len(subset) // processes)
        if not self.global_batch:
            raise ValueError(f"{len(subset)} images are too few to train on in {processes} processes")
        sampler = Sampler(
            length=len(subset), batch_size=self.global_batch, seed=seed, rank=rank(), world_size=processes
        )
        self.steps_per_epoch = sampler.steps_per_epoch
        self.loader = Loader(
            source=subset.images,
            views=(view,),
            sampler=sampler,
            pixels=transform.pixels,
            workers=min(cores_of_a_process(processes) - 1, 16) if workers is None else workers,
            pin=device.type == "cuda",
        )
        self.size, self.device = view.size, device
        self.augment = Augment(
            mean=transform.mean, std=transform.std, sigma_max=view.augment.blur_sigma[1]
        ).to(device)
        self.targets = torch.from_numpy(subset.targets)

    def batches(self, step: int = 0) -> Generator[tuple[Tensor, Tensor]]:
        """Yield batches from a step on, without end; closing the iterator ends the loader's processes."""
        with closing(self.loader.batches(step)) as batches:
            for batch in batches:
                views = batch.views[self.size].to(self.device, non_blocking=True)
                targets = self.targets[batch.read].to(self.device, non_blocking=True)
                yield self.augment(views, batch.augment[self.size]), targets


class Epochs:
    """The figures of every finished epoch, and a checkpoint after each from which the same training resumes.

    `facts` are all that the training depends on, for JSON; a folder with other facts is refused.
    """

    def __init__(
        self, folder: Path, module: nn.Module, optimizer: Optimizer, facts: Mapping[str, Any]
    ) -> None:
        self.module, self.optimizer = module, optimizer
        self.facts = json.loads(json.dumps(facts))
        self.checkpoints = Checkpoints(folder)
        self.history: list[dict[str, Any]] = []
        if checkpoint := self.checkpoints.newest():
            saved = checkpoint.metadata.get("facts") or {}
            changed = sorted(key for key, value in self.facts.items() if value != saved.get(key))
            if changed:
                raise ValueError(
                    f"{folder} holds a run with another {' and '.join(changed)}; give another output, or "
                    "move that folder away"
                )
            restore(checkpoint, {"model": module}, optimizer)
            self.history = checkpoint.metadata["history"]
            log.info("%s: resuming after epoch %d", folder, self.finished)
        if not all_equal(self.finished):
            raise ValueError(
                f"the processes found {folder} at different epochs: all nodes must share one folder"
            )

    @property
    def finished(self) -> int:
        return len(self.history)

    def finish(self, **figures: Any) -> None:
        """Save the state after an epoch with its figures."""
        self.history.append({"epoch": self.finished + 1, **figures})
        if is_main_process():
            tensors = collect({"model": self.module}, self.optimizer)
            self.checkpoints.save(self.finished, tensors, {"facts": self.facts, "history": self.history})
