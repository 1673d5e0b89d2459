"""A folder of images at any depth, and lists of such files."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dino_vit.core import log
from dino_vit.core.text import brief, plural, printable, progress
from dino_vit.data.labels import number_labels, read_entries
from dino_vit.data.sources.files import (
    file_signatures,
    filesystem,
    is_folder,
    is_url,
    plain,
    read_file,
)
from dino_vit.data.sources.index import IndexContents, IndexedSource, WriteImages, open_index
from dino_vit.data.sources.source import IMAGE_SUFFIXES, is_image, suffix_of

CONTAINERS = (".tar", ".parquet", ".zip")


class NoImages(ValueError):
    """A folder without images, and the archives in it."""

    def __init__(self, root: str, others: Sequence[str], containers: Sequence[str]) -> None:
        suffixes = Counter(map(suffix_of, others)).most_common(5)
        counts = ", ".join(f"{count} {printable(suffix) or 'without a suffix'}" for suffix, count in suffixes)
        super().__init__(
            (f"{root} contains no images, only {counts}. " if counts else f"{root} contains no files. ")
            + f"Give a folder with files ending in {', '.join(IMAGE_SUFFIXES)}, at any depth."
        )
        self.containers = sorted(containers)


class PathSource(IndexedSource):
    """Images whose names are paths below a folder, absolute paths or URLs."""

    root: str

    def path(self, index: int) -> str:
        return _join(self.root, os.fsdecode(self.raw_name(index)))

    def read(self, index: int) -> bytes:
        return read_file(self.path(index))

    def signatures(self) -> NDArray[np.int64]:
        """Return those of the local files as they are now; a server is not asked for each of its files."""
        return file_signatures([path for path in map(self.path, range(len(self))) if not is_url(path)])


class FolderSource(PathSource):
    """All images below a folder, labelled by its first-level folders.

    Hidden files and folders are skipped, links are followed.
    """

    def __init__(self, root: str | Path) -> None:
        root = plain(os.fspath(root))
        if not is_folder(root):
            raise ValueError(f"{root} is not a folder. Give a folder with images in it, at any depth.")
        self.root = root
        super().__init__(open_index("folder", root, self._build))

    def _build(self, _: WriteImages) -> IndexContents:
        sizes: dict[str, int] = {}
        folders: list[str] = []  # nothing to watch: a remote folder is listed again each time
        if is_url(self.root):
            sizes = _list_remote(self.root)
            files = list(sizes)
        else:
            files, folders = _list_local(self.root)
        names = [name for name in files if is_image(name)]
        others = [name for name in files if not is_image(name) and not os.path.basename(name).startswith(".")]
        containers = [name for name in others if suffix_of(name) in CONTAINERS]
        if not names:
            raise NoImages(self.root, others, containers)
        if containers:
            text = "%s is read as a folder of images, without the %s in it, such as %s"
            log.warning(text, self.root, plural(len(containers), "archive"), printable(containers[0]))
        paths = [os.path.join(self.root, name) for name in names]
        return IndexContents(
            names=[os.fsencode(name) for name in names],
            sizes=[sizes[name] for name in names] if sizes else file_signatures(paths)[:, 0],
            watched=folders,
        )


class ListSource(PathSource):
    """The images in a list of paths, which are relative to the list's folder, absolute, or URLs."""

    def __init__(self, path: str) -> None:
        self.root, self._path = os.path.dirname(path), path
        super().__init__(open_index("list", path, self._build, [path]))

    def _build(self, _: WriteImages) -> IndexContents:
        entries = list(read_entries(self._path, read_file(self._path)))
        if not entries:
            raise ValueError(f"{self._path} lists no images. Write one path per line.")
        entries.sort(key=lambda entry: os.fsencode(entry.name))
        return IndexContents(
            names=[os.fsencode(entry.name) for entry in entries],
            sizes=self._sizes([_join(self.root, entry.name) for entry in entries]),
            labels=number_labels([entry.label for entry in entries]),
        )

    def _sizes(self, paths: Sequence[str]) -> NDArray[np.int64]:
        """Return the sizes of local files, and 0 for remote ones, which would take too long to ask for."""
        local = [row for row, path in enumerate(paths) if not is_url(path)]
        sizes = np.zeros(len(paths), dtype=np.int64)
        sizes[local] = file_signatures([paths[row] for row in local])[:, 0]
        missing = np.flatnonzero(sizes < 0)
        if len(missing) == len(paths):
            raise ValueError(
                f"none of the files listed in {self._path} exist, such as {brief(paths[0], 200)}; paths are "
                "relative to the folder of the list"
            )
        if len(missing):
            text = "%s lists %s that cannot be found, such as %s; they count as unreadable"
            log.warning(text, self._path, plural(len(missing), "file"), brief(paths[missing[0]], 200))
        return sizes


class FilesSource(PathSource):
    """The given image files, named by their paths below the folder that they share."""

    def __init__(self, spec: str, files: Sequence[str]) -> None:
        remote = any(map(is_url, files))
        self.root = "" if remote else os.path.commonpath([os.path.dirname(path) for path in files])
        super().__init__(open_index("files", spec, lambda _: self._contents(files), files))

    def _contents(self, files: Sequence[str]) -> IndexContents:
        names = [os.path.relpath(path, self.root) if self.root else path for path in files]
        return IndexContents(names=[os.fsencode(name) for name in names], sizes=file_signatures(files)[:, 0])


def _join(root: str, name: str) -> str:
    return name if is_url(name) else os.path.join(root, name)


def _list_local(root: str) -> tuple[list[str], list[str]]:
    """Return the files below a folder by their paths in it, and the paths of all folders."""
    files, paths = [], []
    with progress(f"Listing {root}") as advance:
        for path, folders, names in os.walk(root, onerror=_fail, followlinks=True):
            paths.append(path)
            folders[:] = [
                name for name in folders if name[0] != "." and not _leads_back(os.path.join(path, name))
            ]
            folder = os.path.relpath(path, root)
            shown = [name for name in names if name[0] != "."]
            files += shown if folder == os.curdir else [f"{folder}/{name}" for name in shown]
            advance(len(shown))
    return files, paths


def _fail(error: OSError) -> None:
    raise error


def _leads_back(link: str) -> bool:
    """Tell whether this is a link to a folder that contains it."""
    if not os.path.islink(link):
        return False
    target, folder = os.path.realpath(link), os.path.realpath(os.path.dirname(link))
    return os.path.commonpath([target, folder]) == target


def _list_remote(root: str) -> dict[str, int]:
    """Return the files below a folder and their sizes."""
    system, inner = filesystem(root)
    with progress(f"Listing {root}") as advance:
        infos = system.find(inner, detail=True)
        advance(len(infos))
    return {path.removeprefix(inner).lstrip("/"): info.get("size") or 0 for path, info in infos.items()}
