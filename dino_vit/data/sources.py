"""Where images come from: for each index the bytes or pixels, a name and, where there is one, a label."""

import hashlib
import os
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dino_vit.data.labels import join_labels
from dino_vit.data.source import IMAGE_SUFFIXES, Source
from dino_vit.data.synthetic import SyntheticSource

SUFFIXES = IMAGE_SUFFIXES

__all__ = ["FolderSource", "Source", "SyntheticSource", "open_source"]


class FolderSource:
    """All images below a folder, sorted by path; its first-level folders are the labels, if anybody asks."""

    def __init__(self, root: str | Path) -> None:
        self.root = os.fspath(root)
        if not os.path.isdir(self.root):
            raise ValueError(f"{self.root} is not a folder. Give a folder with images in it, at any depth.")
        others: Counter[str] = Counter()
        names = sorted(_image_names(self.root, others))
        if not names:
            found = ", ".join(f"{n} {suffix or 'without a suffix'}" for suffix, n in others.most_common(5))
            raise ValueError(
                f"{self.root} holds no images: in it and below it are {found or 'no files at all'}. "
                f"Files ending in {', '.join(SUFFIXES)} are read; give the folder that holds them."
            )
        # One buffer for a million names: loader processes share it, and touching it copies nothing.
        self._names = np.frombuffer(b"".join(names), dtype=np.uint8)
        self._ends = np.cumsum([len(name) for name in names], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._ends)

    def read(self, index: int) -> bytes:
        return Path(self.root, self.name(index)).read_bytes()

    def name(self, index: int) -> str:
        """Return the path below the root."""
        return os.fsdecode(self._raw_name(index))

    def label(self, index: int) -> int | None:
        label = int(self._labels[range(len(self))[index]])
        return None if label < 0 else label

    @cached_property
    def classes(self) -> list[str]:
        """Return the first-level folders with images below them, in the order of their labels."""
        tops = {self._raw_name(index).partition(b"/") for index in range(len(self))}
        return [os.fsdecode(top) for top in sorted({top for top, slash, _ in tops if slash})]

    @property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(self._names.tobytes() + self._ends.tobytes()).hexdigest()
        return f"folder-{len(self)}-{digest[:16]}"

    @cached_property
    def _labels(self) -> NDArray[np.int64]:
        number = {os.fsencode(name): label for label, name in enumerate(self.classes)}
        parts = (self._raw_name(index).partition(b"/") for index in range(len(self)))
        return np.array([number[top] if slash else -1 for top, slash, _ in parts], dtype=np.int64)

    def _raw_name(self, index: int) -> bytes:
        index = range(len(self))[index]
        start = self._ends[index - 1] if index else 0
        return self._names[start : self._ends[index]].tobytes()


def _image_names(root: str, others: Counter[str]) -> Iterator[bytes]:
    """Yield the images' paths below root and count other files by suffix, passing over hidden ones."""
    seen: set[tuple[int, int]] = set()
    folders = [""]
    while folders:
        folder = folders.pop()
        status = os.stat(os.path.join(root, folder))
        if (status.st_dev, status.st_ino) in seen:  # a link back to a folder above
            continue
        seen.add((status.st_dev, status.st_ino))
        with os.scandir(os.path.join(root, folder)) as entries:
            for entry in entries:
                path = f"{folder}/{entry.name}" if folder else entry.name
                suffix = os.path.splitext(entry.name)[1].lower()
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    folders.append(path)
                elif suffix in SUFFIXES:
                    yield os.fsencode(path)
                else:
                    others[suffix] += 1


def open_source(spec: str, labels: str | Path | None = None) -> Source:
    """Open a folder, or `synthetic[:LENGTH[:SIZE]]`; labels of its images may stand in a file."""
    source = _open(spec)
    return source if labels is None else join_labels(source, labels)


def _open(spec: str) -> Source:
    kind, *arguments = spec.split(":")
    if kind == "synthetic" and not os.path.exists(spec):
        if len(arguments) > 2 or not all(argument.isdecimal() for argument in arguments):
            raise ValueError(
                f"{spec!r} is not understood: write synthetic, synthetic:LENGTH or synthetic:LENGTH:SIZE, "
                f"for example synthetic:20000:32."
            )
        numbers = dict(zip(("length", "size"), map(int, arguments), strict=False))
        return SyntheticSource(**numbers)
    if not os.path.isdir(spec):
        raise ValueError(f"{spec!r} is no source: give a folder that exists, or synthetic[:LENGTH[:SIZE]].")
    return FolderSource(spec)
