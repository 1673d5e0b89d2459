"""A source as an index of its items; what remains is how an item is read."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dino_vit.data.labels import Labels
from dino_vit.data.sources.index import Draft, Index
from dino_vit.data.sources.texts import Texts


class IndexedSource:
    """Names, labels and fingerprint of an index; its subclasses read the items.

    Nothing else refers to the index's columns, which would be copied where a process is told of a source.
    """

    def __init__(self, index: Index) -> None:
        self.index = index

    def __len__(self) -> int:
        return len(self.index["labels"])

    def name(self, index: int) -> str:
        return self.index.texts("names")[index]

    def label(self, index: int) -> int | None:
        label = int(self.index["labels"][self._row(index)])
        return None if label < 0 else label

    @property
    def classes(self) -> list[str]:
        return list(self.index.texts("classes"))

    @property
    def fingerprint(self) -> str:
        fingerprint: str = self.index.metadata["fingerprint"]
        return fingerprint

    def _row(self, index: int) -> int:
        return range(len(self))[index]


def by_name(names: Sequence[bytes]) -> list[int]:
    """Return the order of items by the bytes of their names."""
    return sorted(range(len(names)), key=names.__getitem__)


def draft_items(
    *,
    names: Sequence[bytes],
    sizes: NDArray[np.int64],
    labels: Labels,
    columns: Mapping[str, NDArray[Any]] | None = None,
    metadata: Mapping[str, Any] | None = None,
    watched: Sequence[str] = (),
    stamps: NDArray[np.int64],
) -> Draft:
    """Return the draft of items that are in their order; names and sizes make the fingerprint."""
    texts = Texts.of(names)
    digest = hashlib.sha256()
    for part in (texts.letters, texts.ends, sizes.astype(np.int64)):
        digest.update(np.ascontiguousarray(part).data)
    return Draft(
        columns={
            **texts.columns("names"),
            **Texts.of(labels.classes).columns("classes"),
            "labels": labels.numbers,
            **(columns or {}),
        },
        metadata={"fingerprint": f"images-{len(names)}-{digest.hexdigest()[:16]}", **(metadata or {})},
        watched=watched,
        stamps=stamps,
    )


def join_path(root: str, name: str) -> str:
    """Return where an item lies; a name may be a path or a URL of its own."""
    return name if "://" in name else os.path.join(root, name)
