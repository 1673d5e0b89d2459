"""Archives with a catalogue, which `dino-vit pack` writes: what is held does not grow with the images.

    catalogue.arrow   a row for each shard: file, images, size, version, digest, digest of its index
    000000.tar.arrow  an index, a row for each image: name, where it is, its checksum, its label

The catalogue is mapped into memory, and the index of a shard is read when an image of it is. Images are
ordered by shard, and in each by name. Unless that is the order of all names, they begin with their shard.
"""

import glob
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dino_vit.core.cache import keep
from dino_vit.core.distributed import from_rank_0
from dino_vit.core.storage import write_bytes
from dino_vit.core.text import expand_braces, plural, printable, public, public_names, public_text
from dino_vit.data.limits import open_regular
from dino_vit.data.shards import LocalCopies, ShardedSource
from dino_vit.data.sources.archives import ARCHIVES, CLASS_NAMES, FIELDS, class_names, read_member
from dino_vit.data.sources.files import (
    ChangedFile,
    Refused,
    exists,
    file_signature,
    file_signatures,
    is_url,
    read_file,
)
from dino_vit.data.sources.index import cache_folder
from dino_vit.data.sources.ranges import ByteRangeReader
from dino_vit.data.sources.source import ShardLayout, suffix_of

CATALOGUE, INDEX = "catalogue.arrow", ".arrow"  # the file, and what the name of an index ends in
HELD = 256  # indexes in each process
VERSION = 1


class StaleIndex(Refused):
    """The images are not where the catalogue says that they are."""


def stale(what: str) -> StaleIndex:
    """Return the error that says what to do."""
    return StaleIndex(f"{public_text(what)}. Write the catalogue again: dino-vit pack FOLDER index_only=true")


def names_digest(folder: str, files: Sequence[str]) -> str:
    """Return a digest of the names of classes beside archives, which their indexes hold."""
    parents = sorted(set(map(os.path.dirname, files)))
    stated = [class_names(os.path.join(folder, parent)) for parent in parents]
    names = [[] if of_folder is None else of_folder or None for of_folder in stated]
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


class Catalogue(Sequence[str]):
    """The paths of archives, and what is stated of them, mapped into memory; pickled as its path."""

    def __init__(self, folder: str, path: Path) -> None:
        self.folder, self.path = folder, path
        open_regular(path).close()  # Arrow would wait for a pipe
        try:
            with pa.memory_map(str(path)) as file:
                batch = pa.ipc.open_file(file).get_batch(0)
            self.metadata: dict[str, Any] = json.loads(batch.schema.metadata[b"dino_vit"])
            self.files, self._digests, self.indexes = batch["file"], batch["digest"], batch["index"]
            self.images = np.from_dlpack(batch["images"])
            flat: Any = np.from_dlpack(batch["signature"].values)
            self.signatures: NDArray[np.int64] = flat.reshape(-1, 3)
            if is_url(folder):
                keep(path, self)  # a copy in the cache folder
        except (pa.ArrowException, OSError, ValueError, LookupError, TypeError) as error:
            raise stale(f"{path} is damaged or not a catalogue: {error}") from error
        if self.metadata["version"] != VERSION:
            raise stale(f"{path} is a catalogue of another version of dino-vit")

    def __reduce__(self) -> tuple[Any, ...]:
        return Catalogue, (self.folder, self.path)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, shard: Any) -> Any:
        return os.path.join(self.folder, self.files[shard].as_py())

    def digest(self, shard: int) -> str:
        """Return the digest of a shard, empty if it was not computed."""
        return str(self._digests[shard].as_py().hex())


@lru_cache(HELD)
def _rows(catalogue: Catalogue, shard: int) -> pa.RecordBatch:
    return read_index(catalogue[shard], catalogue.indexes[shard].as_py().hex())


class CataloguedSource(ShardedSource):
    """Images in the archives of a folder with a catalogue."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue, metadata = catalogue, catalogue.metadata
        self.starts = np.concatenate([[0], np.cumsum(catalogue.images)])
        self.classes = list(map(printable, public_names(metadata["classes"])))
        self.splits = {printable(name): range(*images) for name, images in metadata["splits"].items()}
        self.fingerprint: str = metadata["fingerprint"]
        self._number = {name: number for number, name in enumerate(metadata["classes"])}
        self.ranges = ByteRangeReader(catalogue, catalogue.signatures)
        self.local_copies = LocalCopies(self.ranges, catalogue.digest)

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def layout(self) -> ShardLayout:
        return ShardLayout(self.starts)

    def places(self) -> list[tuple[int, int]]:
        shards = range(len(self.catalogue))
        return [
            (shard, start) for shard in shards for start in _rows(self.catalogue, shard)["start"].to_pylist()
        ]

    def read(self, index: int) -> bytes:
        shard, row = self._locate(index)
        rows = _rows(self.catalogue, shard)
        try:
            return read_member(self, shard, {field: rows[field][row].as_py() for field in FIELDS})
        except (ChangedFile, FileNotFoundError) as error:
            raise stale(f"{self.catalogue[shard]} is not as it was when it was catalogued") from error

    def label(self, index: int) -> int | None:
        if not self.classes:  # an index would be read for it
            return None
        shard, row = self._locate(index)
        rows, depth = _rows(self.catalogue, shard), self.catalogue.metadata["label_depth"]
        if depth is None:
            return self._number.get(rows["label"][row].as_py())
        folders = rows["name"][row].as_py().split(b"/")[:-1]
        return self._number[os.fsdecode(folders[depth])] if len(folders) > depth else None

    def name(self, index: int) -> str:
        return printable(self.public_name(index))

    def public_name(self, index: int) -> str:
        """Return the name without secrets, of any characters."""
        return public(os.fsdecode(self.raw_name(index)))

    def full_name(self, index: int) -> str:
        return printable(os.fsdecode(self.raw_name(index)))

    def raw_name(self, index: int) -> bytes:
        """Return the name as the archive has it, after that of the archive unless all names are in order."""
        shard, row = self._locate(index)
        name = bytes(_rows(self.catalogue, shard)["name"][row].as_py())
        if self.catalogue.metadata["ordered"]:
            return name
        return os.fsencode(self.catalogue.files[shard].as_py()) + b"/" + name

    @cached_property
    def stamp(self) -> str:
        """A digest of the catalogue, and of the times of local shards: an image may be replaced in one.

        Remote shards are what the catalogue says: of another one no image could be read.
        """
        digest = hashlib.sha256(self.catalogue.path.read_bytes())
        if not self.ranges.is_remote:
            digest.update(file_signatures(list(self.catalogue)).tobytes())
        return digest.hexdigest()

    def _locate(self, index: int) -> tuple[int, int]:
        shard = int(np.searchsorted(self.starts, index, side="right")) - 1
        return shard, index - int(self.starts[shard])


def open_catalogued(spec: str, list_files: Callable[[str], tuple[str, list[str]]]) -> CataloguedSource | None:
    """Open archives, given by their folder or a pattern, if a catalogue there is of these and no others."""
    if suffix_of(spec) != os.path.splitext(spec)[1].lower():  # signed, as a file of its own
        return None
    folder, pattern = os.path.split(spec) if suffix_of(spec) in ARCHIVES else (spec.rstrip("/"), "")
    path = os.path.join(folder, CATALOGUE)
    if not exists(path):
        return None
    catalogue = Catalogue(folder, _on_this_host(path))
    if pattern and not _matches_all(pattern, set(catalogue.files.to_pylist())):
        return None
    from_rank_0(lambda: _check_files(catalogue, partial(list_files, spec)))
    return CataloguedSource(catalogue)


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


def _check_files(catalogue: Catalogue, list_files: Callable[[], tuple[str, list[str]]]) -> None:
    """Check the names of classes and, in a local folder, that these are the archives, and no others."""
    files = catalogue.files.to_pylist()
    if names_digest(catalogue.folder, files) != catalogue.metadata["class_names"]:
        raise stale(f"{CLASS_NAMES} in {catalogue.folder} is not as it was when it was catalogued")
    if is_url(catalogue.folder):
        return
    _, present = list_files()
    sizes = file_signatures([os.path.join(catalogue.folder, file) for file in present])[:, 0].tolist()
    expected = zip(files, catalogue.signatures[:, 0].tolist(), strict=True)
    if wrong := sorted({*expected} ^ {*zip(present, sizes, strict=True)}):
        counted = plural(len({*dict(wrong)}), "archive")
        raise stale(f"{catalogue.folder} is not as it was: {counted} changed, such as {wrong[0][0]}")
