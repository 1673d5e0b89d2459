"""A source of the user's own: an object with `read(i)` and `name(i)`, or a PyTorch Dataset."""

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from torch import Tensor

from dino_vit.config.objects import find, title_of
from dino_vit.core.text import plural, printable
from dino_vit.data.images.decode import from_given
from dino_vit.data.labels import Labels, number_labels
from dino_vit.data.sources.source import spread

FINGERPRINTED = 4  # images that tell a source from others with the same names


class CustomSource:
    """Wrap an object with a length, and `read(i)` or `object[i]`, which return an image.

    An image is the bytes of a file, a path, a Pillow image (whose alpha is dropped), an array (H, W, C) or a
    tensor (C, H, W); of a tuple the first. It must be the same at every call. `name(i)`, `label(i)`,
    `targets`, `classes` and `fingerprint` are used where the object has them.
    """

    def __init__(self, given: Any) -> None:
        if not hasattr(given, "__len__") or not (hasattr(given, "read") or hasattr(given, "__getitem__")):
            raise ValueError(
                f"{title_of(given)} is not a source of images: it needs __len__, and read(i) or [i]"
            )
        self.given = given
        if not len(self):
            raise ValueError(f"{title_of(given)} has no images")
        self._labels = self._read_labels()
        self.classes: Sequence[str] = tuple(self._labels.classes)
        stated = getattr(given, "fingerprint", None)
        self.fingerprint = str(stated or self._digest())
        self.stamp = "" if stated else None  # images of code change without a trace

    def __len__(self) -> int:
        return len(self.given)

    def read(self, index: int) -> bytes | Tensor:
        read = self._method("read")
        try:
            item = read(index) if read else self.given[index]
            image = item[0] if isinstance(item, tuple) else item
            return from_given(image)
        except (OSError, ValueError):
            raise
        except Exception as error:  # of any kind, as the code is not ours; the image counts as unreadable
            raise ValueError(f"{type(error).__name__}: {error}") from error

    def label(self, index: int) -> int | None:
        return self._labels.of(index)

    def name(self, index: int) -> str:
        name = self._method("name")
        return printable(name(index)) if name else str(index)

    @property
    def title(self) -> str:
        """What tells this source from others, such as another part of the same data set."""
        digest = hashlib.sha256(self.fingerprint.encode()).hexdigest()
        return f"{title_of(self.given)}-{digest[:12]}"

    def _method(self, name: str) -> Callable[[int], Any] | None:
        method = getattr(self.given, name, None)  # a data set may have a `name` that is a text
        return method if callable(method) else None

    def _read_labels(self) -> Labels:
        """Return the labels: those that the object has, as its own classes number them if it has any."""
        label, targets = self._method("label"), getattr(self.given, "targets", None)
        classes = getattr(self.given, "classes", None)
        if label:
            targets = [label(index) for index in range(len(self))]
        elif targets is None:
            targets = [None] * len(self)
        elif hasattr(targets, "tolist"):  # a tensor or an array
            targets = targets.tolist()
        if len(targets) != len(self):
            text = f"{title_of(self.given)} has {len(targets):,} targets, but {plural(len(self), 'image')}"
            raise ValueError(f"{text}; each needs one, which may be None")
        # As torchvision says that there is no label.
        targets = [
            None if isinstance(target, int | np.integer) and target == -1 else target for target in targets
        ]
        if classes is None or callable(classes):
            return number_labels(targets)
        names = [str(name) for name in classes]
        numbers: dict[object, int] = {name: number for number, name in enumerate(names)}
        numbers |= {number: number for number in range(len(names))} | {None: -1}
        if unknown := [target for target in targets if target not in numbers]:
            text = f"{title_of(self.given)} has the label {unknown[0]!r}, which is none of its"
            raise ValueError(f"{text} {len(names)} classes, nor the index of one")
        return Labels(np.array([numbers[target] for target in targets], dtype=np.int32), names)

    def _digest(self) -> str:
        """Return a digest of the names and of a few images."""
        digest = hashlib.sha256("\n".join(self.name(index) for index in range(len(self))).encode())
        for index in spread(len(self), FINGERPRINTED):
            with suppress(Exception):  # an image that cannot be read is met when it is used
                item = self.read(index)
                digest.update(item if isinstance(item, bytes) else item.contiguous().numpy().tobytes())
        return f"{title_of(self.given)}-{len(self)}-{digest.hexdigest()[:32]}"


def open_custom(spec: str) -> CustomSource:
    """Open the object that `python:MODULE:NAME` names."""
    given = find(spec)
    return given if isinstance(given, CustomSource) else CustomSource(given)
