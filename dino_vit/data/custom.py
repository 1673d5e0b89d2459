"""A source of the user's own: an object with `read(i)` and `name(i)`, or a PyTorch Dataset."""

import hashlib
import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from dino_vit.config.objects import find, title_of
from dino_vit.core import log
from dino_vit.core.text import plural, printable, progress
from dino_vit.data.images.decode import from_given
from dino_vit.data.labels import Labels, number_labels
from dino_vit.data.sources.source import is_image, spread

LOOKED_AT = 8  # items, for labels in them
FINGERPRINTED = 4  # images that tell a source from others with the same names
TARGETS = ("targets", "labels", "_labels")  # where data sets, those of torchvision too, keep their labels


class CustomSource:
    """Wrap an object with a length, and `read(i)` or `object[i]`, which return an image.

    An image is the bytes of a file, a path, a Pillow image (whose alpha is dropped), an array (H, W, C) or a
    tensor (C, H, W). An item may also be a tuple of an image and its label, or a row of a Hugging Face
    `Dataset`. It must be the same at every call. `name(i)`, `label(i)`, `targets`, `classes` and
    `fingerprint` are used where the object has them; a `Subset` and a `ConcatDataset` have those of their
    parts.
    """

    def __init__(self, given: Any) -> None:
        if not hasattr(given, "__len__") or not (hasattr(given, "read") or hasattr(given, "__getitem__")):
            raise ValueError(f"{title_of(given)} is no source of images: give it __len__, and read(i) or [i]")
        self.given = _with_hub_rows(given)
        if not len(self):
            raise ValueError(f"{title_of(given)} has no images")
        self._labels = _labels_of(self.given)
        self.classes: Sequence[str] = tuple(self._labels.classes)
        stated = getattr(self.given, "fingerprint", None)
        self.fingerprint = str(stated or self._digest())
        self.stamp = "" if stated else None  # images of code change without a trace

    def __len__(self) -> int:
        return len(self.given)

    def read(self, index: int) -> bytes | Tensor:
        part, row, _ = _locate(self.given, index)
        read = _method(part, "read")
        try:
            item = read(row) if read else part[row]
            return from_given(item[0] if isinstance(item, tuple) else item)
        except (OSError, ValueError):
            raise
        except Exception as error:  # of any kind, as the code is not ours; the image counts as unreadable
            raise ValueError(f"{type(error).__name__}: {error}") from error

    def label(self, index: int) -> int | None:
        return self._labels.of(index)

    def name(self, index: int) -> str:
        part, row, prefix = _locate(self.given, index)
        samples = getattr(part, "samples", None)  # of torchvision's folders: path and class
        if name := _method(part, "name"):
            return printable(f"{prefix}{name(row)}")
        return printable(f"{prefix}{samples[row][0] if isinstance(samples, list) else row}")

    @property
    def title(self) -> str:
        """What tells this source from others, such as another part of the same data set."""
        digest = hashlib.sha256(self.fingerprint.encode()).hexdigest()
        return f"{title_of(self.given)}-{digest[:12]}"

    def _digest(self) -> str:
        """Return a digest of the names and of a few images."""
        digest = hashlib.sha256("\n".join(self.name(index) for index in range(len(self))).encode())
        for index in spread(len(self), FINGERPRINTED):
            with suppress(Exception):  # an image that cannot be read is met when it is used
                item = self.read(index)
                digest.update(item if isinstance(item, bytes) else item.contiguous().numpy().tobytes())
        return f"{title_of(self.given)}-{len(self)}-{digest.hexdigest()[:32]}"


class _HubRows:
    """The rows of a Hugging Face `Dataset`, their images as they are stored."""

    __name__ = "Dataset"

    def __init__(self, dataset: Any) -> None:
        from datasets import Image

        from dino_vit.data.sources.tables import find_columns

        if dataset.format["type"] == "custom":
            log.warning("the transform of the Dataset is not applied: its images are read as they are stored")
        self.fingerprint = dataset._fingerprint  # of the rows and of all that was done with them
        rows = dataset.with_format(None)
        self.columns = find_columns("the Dataset", rows.features.arrow_schema)
        if isinstance(rows.features[self.columns.image], Image):
            rows = rows.cast_column(self.columns.image, Image(decode=False))
        self.names = list(rows[self.columns.name]) if self.columns.name else None
        self.targets = list(rows[self.columns.label]) if self.columns.label else None
        self.classes = self.columns.classes
        self.images = rows.select_columns([self.columns.image])

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> object:
        image = self.images[index][self.columns.image]
        if isinstance(image, dict):
            return image["path"] if image["bytes"] is None else image["bytes"]
        return image

    def name(self, index: int) -> str:
        return str(index) if self.names is None else str(self.names[index])


def _with_hub_rows(given: Any) -> Any:
    """Return a data set with the `_HubRows` of each Hugging Face `Dataset` in it."""
    if isinstance(given, Subset):
        return Subset(_with_hub_rows(given.dataset), given.indices)
    if isinstance(given, ConcatDataset):
        return ConcatDataset(map(_with_hub_rows, given.datasets))
    return _HubRows(given) if hasattr(given, "cast_column") else given


def _locate(given: Any, index: int, prefix: str = "") -> tuple[Any, int, str]:
    """Return the data set that has an item, its index there, and what is written before its name there."""
    if isinstance(given, Subset):
        return _locate(given.dataset, int(given.indices[index]), prefix)
    if isinstance(given, ConcatDataset):
        number = bisect_right(given.cumulative_sizes, index)
        before = given.cumulative_sizes[number - 1] if number else 0
        return _locate(given.datasets[number], index - before, f"{prefix}{number}/")
    return given, index, prefix


def _method(given: Any, name: str) -> Callable[[int], Any] | None:
    method = getattr(given, name, None)  # a data set may have a `name` that is a text
    return method if callable(method) else None


def _classes_of(given: Any) -> list[str] | None:
    classes = getattr(given, "classes", None)
    return None if classes is None or callable(classes) else [str(name) for name in classes]


def _labels_of(given: Any) -> Labels:
    """Return the labels of all items, as the classes of their data sets number them if those are the same."""
    places = [_locate(given, index)[:2] for index in range(len(given))]
    parts = {id(part): part for part, _ in places}
    labels = {key: _labels_of_part(part) for key, part in parts.items()}
    numbers = [labels[id(part)].of(row) for part, row in places]
    classes, *others = map(_classes_of, parts.values())
    same = all(labels[key].classes == classes for key in parts)  # not of lists: those name what they join
    if same and classes is not None and all(other == classes for other in others):
        return number_labels(numbers, classes)
    names = [labels[id(part)].classes for part, _ in places]
    return number_labels([None if n is None else of[n] for n, of in zip(numbers, names, strict=True)])


def _labels_of_part(part: Any) -> Labels:
    targets = _targets_of(part)
    if len(targets) != len(part):
        text = f"{title_of(part)} has {len(targets):,} targets, but {plural(len(part), 'image')}"
        raise ValueError(f"{text}; each needs one, which may be None")
    # As torchvision says that there is no label.
    labels = [None if isinstance(value, int | np.integer) and value == -1 else value for value in targets]
    return number_labels(labels, _classes_of(part), title_of(part))


def _targets_of(given: Any) -> list[Any]:
    """Return the label of each item: a class or its name, None without one."""
    if label := _method(given, "label"):
        return [label(index) for index in range(len(given))]
    for name in TARGETS:
        targets: Any = getattr(given, name, None)
        if targets is not None and not callable(targets):
            return targets.tolist() if hasattr(targets, "tolist") else list(targets)
    return _read_targets(given)


def _read_targets(given: Any) -> list[Any]:
    """Return the labels in items that are tuples, which takes as long as to read all images."""
    targets: list[Any] = [None] * len(given)
    if _method(given, "read") or all(_label_in(given, i) is None for i in spread(len(given), LOOKED_AT)):
        return targets
    log.info("%s has no `targets`: all its items are read for their labels", title_of(given))
    with progress(f"Reading labels of {title_of(given)}", len(given)) as advance:
        for index in range(len(given)):
            targets[index] = _label_in(given, index)
            advance(1)
    return targets


def _label_in(given: Any, index: int) -> object:
    """Return the label in an item that is a tuple of image and label, −1 for none; None if it is not."""
    with suppress(Exception):  # an image that cannot be read is met when it is used
        _, label, *_ = item = given[index]
        label = -1 if label is None else label
        label = label.tolist() if hasattr(label, "tolist") else label
        values = label if isinstance(label, list) else [label]
        if isinstance(item, tuple) and all(isinstance(value, str | int | float) for value in values):
            return label
    return None


def names_sources(given: object) -> bool:
    """Tell whether a list is of sources, by their paths, and not of images."""
    each = given if isinstance(given, list | tuple) else [None]
    return all(isinstance(path, str | os.PathLike) and not is_image(os.fspath(path)) for path in each)


def open_custom(spec: str) -> CustomSource:
    """Open the object that `python:MODULE:NAME` names."""
    given = find(spec)
    return given if isinstance(given, CustomSource) else CustomSource(given)
