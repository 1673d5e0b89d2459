"""Archives with a catalogue, which `dino-vit pack` writes: what is held does not grow with the images.

    catalogue.arrow   a row for each shard: file, images, size, version, digest, digest of its index
    000000.tar.arrow  an index, a row for each image: name, where it is, its checksum, its label and folder

The catalogue is mapped into memory, and the index of a shard is read when an image of it is.
"""

import glob
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dino_vit.core.cache import cache_folder, note_use
from dino_vit.core.distributed import from_rank_0
from dino_vit.core.storage import write_bytes
from dino_vit.core.text import plural, public_text
from dino_vit.data.image_set import ImageSet
from dino_vit.data.index import Index
from dino_vit.data.labels import Folders
from dino_vit.data.paths import CATALOGUE, expand_braces
from dino_vit.data.remote import (
    Refused,
    file_signature,
    file_signatures,
    is_url,
    read_file,
)
from dino_vit.data.shards import CATALOGUE_AGAIN, ChangedFile
from dino_vit.data.stores.ranges import CLASS_NAMES, FIELDS, Ranges, class_names

INDEX = ".arrow"  # what the name of an index ends in
HELD = 256  # indexes in each process
VERSION = 2


def stale(what: str) -> ChangedFile:
    """Return the error that says what to do."""
    return ChangedFile(f"{public_text(what)}; {CATALOGUE_AGAIN}")


def names_digest(folder: str, files: Sequence[str]) -> str:
    """Return a digest of the names of classes beside archives, which their indexes hold."""
    parents = sorted(set(map(os.path.dirname, files)))
    stated = [class_names(os.path.join(folder, parent)) for parent in parents]
    names = [[] if classes is None else classes or None for classes in stated]
    return hashlib.sha256(json.dumps(names).encode()).hexdigest()


def read_index(path: str, digest: str) -> pa.RecordBatch:
    """Return the index of an archive, which must be the one in the catalogue."""
    path += INDEX
    try:
        data = read_file(path)
    except (FileNotFoundError, Refused):
        raise stale(f"{path} does not exist") from None
    if hashlib.sha256(data).hexdigest() != digest:
        raise stale(f"{path} is not the one in the catalogue beside it")
    return pa.ipc.open_file(pa.py_buffer(data)).get_batch(0)


class Catalogue(Index):
    """An index of archives, each with a file of its own; pickled as the path of the catalogue."""

    def __init__(self, folder: str, path: Path) -> None:
        self.folder, self.path = folder, path
        try:
            with pa.memory_map(str(path)) as file:
                batch = pa.ipc.open_file(file).get_batch(0)
            self.metadata = json.loads(batch.schema.metadata[b"dino_vit"])
            self.files, self._digests, self.indexes = batch["file"], batch["digest"], batch["index"]
            self.starts = np.concatenate([[0], np.cumsum(np.from_dlpack(batch["images"]))])
            flat: Any = np.from_dlpack(batch["signature"].values)
            self.signatures: NDArray[np.int64] = flat.reshape(-1, 3)
            if is_url(folder):
                note_use(path)  # a copy in the cache folder
        except (pa.ArrowException, OSError, ValueError, LookupError, TypeError) as error:
            raise stale(f"{path} is damaged or not a catalogue: {error}") from error
        if self.metadata["version"] != VERSION:
            raise stale(f"{path} is a catalogue of another version of dino-vit")
        self.folders = Folders(self.metadata["depth"], tuple(self.metadata["splits"]))
        self.classes = {name: code for code, name in enumerate(self.metadata["labels"])}

    def __reduce__(self) -> tuple[Any, ...]:
        return Catalogue, (self.folder, self.path)

    def images(self, stamp: str) -> ImageSet:
        """Return the images in the archives."""
        return self.image_set(Ranges(self, self.archive, self.signatures, self.digest), stamp)

    def archive(self, shard: int) -> str:
        return os.path.join(self.folder, self.files[shard].as_py())

    def digest(self, shard: int) -> str:
        """Return the digest of a shard, empty if it was not computed."""
        return str(self._digests[shard].as_py().hex())

    def columns(self, shard: int) -> tuple[dict[str, Any], int]:
        return _columns(self, shard), int(self.starts[shard])

    def name(self, row: int) -> str:
        name = super().name(row)
        return f"{self.files[self.locate(row)[0]].as_py()}/{name}" if self.metadata["titled"] else name

    def take(self, column: str, rows: NDArray[np.int64]) -> NDArray[np.int32]:
        codes = np.full(np.shape(rows), -1, np.int32)
        if self.metadata[f"{column}s"] and len(rows):  # otherwise an index would be read for nothing
            shards = np.searchsorted(self.starts, rows, side="right") - 1
            by_shard = np.argsort(shards, kind="stable")
            for part in np.split(by_shard, np.flatnonzero(np.diff(shards[by_shard])) + 1):
                columns, first = self.columns(int(shards[part[0]]))
                codes[part] = columns[column].take(rows[part] - first)
        return codes

    def code(self, label: str, folder: bytes) -> int:
        """Return the code of a label as it is stated in an index, or of a folder if none are stated."""
        if self.metadata["stated"] is not None:
            return int(self.metadata["stated"].get(label, -1))
        name = self.folders.label(folder)
        return -1 if name is None else self.classes[os.fsdecode(name)]


@lru_cache(HELD)
def _columns(catalogue: Catalogue, shard: int) -> dict[str, Any]:
    """Return the columns of the index of a shard, its kinds of images as codes of labels and splits."""
    index = read_index(catalogue.archive(shard), catalogue.indexes[shard].as_py().hex())
    kinds = [(label, os.fsencode(folder)) for label, folder in json.loads(index.schema.metadata[b"kinds"])]
    rows: NDArray[np.int32] = np.from_dlpack(index["kind"])  # type: ignore[assignment]
    labels = np.array([catalogue.code(*kind) for kind in kinds], np.int32)
    splits = np.array([catalogue.folders.split(folder) for _, folder in kinds], np.int32)
    columns = {field: np.from_dlpack(index[field]) for field in FIELDS}
    return {**columns, "name": index["name"], "label": labels.take(rows), "split": splits.take(rows)}


def open_catalogued(folder: str, pattern: str, list_files: Callable[[], list[str]]) -> ImageSet | None:
    """Open archives, given by folder and pattern, if the catalogue there is of these and no others."""
    catalogue = Catalogue(folder, _on_this_host(os.path.join(folder, CATALOGUE)))
    if pattern and not _matches_all(pattern, set(catalogue.files.to_pylist())):
        return None
    signatures = from_rank_0(lambda: _check_files(catalogue, list_files))
    stamp = hashlib.sha256(catalogue.path.read_bytes() + signatures).hexdigest()
    return catalogue.images(stamp)


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


def _check_files(catalogue: Catalogue, list_files: Callable[[], list[str]]) -> bytes:
    """Check the names of classes and, in a local folder, that these are the archives, and no others.

    Return the signatures of local shards, in which an image may be replaced. Remote ones are what the
    catalogue says: of others no image could be read.
    """
    files = catalogue.files.to_pylist()
    if names_digest(catalogue.folder, files) != catalogue.metadata["class_names"]:
        raise stale(f"{CLASS_NAMES} in {catalogue.folder} is not as it was when it was catalogued")
    if is_url(catalogue.folder):
        return b""
    present = list_files()
    signatures = file_signatures([os.path.join(catalogue.folder, file) for file in present])
    expected = zip(files, catalogue.signatures[:, 0].tolist(), strict=True)
    if wrong := sorted({*expected} ^ {*zip(present, signatures[:, 0].tolist(), strict=True)}):
        counted = plural(len({*dict(wrong)}), "archive")
        raise stale(f"{catalogue.folder} is not as it was: {counted} changed, such as {wrong[0][0]}")
    order = sorted(range(len(present)), key=lambda number: os.fsencode(present[number]))
    return signatures[order].tobytes()
