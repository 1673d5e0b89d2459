"""Sources that start from the catalogue of their archives (`catalogue.py`)."""

import glob
import hashlib
import json
import os
import zlib
from collections.abc import Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dino_vit.core.distributed import from_rank_0
from dino_vit.core.storage import write_bytes
from dino_vit.core.text import plural, printable
from dino_vit.data.layout import ShardLayout
from dino_vit.data.shards import LocalCopies, ShardedSource
from dino_vit.data.sources.archives import ARCHIVES, FIELDS, HEADER, TAR_BLOCK, decompress
from dino_vit.data.sources.files import (
    ByteRangeReader,
    exists,
    expand_braces,
    file_signature,
    file_signatures,
    read_file,
)
from dino_vit.data.sources.index import cache_folder
from dino_vit.data.sources.remote import ChangedFile, Refused, is_url, retry
from dino_vit.data.sources.source import suffix_of

CATALOGUE, INDEX = "catalogue.arrow", ".arrow"  # the file, and what the name of an index ends in
NUMBERS, DIGESTS = ("images", "size", "version"), ("digest", "index")
HELD = 256  # indexes in each process
VERSION = 1


class StaleIndex(Refused):
    """The images are not where the catalogue says that they are."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}. Write the catalogue again: dino-vit pack FOLDER index_only=true")


def read_index(path: str, digest: str) -> pa.RecordBatch:
    """Return the index of an archive, which must be the one in the catalogue."""
    data = _verified(path + INDEX, digest)
    return pa.ipc.open_file(pa.py_buffer(data)).get_batch(0)


def _verified(path: str, digest: str) -> bytes:
    """Return the contents of a file with a digest; of a remote one a copy is kept among those of shards."""
    copy = cache_folder() / "shards" / f"{digest[:24]}.shard"
    if is_url(path):
        with suppress(OSError):
            data = copy.read_bytes()
            if hashlib.sha256(data).hexdigest() == digest:
                return data
    try:
        data = retry(lambda: read_file(path), path) if is_url(path) else read_file(path)
    except FileNotFoundError:
        raise StaleIndex(f"{path} does not exist") from None
    if hashlib.sha256(data).hexdigest() != digest:
        raise StaleIndex(f"{path} is not the one in the catalogue beside it")
    if is_url(path):
        with suppress(OSError, ValueError):  # it is read again where there is no room
            write_bytes(copy, data)
    return data


class CataloguedSource(ShardedSource):
    """Images in the archives of a folder with a catalogue."""

    def __init__(self, folder: str, catalogue: "Catalogue") -> None:
        self.catalogue, columns, metadata = catalogue, catalogue.columns, catalogue.metadata
        self.starts = np.concatenate([[0], np.cumsum(columns["images"])])
        self.classes = list(map(printable, metadata["classes"]))
        self.splits = {printable(name): range(*images) for name, images in metadata["splits"].items()}
        self.fingerprint: str = metadata["fingerprint"]
        self._number = {name: number for number, name in enumerate(metadata["classes"])}
        signatures = np.stack([columns["size"], columns["version"], np.zeros_like(columns["size"])], axis=1)
        # What is read is checked, whatever the time of its shard is.
        self.ranges = ByteRangeReader(_Paths(folder, self.catalogue), signatures, _always)
        self.local_copies = LocalCopies(
            self.ranges, columns["size"].astype(np.int64), digests=self.catalogue.digests
        )

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def layout(self) -> ShardLayout:
        return ShardLayout(self.starts)

    def places(self) -> list[tuple[int, int]]:
        shards = range(len(self.ranges.paths))
        return [(shard, start) for shard in shards for start in self._index(shard).columns["start"].tolist()]

    def read(self, index: int) -> bytes:
        shard, row = self._locate(index)
        columns = self._index(shard).columns
        start, stored, _, method, crc = (int(columns[field][row]) for field in FIELDS)
        header = TAR_BLOCK if method == HEADER else 0
        place = shard, start - header, stored + header
        data = self.local_copies.read(*place) if self.ranges.is_remote else None
        try:
            data = self.ranges.read(*place) if data is None else data
            if header and zlib.crc32(data[:header]) != crc:
                raise ChangedFile(self.ranges.paths[shard])
            return data[header:] if header else decompress(data, method, crc)
        except (ChangedFile, FileNotFoundError) as error:
            raise StaleIndex(f"{self.ranges.paths[shard]} is not as it was when it was catalogued") from error

    def label(self, index: int) -> int | None:
        if not self.classes:
            return None
        shard, row = self._locate(index)
        items = self._index(shard)
        label = items.label[row].as_py()
        if self.catalogue.metadata["by_folder"]:
            path = bytes(items.name[row].as_py())[self.catalogue.metadata["shared"] :]
            path = path.partition(b"/")[2] if self.catalogue.metadata["in_splits"] else path
            top, slash, _ = path.partition(b"/")
            label = os.fsdecode(top) if slash else None
        return self._number.get(label)

    def name(self, index: int) -> str:
        return printable(os.fsdecode(self.raw_name(index)))

    def raw_name(self, index: int) -> bytes:
        """Return the name as the archive has it, after that of the archive unless all names are in order."""
        shard, row = self._locate(index)
        name = bytes(self._index(shard).name[row].as_py())
        if self.catalogue.metadata["ordered"]:
            return name
        return os.fsencode(self.catalogue.files[shard].as_py()) + b"/" + name

    @cached_property
    def stamp(self) -> str:
        """A digest of the catalogue, and of the times of local shards: an image may be replaced in one."""
        digest = hashlib.sha256(self.catalogue.path.read_bytes())
        if not self.ranges.is_remote:
            digest.update(file_signatures(list(self.ranges.paths)).tobytes())
        return digest.hexdigest()

    def _locate(self, index: int) -> tuple[int, int]:
        shard = int(np.searchsorted(self.starts, index, side="right")) - 1
        return shard, index - int(self.starts[shard])

    def _index(self, shard: int) -> "_Items":
        return _items(self, shard)


class _Items(NamedTuple):
    """The index of a shard."""

    name: pa.Array
    label: pa.Array
    columns: dict[str, NDArray[Any]]


@lru_cache(HELD)
def _items(source: CataloguedSource, shard: int) -> _Items:
    batch = read_index(source.ranges.paths[shard], source.catalogue.indexes[shard].as_py().hex())
    columns = {field: np.from_dlpack(batch[field]) for field in FIELDS}
    return _Items(batch["name"], batch["label"], columns)


def _always(_: int) -> bool:
    return True


class Catalogue:
    """The rows of a catalogue, mapped into memory; pickled as the path of its file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with pa.memory_map(str(path)) as file:
                batch = pa.ipc.open_file(file).get_batch(0)
            self.metadata: dict[str, Any] = json.loads(batch.schema.metadata[b"dino_vit"])
            self.files, self.digests, self.indexes = batch["file"], batch["digest"], batch["index"]
            self.columns = {name: np.from_dlpack(batch[name]) for name in NUMBERS}
        except (pa.ArrowException, OSError, ValueError, LookupError, TypeError) as error:
            raise StaleIndex(f"{path} is damaged or not a catalogue: {error}") from error
        if self.metadata["version"] != VERSION:
            raise StaleIndex(f"{path} is a catalogue of another version of dino-vit")

    def __reduce__(self) -> tuple[Any, ...]:
        return Catalogue, (self.path,)


class _Paths(Sequence[str]):
    """The paths of shards, each made when it is asked for."""

    def __init__(self, folder: str, catalogue: Catalogue) -> None:
        self.folder, self.catalogue = folder, catalogue

    def __len__(self) -> int:
        return len(self.catalogue.files)

    def __getitem__(self, index: Any) -> Any:
        return os.path.join(self.folder, self.catalogue.files[index].as_py())


def _on_this_host(path: str) -> Path:
    """Return the catalogue, or the copy of a remote one in the cache folder."""
    if not is_url(path):
        return Path(path)
    size, version, _ = file_signature(path)
    key = hashlib.sha256(f"{path}\0{size}\0{version}".encode()).hexdigest()
    copy = cache_folder() / f"catalogue-{key[:24]}.arrow"
    if not copy.exists():
        write_bytes(copy, retry(lambda: read_file(path), path))
    return copy


def _check_files(folder: str, catalogue: Catalogue) -> None:
    """Check that the folder has the archives of its catalogue, with their sizes, and no other beside them."""
    expected = dict(zip(catalogue.files.to_pylist(), catalogue.columns["size"].tolist(), strict=True))
    wrong = []
    for parent in sorted({os.path.dirname(file) for file in expected}):
        for entry in os.scandir(os.path.join(folder, parent)):
            name = os.path.join(parent, entry.name)
            if suffix_of(name) in ARCHIVES and expected.pop(name, 0) != entry.stat().st_size:
                wrong.append(name)
    if wrong := [*wrong, *expected]:
        counted = plural(len(wrong), "archive")
        raise StaleIndex(f"{folder} is not as it was catalogued: {counted} changed, such as {wrong[0]}")


def find_catalogue(spec: str) -> str | None:
    """Return the folder whose catalogue is of the archives that are given, by their folder or a pattern."""
    folder, pattern = os.path.split(spec) if suffix_of(spec) in ARCHIVES else (spec.rstrip("/"), "")
    path = os.path.join(folder, CATALOGUE)
    with suppress(PermissionError):  # object stores forbid what is not there
        if not exists(path):
            return None
        if not pattern:
            return folder
        given = set(expand_braces(pattern))
        patterns = [name for name in given if glob.has_magic(name)]
        files = Catalogue(_on_this_host(path)).files.to_pylist()
        others = (file for file in files if file not in given)
        is_all = all(any(fnmatchcase(file, name) for name in patterns) for file in others)
        return folder if is_all and given.difference(patterns).issubset(files) else None
    return None


def open_catalogued(folder: str) -> CataloguedSource:
    """Open the archives of a folder that has a catalogue."""
    catalogue = Catalogue(_on_this_host(os.path.join(folder, CATALOGUE)))
    if not is_url(folder):
        from_rank_0(lambda: _check_files(folder, catalogue))
    return CataloguedSource(folder, catalogue)
