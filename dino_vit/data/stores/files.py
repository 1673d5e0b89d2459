"""Images that are files of their own: below a folder, in a list, or given by a pattern."""

import os
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dino_vit.core import log
from dino_vit.core.distributed import from_rank_0
from dino_vit.core.text import plural, printable, public
from dino_vit.data.image_set import ImageSet, Store
from dino_vit.data.index import Index, IndexContents, WriteImages, indexing, open_index
from dino_vit.data.paths import IMAGE_SUFFIXES, file_identity, is_image, list_local, suffix_of
from dino_vit.data.remote import (
    is_folder,
    is_url,
    list_remote,
    local_path,
    read_image_file,
)

CONTAINERS = (".tar", ".zip", ".parquet")


class NoImages(ValueError):
    """A folder without images: its path, the other files in it, and the archives among them."""

    def __str__(self) -> str:
        suffixes = Counter(map(suffix_of, self.args[1])).most_common(5)
        counts = ", ".join(f"{count} {printable(suffix) or 'without a suffix'}" for suffix, count in suffixes)
        content = f"no images, only {counts}" if counts else "no files"
        advice = f"Give a folder with files ending in {', '.join(IMAGE_SUFFIXES)}, at any depth."
        return f"{public(self.args[0])} contains {content}. {advice}"


class Files(Store):
    """Images whose names are paths below a folder, absolute paths or URLs."""

    def __init__(self, index: Index, root: str, seconds: float | None = None) -> None:
        """`seconds`: for which a remote image is requested before it counts as unreadable."""
        self.index, self.root, self.seconds = index, root, seconds

    def path(self, row: int) -> str:
        return join_path(str(self.root), self.index.name(row))

    def read(self, row: int) -> bytes:
        return read_image_file(self.path(row), self.seconds)

    def origins(self, rows: Iterable[int]) -> list[Hashable]:
        return [file_identity(self.path(row)) for row in rows]


def join_path(root: str, name: str) -> str:
    return name if is_url(name) else os.path.join(root, name)


def open_folder(root: str | Path) -> ImageSet:
    """Open all images below a folder, labelled by its first-level folders.

    Hidden files and folders are skipped, links are followed (`list_local`).
    """
    root = local_path(os.fspath(root))
    if not is_folder(root):
        raise ValueError(f"{public(root)} is not a folder. Give one with images in it, at any depth.")
    with indexing(root):
        remote = from_rank_0(lambda: list_remote(root)) if is_url(root) else {}
        names = _images_among(root, list(remote) if is_url(root) else list_local(root))
    signatures = np.array([remote[name] for name in names]) if remote else None
    return _open_files("folder", root, root, names, signatures)


def open_files(spec: str, files: Sequence[str]) -> ImageSet:
    """Open image files, named by their paths below the folder that they share."""
    remote = any(map(is_url, files))
    root = "" if remote else os.path.commonpath([os.path.dirname(path) for path in files])
    names = [os.path.relpath(path, root) if root else path for path in files]
    return _open_files("files", spec, root, names)


def _open_files(
    kind: str, spec: str, root: str, names: Sequence[str], signatures: NDArray[np.int64] | None = None
) -> ImageSet:
    files = [join_path(root, name) for name in names]

    def build(_: WriteImages, signatures: NDArray[np.int64]) -> IndexContents:
        return IndexContents(names=list(map(os.fsencode, names)), sizes=signatures[:, 0])

    index = open_index(kind, spec, build, files, signatures)
    return index.image_set(Files(index, root), index.stamp)


def _images_among(root: str, files: Sequence[str]) -> list[str]:
    """Return the images of a folder; raise an error without any, and say what beside them is not read."""
    names = [name for name in files if is_image(name)]
    others = [name for name in files if not is_image(name)] if len(names) < len(files) else []
    others = [name for name in others if not os.path.basename(name).startswith(".")]
    containers = [name for name in others if suffix_of(name) in CONTAINERS]
    if not names:
        raise NoImages(root, others, sorted(containers))
    if containers:
        text = "%s is read as a folder of images, without the %s in it, such as %s"
        log.warning(text, public(root), plural(len(containers), "archive"), printable(containers[0]))
    return names
