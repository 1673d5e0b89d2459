"""Images in the archives of a folder with a catalogue (`data/catalogue.py`)."""

import glob
import hashlib
import json
import os
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dino_vit.core.cache import cache_folder
from dino_vit.core.distributed import from_rank_0
from dino_vit.core.storage import write_bytes
from dino_vit.core.text import expand_braces, plural, printable
from dino_vit.data.catalogue import CATALOGUE, Catalogue, names_digest, read_index, stale
from dino_vit.data.image_set import ImageSet, ShardLayout
from dino_vit.data.labels import Labels, split_column, to_bits
from dino_vit.data.shards import ByteRangeReader
from dino_vit.data.sources.archives import ARCHIVES, CLASS_NAMES, FIELDS, ArchiveStore
from dino_vit.data.sources.paths import suffix_of
from dino_vit.data.sources.remote import (
    ChangedFile,
    exists,
    file_signature,
    file_signatures,
    is_url,
    read_file,
)

HELD = 256  # indexes in each process


@lru_cache(HELD)
def _columns(catalogue: Catalogue, shard: int) -> dict[str, Any]:
    index = read_index(catalogue[shard], catalogue.indexes[shard].as_py().hex())
    return {field: np.from_dlpack(index[field]) for field in FIELDS} | {
        field: index[field] for field in ("name", "label")
    }


class CatalogueStore(ArchiveStore):
    """Images in the archives of a folder with a catalogue."""

    def __init__(self, catalogue: Catalogue) -> None:
        super().__init__(ByteRangeReader(catalogue, catalogue.signatures), catalogue.digest)
        self.catalogue, self.starts = catalogue, np.concatenate([[0], np.cumsum(catalogue.images)])
        names, sets = self.catalogue.metadata["labels"], self.catalogue.metadata["sets"]
        given = names if sets is None else [tuple(names[number] for number in each) for each in sets]
        self.codes = {name: code for code, name in enumerate(given)}

    @property
    def layout(self) -> ShardLayout:
        return ShardLayout(self.starts)

    def locate(self, row: int) -> tuple[int, dict[str, Any], int]:
        shard = int(np.searchsorted(self.starts, row, side="right")) - 1
        return shard, _columns(self.catalogue, shard), row - int(self.starts[shard])

    def read(self, row: int) -> bytes:
        try:
            return super().read(row)
        except (ChangedFile, FileNotFoundError) as error:
            archive = self.catalogue[self.locate(row)[0]]
            raise stale(f"{archive} is not as it was when it was catalogued") from error

    def take(self, rows: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the codes of the labels of some rows."""
        if not self.codes:  # an index would be read for it
            return np.full(len(rows), -1, np.int32)
        return np.array([self._code(row) for row in rows.tolist()], np.int32)

    def _code(self, row: int) -> int:
        _, columns, at = self.locate(row)
        depth = self.catalogue.metadata["label_depth"]
        if depth is None:
            label = json.loads(columns["label"][at].as_py() or "null")
            return self.codes.get(tuple(sorted(label)) if isinstance(label, list) else label, -1)
        folders = columns["name"][at].as_py().split(b"/")[:-1]
        return self.codes[os.fsdecode(folders[depth])] if len(folders) > depth else -1

    def name(self, row: int) -> str:
        """Return the name as the archive has it, after that of the archive unless all names are in order."""
        shard, columns, at = self.locate(row)
        name = os.fsdecode(columns["name"][at].as_py())
        return name if self.catalogue.metadata["ordered"] else f"{self.catalogue.files[shard].as_py()}/{name}"


def catalogued(catalogue: Catalogue, stamp: str) -> ImageSet:
    """Return the images of a catalogue."""
    store, metadata = CatalogueStore(catalogue), catalogue.metadata
    names, sets = tuple(map(printable, metadata["labels"])), metadata["sets"]
    return ImageSet(
        store=store,
        rows=range(int(store.starts[-1])),
        names=store.name,
        labels=Labels(store, names, None if sets is None else to_bits(sets, len(names))),
        splits=split_column(metadata["splits"]),
        fingerprint=metadata["fingerprint"],
        stamp=stamp,
    )


def open_catalogued(spec: str, list_files: Callable[[str], tuple[str, list[str]]]) -> ImageSet | None:
    """Open archives, given by their folder or a pattern, if a catalogue there is of these and no others."""
    if suffix_of(spec) != os.path.splitext(spec)[1].lower():  # signed, as a file of its own
        return None
    is_pattern = suffix_of(spec) in ARCHIVES and not os.path.isdir(spec)
    folder, pattern = os.path.split(spec) if is_pattern else (spec.rstrip("/"), "")
    path = os.path.join(folder, CATALOGUE)
    if not exists(path):
        return None
    catalogue = Catalogue(folder, _on_this_host(path))
    if pattern and not _matches_all(pattern, set(catalogue.files.to_pylist())):
        return None
    signatures = from_rank_0(lambda: _check_files(catalogue, partial(list_files, spec)))
    return catalogued(catalogue, hashlib.sha256(catalogue.path.read_bytes() + signatures).hexdigest())


def _on_this_host(path: str) -> Path:
    """Return the catalogue, or the copy of a remote one in the cache folder."""
    if not is_url(path):
        return Path(path)
    key = hashlib.sha256(f"{path}\0{file_signature(path)}".encode()).hexdigest()
    copy = cache_folder() / f"catalogue-{key[:24]}.arrow"
    if not copy.exists():
        write_bytes(copy, read_file(path))
    return copy


def _matches_all(pattern: str, files: set[str]) -> bool:
    """Tell whether a pattern is of these files, none of which then lies in a folder below."""
    given = set(expand_braces(pattern))
    patterns = set(filter(glob.has_magic, given))
    matched = {file for file in files if "/" not in file and any(fnmatchcase(file, p) for p in patterns)}
    return files == (given - patterns) | matched


def _check_files(catalogue: Catalogue, list_files: Callable[[], tuple[str, list[str]]]) -> bytes:
    """Check the names of classes and, in a local folder, that these are the archives, and no others.

    Return the signatures of local shards, in which an image may be replaced. Remote ones are what the
    catalogue says: of others no image could be read.
    """
    files = catalogue.files.to_pylist()
    if names_digest(catalogue.folder, files) != catalogue.metadata["class_names"]:
        raise stale(f"{CLASS_NAMES} in {catalogue.folder} is not as it was when it was catalogued")
    if is_url(catalogue.folder):
        return b""
    _, present = list_files()
    signatures = file_signatures([os.path.join(catalogue.folder, file) for file in present])
    expected = zip(files, catalogue.signatures[:, 0].tolist(), strict=True)
    if wrong := sorted({*expected} ^ {*zip(present, signatures[:, 0].tolist(), strict=True)}):
        counted = plural(len({*dict(wrong)}), "archive")
        raise stale(f"{catalogue.folder} is not as it was: {counted} changed, such as {wrong[0][0]}")
    order = sorted(range(len(present)), key=lambda number: os.fsencode(present[number]))
    return signatures[order].tobytes()
