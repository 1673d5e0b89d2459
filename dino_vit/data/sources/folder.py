"""A folder of images at any depth, and lists of such files."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dino_vit.core.progress import progress
from dino_vit.data.labels import folder_labels, number_labels, read_entries
from dino_vit.data.sources.files import filesystem, in_threads, is_folder, is_url, plain, read_file, stamps
from dino_vit.data.sources.index import Draft, Sink, open_index
from dino_vit.data.sources.indexed import IndexedSource, by_name, draft_items, join_path
from dino_vit.data.sources.source import IMAGE_SUFFIXES, is_image

log = logging.getLogger("dino_vit")

CONTAINERS = (".tar", ".parquet", ".zip")
NO_STAMPS: NDArray[np.int64] = np.empty((0, 3), np.int64)


class NoImages(ValueError):
    """A folder without images; what else holds images in it."""

    def __init__(self, text: str, containers: Sequence[str]) -> None:
        super().__init__(text, containers)
        self.text, self.containers = text, containers

    def __str__(self) -> str:
        return self.text


class FolderSource(IndexedSource):
    """All images below a folder; its first-level folders are the labels, if anybody asks.

    Hidden files and folders are passed over, links are followed.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = plain(os.fspath(root))
        if not is_folder(self.root):
            raise ValueError(f"{self.root} is not a folder. Give a folder with images in it, at any depth.")
        super().__init__(open_index("folder", self.root, self._build))

    def read(self, index: int) -> bytes:
        return read_file(join_path(self.root, self.name(index)))

    def _build(self, _: Sink) -> Draft:
        found = _list_remote(self.root) if is_url(self.root) else _list_local(self.root)
        if not found.names:
            raise NoImages(_nothing(self.root, found.others), sorted(found.containers))
        if found.containers:
            text = "%s is taken as a folder of images; %d archives in it are passed over, such as %s"
            log.warning(text, self.root, len(found.containers), found.containers[0])
        order = by_name(found.names)
        names = [found.names[place] for place in order]
        return draft_items(
            names=names,
            sizes=np.array(found.sizes, dtype=np.int64)[order],
            labels=folder_labels(names),
            watched=found.folders,
            stamps=np.array(found.stamps, dtype=np.int64).reshape(-1, 3),
        )


class ListSource(IndexedSource):
    """The images that a list names, by paths from the list's folder on, absolute paths or URLs."""

    def __init__(self, path: str) -> None:
        self.root = os.path.dirname(path)
        self._path = path
        super().__init__(open_index("list", path, self._build, [path]))

    def read(self, index: int) -> bytes:
        return read_file(join_path(self.root, self.name(index)))

    def _build(self, _: Sink) -> Draft:
        before = stamps([self._path])
        entries = list(read_entries(self._path, read_file(self._path)))
        if not entries:
            raise ValueError(f"{self._path} lists no images. Write a path a line.")
        names = [os.fsencode(entry.name) for entry in entries]
        order = by_name(names)
        names = [names[place] for place in order]
        return draft_items(
            names=names,
            sizes=self._sizes(names),
            labels=number_labels([entries[place].label for place in order]),
            watched=[self._path],
            stamps=before,
        )

    def _sizes(self, names: Sequence[bytes]) -> NDArray[np.int64]:
        """Return the sizes of local files; to ask for those of remote ones would take too long."""
        paths = [join_path(self.root, os.fsdecode(name)) for name in names]
        local = [place for place, path in enumerate(paths) if not is_url(path)]
        sizes = np.zeros(len(paths), dtype=np.int64)
        if local:
            sizes[local] = _sizes_of([paths[place] for place in local])
        missing = np.flatnonzero(sizes < 0)
        if len(missing) == len(paths):
            raise ValueError(
                f"None of the {len(paths)} files that {self._path} lists exist, such as {paths[0]}. "
                f"Paths that are not absolute begin at the folder of the list."
            )
        if len(missing):
            text = "%s lists %d files that do not exist, such as %s; they count as unreadable"
            log.warning(text, self._path, len(missing), paths[missing[0]])
        return sizes


class FilesSource(IndexedSource):
    """Image files that are given one by one, named by their paths below the folder that they share."""

    def __init__(self, spec: str, files: Sequence[str]) -> None:
        folders = [os.path.dirname(path) for path in files]
        self.root = "" if any(map(is_url, files)) else os.path.commonpath(folders)
        super().__init__(open_index("files", spec, lambda _: self._draft(files), files))

    def read(self, index: int) -> bytes:
        return read_file(join_path(self.root, self.name(index)))

    def _draft(self, files: Sequence[str]) -> Draft:
        before = stamps(files)
        names = [os.fsencode(os.path.relpath(path, self.root) if self.root else path) for path in files]
        order = by_name(names)
        names = [names[place] for place in order]
        return draft_items(
            names=names,
            sizes=before[order, 0],
            labels=folder_labels(names),
            watched=files,
            stamps=before,
        )


@dataclass
class Found:
    """What a listing came upon."""

    names: list[bytes] = field(default_factory=list)
    sizes: Sequence[int] | NDArray[np.int64] = ()
    containers: list[str] = field(default_factory=list)
    others: Counter[str] = field(default_factory=Counter)
    folders: list[str] = field(default_factory=list)
    stamps: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, name: str) -> None:
        """Sort a file in."""
        suffix = os.path.splitext(name)[1].lower()
        if is_image(name):
            self.names.append(os.fsencode(name))
        elif not os.path.basename(name).startswith("."):
            self.others[suffix] += 1
            if suffix in CONTAINERS:
                self.containers.append(name)


@dataclass(frozen=True)
class _Folder:
    name: str  # below the root
    above: frozenset[tuple[int, int]]  # the folders that it lies in, by device and number


def _list_local(root: str) -> Found:
    """List a folder level by level, the folders of each side by side, and then ask for the sizes."""
    found, level = Found(), [_Folder("", frozenset())]
    with progress(f"Listing {root}") as advance:
        while level:
            listed = in_threads(lambda folder: _list_folder(root, folder), level)
            found.folders += [os.path.join(root, folder.name) for folder in level]
            level = []
            for files, folders, stamp in listed:
                found.stamps.append(stamp)
                for name in files:
                    found.add(name)
                level += folders
                advance(len(files))
    found.sizes = _sizes_of([os.path.join(root, os.fsdecode(name)) for name in found.names])
    return found


def _list_folder(root: str, folder: _Folder) -> tuple[list[str], list[_Folder], tuple[int, int, int]]:
    path = os.path.join(root, folder.name)
    status = os.stat(path)  # before the listing, so that a change during it is seen next time
    identity = (status.st_dev, status.st_ino)
    stamp = (status.st_size, status.st_mtime_ns, status.st_mtime_ns)
    files: list[str] = []
    folders: list[_Folder] = []
    if identity in folder.above:  # a link back to a folder that this one lies in
        return files, folders, stamp
    above = folder.above | {identity}
    with os.scandir(path) as entries:
        for entry in entries:
            name = f"{folder.name}/{entry.name}" if folder.name else entry.name
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                folders.append(_Folder(name, above))
            else:
                files.append(name)
    return files, folders, stamp


def _sizes_of(paths: Sequence[str]) -> NDArray[np.int64]:
    chunks = [paths[start : start + 1024] for start in range(0, len(paths), 1024)]
    with progress("Reading the sizes of files", len(paths)) as advance:
        rows = in_threads(_stat, chunks, lambda sizes: advance(len(sizes)))
    return np.array([size for row in rows for size in row], dtype=np.int64)


def _stat(paths: Iterable[str]) -> list[int]:
    sizes = []
    for path in paths:
        try:
            sizes.append(os.stat(path).st_size)
        except OSError:
            sizes.append(-1)
    return sizes


def _list_remote(root: str) -> Found:
    system, inner = filesystem(root)
    found, sizes = Found(), []
    with progress(f"Listing {root}") as advance:
        for path, info in system.find(inner, detail=True).items():
            before = len(found.names)
            found.add(path.removeprefix(inner).lstrip("/"))
            if len(found.names) > before:
                sizes.append(info.get("size") or 0)
            advance(1)
    found.sizes = sizes
    return found


def _nothing(root: str, others: Counter[str]) -> str:
    counts = ", ".join(f"{n} {suffix or 'without a suffix'}" for suffix, n in others.most_common(5))
    return (
        f"{root} holds no images: in it and below it are {counts or 'no files at all'}. "
        f"Files ending in {', '.join(IMAGE_SUFFIXES)} are read; give the folder that holds them."
    )
