"""A source of the user's own: an object with `read(i)` and `name(i)`, or a PyTorch Dataset."""

import hashlib
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
from dino_vit.data.sources.source import spread

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
            raise ValueError(
                f"{title_of(given)} is not a source of images: it needs __len__, and read(i) or [i]"
            )
        self.given = _with_hub_rows(given)
        if not len(self):
            raise ValueError(f"{title_of(given)} has no images")
        self._labels = _number_targets(self.given)
        self.classes: Sequence[str] = tuple(self._labels.classes)
        stated = getattr(self.given, "fingerprint", None)
        self.fingerprint = str(stated or self._digest())
        self.stamp = "" if stated else None  # images of code change without a trace

    def __len__(self) -> int:
        return len(self.given)

    def read(self, index: int) -> bytes | Tensor:
        read = _method(self.given, "read")
        try:
            item = read(index) if read else self.given[index]
            return from_given(item[0] if isinstance(item, tuple) else item)
        except (OSError, ValueError):
            raise
        except Exception as error:  # of any kind, as the code is not ours; the image counts as unreadable
            raise ValueError(f"{type(error).__name__}: {error}") from error

    def label(self, index: int) -> int | None:
        return self._labels.of(index)

    def name(self, index: int) -> str:
        return printable(_name_of(self.given, index))

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


def _method(given: Any, name: str) -> Callable[[int], Any] | None:
    method = getattr(given, name, None)  # a data set may have a `name` that is a text
    return method if callable(method) else None


def _name_of(given: Any, index: int) -> str:
    if isinstance(given, Subset):
        return _name_of(given.dataset, given.indices[index])
    if isinstance(given, ConcatDataset):
        number = bisect_right(given.cumulative_sizes, index)
        before = given.cumulative_sizes[number - 1] if number else 0
        return f"{number}/{_name_of(given.datasets[number], index - before)}"
    if name := _method(given, "name"):
        return str(name(index))
    samples = getattr(given, "samples", None)  # of torchvision's folders: path and class
    return str(samples[index][0]) if isinstance(samples, list) else str(index)


def _classes_of(given: Any) -> list[str] | None:
    if isinstance(given, Subset):
        return _classes_of(given.dataset)
    if isinstance(given, ConcatDataset):
        first, *others = map(_classes_of, given.datasets)
        return first if all(classes == first for classes in others) else None
    classes = getattr(given, "classes", None)
    return None if classes is None or callable(classes) else [str(name) for name in classes]


def _number_targets(given: Any) -> Labels:
    """Return the labels of all items, as the classes of the data set number them if it has any."""
    targets, classes, title = _targets_of(given), _classes_of(given), title_of(given)
    if len(targets) != len(given):
        text = f"{title} has {len(targets):,} targets, but {plural(len(given), 'image')}"
        raise ValueError(f"{text}; each needs one, which may be None")
    # As torchvision says that there is no label.
    targets = [
        None if isinstance(target, int | np.integer) and target == -1 else target for target in targets
    ]
    if classes is None:
        return number_labels(targets)
    numbers: dict[object, int] = {name: number for number, name in enumerate(classes)}
    numbers |= {number: number for number in range(len(classes))} | {None: -1}
    if unknown := [target for target in targets if target not in numbers]:
        text = f"{title} has the label {unknown[0]!r}, which is none of its"
        raise ValueError(f"{text} {len(classes)} classes, nor the index of one")
    return Labels(np.array([numbers[target] for target in targets], dtype=np.int32), classes)


def _targets_of(given: Any) -> list[Any]:
    """Return the label of each item: a class or its name, None without one."""
    if isinstance(given, Subset):
        targets = _targets_of(given.dataset)
        return [targets[index] for index in given.indices]
    if isinstance(given, ConcatDataset):
        parts = [_number_targets(part) for part in given.datasets]
        if _classes_of(given) is not None:
            return np.concatenate([part.numbers for part in parts]).tolist()
        return [None if n < 0 else part.classes[n] for part in parts for n in part.numbers.tolist()]
    if label := _method(given, "label"):
        return [label(index) for index in range(len(given))]
    for name in TARGETS:
        found: Any = getattr(given, name, None)
        if found is not None and not callable(found):
            return found.tolist() if hasattr(found, "tolist") else list(found)
    return _read_targets(given)


def _read_targets(given: Any) -> list[Any]:
    """Return the labels in items that are tuples, which takes as long as to read all images."""
    targets: list[Any] = [None] * len(given)
    if _method(given, "read") or _label_in(given, 0) is None:
        return targets
    log.info("%s has no `targets`: all its items are read for their labels", title_of(given))
    with progress(f"Reading labels of {title_of(given)}", len(given)) as advance:
        for index in range(len(given)):
            targets[index] = _label_in(given, index)
            advance(1)
    return targets


def _label_in(given: Any, index: int) -> str | int | None:
    """Return the label in an item that is a tuple of image and label, None if it is not or cannot be read."""
    with suppress(Exception):  # an image that cannot be read is met when it is used
        _, label, *_ = item = given[index]
        label = label.item() if hasattr(label, "item") else label
        return label if isinstance(item, tuple) and isinstance(label, str | int) else None
    return None


def open_custom(spec: str) -> CustomSource:
    """Open the object that `python:MODULE:NAME` names."""
    given = find(spec)
    return given if isinstance(given, CustomSource) else CustomSource(given)
