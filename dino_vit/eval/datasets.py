"""Sets to learn a classification from and to try it on: labelled images, their classes on one numbering."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dino_vit.core.randomness import RngPurpose, random_bits
from dino_vit.data.sources.open import open_source
from dino_vit.data.sources.source import Source, Subset
from dino_vit.eval.features.extraction import CLS, FeatureSpec
from dino_vit.eval.features.frozen import FrozenBackbone

_NAMES_SHOWN = 5
TRIED_ON = 5  # one of so many images is held out where there is one set alone
HELD_OUT = 10  # one of so many training images, to choose on
_DEVICE_SHARE = 0.5  # of the free memory, for features


@dataclass(frozen=True)
class LabelledSubset:
    """Images of a source that have a label, and their classes from 0 on."""

    source: Source
    indices: NDArray[np.int64]  # in the source, ascending
    targets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def whole(self) -> bool:
        """Whether these are all images of the source."""
        return len(self.indices) == len(self.source)

    @property
    def images(self) -> Source:
        """These images alone."""
        return self.source if self.whole else Subset(self.source, self.indices)


@dataclass(frozen=True)
class LabelledSets:
    """What is learned from, what is tried on, and the names of the classes of both."""

    train: LabelledSubset
    val: LabelledSubset
    classes: tuple[str, ...]


def open_sets(
    source: str,
    *,
    labels: str | None = None,
    train: str | None = None,
    train_labels: str | None = None,
    seed: int = 0,
) -> LabelledSets:
    """Open both sets; where there is one alone, a fifth of it, by the seed, is held out to be tried on."""
    val = _labelled(source, labels, "labels")
    if train is None:
        _refuse_one_class(val, source)
        bits = random_bits(seed, RngPurpose.EVALUATION, val.indices)
        held_out = np.zeros(len(val), dtype=bool)
        held_out[np.argsort(bits, kind="stable")[: max(1, len(val) // TRIED_ON)]] = True
        return LabelledSets(_rows(val, ~held_out), _rows(val, held_out), tuple(val.source.classes))
    learned = _labelled(train, train_labels, "train_labels")
    _refuse_one_class(learned, train)
    classes = learned.source.classes
    targets = renumber(val.targets, val.source.classes, classes, where=source)
    return LabelledSets(learned, LabelledSubset(val.source, val.indices, targets), tuple(classes))


def open_part(source: str, labels: str | None = None) -> tuple[LabelledSubset, tuple[str, ...]]:
    """Open one set alone, with the names of its classes."""
    part = _labelled(source, labels, "labels")
    return part, tuple(part.source.classes)


def _labelled(spec: str, file: str | None, setting: str) -> LabelledSubset:
    source = open_source(spec, file)
    numbers = (source.label(index) for index in range(len(source)))
    labels = np.fromiter((-1 if one is None else one for one in numbers), np.int64, len(source))
    indices = np.flatnonzero(labels >= 0)
    if not len(indices):
        raise ValueError(
            f"none of the {len(source)} images of {spec} has a label; sort them into a folder for each "
            f"class, or give {setting}=FILE with a line for each image"
        )
    return LabelledSubset(source, indices, labels[indices])


def _refuse_one_class(part: LabelledSubset, spec: str) -> None:
    if len(set(part.targets.tolist())) < 2:
        name = part.source.classes[int(part.targets[0])]
        raise ValueError(
            f"all labelled images of {spec} are of one class, {name}: there is nothing to tell apart"
        )


def _rows(part: LabelledSubset, chosen: NDArray[np.bool_]) -> LabelledSubset:
    return LabelledSubset(part.source, part.indices[chosen], part.targets[chosen])


def renumber(
    labels: NDArray[np.integer], classes: Sequence[str], known: Sequence[str], *, where: str
) -> NDArray[np.int64]:
    """Return labels of `classes` as numbers of the `known` ones, met by name; −1 stays −1.

    Two folders need not have the same classes, so that equal numbers need not be equal classes.
    """
    number = {name: place for place, name in enumerate(known)}
    used = sorted(set(labels[labels >= 0].tolist()))
    strange = [classes[label] for label in used if classes[label] not in number]
    if strange:
        more = f" and {len(strange) - _NAMES_SHOWN} more" if len(strange) > _NAMES_SHOWN else ""
        raise ValueError(
            f"{where} has classes that are not among the {len(known)} that are learned: "
            f"{', '.join(strange[:_NAMES_SHOWN])}{more}. Sets meet by the names of their classes."
        )
    table = np.array([number.get(name, -1) for name in classes] + [-1], dtype=np.int64)
    return table[labels]


@dataclass(frozen=True)
class Labelled:
    """Features of images, (n, D), and their classes, (n,)."""

    features: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)


def labelled_features(
    frozen: FrozenBackbone, part: LabelledSubset, kind: FeatureSpec, title: str
) -> Labelled:
    """Return the features of the readable images of a part, on the device if it has room for them."""
    stored = frozen.features(
        part.source,
        kind=kind,
        indices=None if part.whole else part.indices.tolist(),
        # The CLS token alone is what k-NN keeps too; more of them at no more digits than they have.
        dtype="float32" if frozen.autocast is None or kind == CLS else "float16",
        title=title,
    )
    targets = torch.from_numpy(part.targets[np.searchsorted(part.indices, stored.indices)])
    values = torch.from_numpy(stored.values)
    if _has_room(frozen.device, values):
        values, targets = values.to(frozen.device), targets.to(frozen.device)
    return Labelled(values, targets)


def _has_room(device: torch.device, values: Tensor) -> bool:
    if device.type == "cuda":
        return values.nbytes < _DEVICE_SHARE * torch.cuda.mem_get_info(device)[0]
    return True


def hold_out(train: Labelled, seed: int) -> tuple[Labelled, Labelled]:
    """Return what is left to learn from, and what is held out to choose on: a function of the seed."""
    bits = random_bits(seed, RngPurpose.EVALUATION, np.arange(len(train)))
    order = torch.from_numpy(np.argsort(bits, kind="stable")).to(train.targets.device)
    held_out, learned = order.tensor_split([max(1, len(order) // HELD_OUT)])
    return (
        Labelled(train.features[learned], train.targets[learned]),
        Labelled(train.features[held_out], train.targets[held_out]),
    )
