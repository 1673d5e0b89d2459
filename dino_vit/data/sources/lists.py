"""Lists of image files: text, CSV or TSV, with a label beside each path or without."""

import os
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dino_vit.core import log
from dino_vit.core.text import brief, plural, public
from dino_vit.data.image_set import ImageSet
from dino_vit.data.index import IndexContents, WriteImages, indexing, open_index
from dino_vit.data.label_files import by_name, read_entries
from dino_vit.data.labels import encode_labels
from dino_vit.data.sources.folders import FileStore, join_path
from dino_vit.data.sources.paths import folder_of
from dino_vit.data.sources.remote import PER_IMAGE_TIMEOUT_S, file_signatures, is_url, read_file


def open_list(path: str, several: bool = False) -> ImageSet:
    """Open the images in a list of paths, which are relative to the list's folder, absolute, or URLs.

    With `several`, the labels of an image are in one cell, as in `sea;sky`.
    """
    root, shown = folder_of(path), public(path)
    with indexing(path):
        given = read_entries(shown, read_file(path), several=several)
        entries = sorted(given, key=lambda each: os.fsencode(each.name))
    if not entries:
        raise ValueError(f"{shown} lists no images. Write one path per line.")
    if (named := len(by_name(shown, entries))) < len(entries):
        text = "%s names %s in %s; one that is named twice comes twice in an epoch"
        log.info(text, shown, plural(named, "image"), plural(len(entries), "line"))
    paths = [join_path(root, entry.name) for entry in entries]
    # To ask for the size of each remote file would take long.
    local = [row for row, path in enumerate(paths) if not is_url(path)]
    files = [path, *(paths[row] for row in local)]
    with indexing(path):
        signatures = file_signatures(files)

    def build(_: WriteImages) -> IndexContents:
        sizes = np.zeros(len(paths), dtype=np.int64)
        sizes[local] = signatures[1:, 0]
        _check_missing(shown, paths, np.flatnonzero(sizes < 0))
        names = [os.fsencode(entry.name) for entry in entries]
        return IndexContents(names=names, sizes=sizes, labels=encode_labels([e.label for e in entries]))

    index = open_index("list-several" if several else "list", path, build, files, signatures)
    # Each remote image may be on another server.
    images = index.image_set(FileStore(index, root, PER_IMAGE_TIMEOUT_S), index.stamp)
    return images if len(local) == len(paths) else replace(images, stamp=None)


def _check_missing(name: str, paths: Sequence[str], missing: NDArray[np.int64]) -> None:
    """Refuse a list without any file that exists, and warn of those that do not."""
    if len(missing) == len(paths):
        raise ValueError(
            f"none of the files listed in {name} exist, such as {brief(paths[0], 200)}; paths are "
            "relative to the folder of the list"
        )
    if len(missing):
        text = "%s lists %s that cannot be found, such as %s; they count as unreadable"
        log.warning(text, name, plural(len(missing), "file"), brief(paths[missing[0]], 200))
