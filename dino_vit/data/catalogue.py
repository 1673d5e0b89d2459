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
import zipfile
import zlib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dino_vit.core.distributed import from_rank_0
from dino_vit.core.storage import write_bytes
from dino_vit.core.text import brief, expand_braces, plural, printable
from dino_vit.data.labels import below_shared, find_splits, folder_labels, number_labels
from dino_vit.data.shards import LocalCopies, ShardedSource
from dino_vit.data.sources.archives import (
    ARCHIVES,
    CLASS_NAMES,
    FIELDS,
    class_names,
    named,
    read_member,
)
from dino_vit.data.sources.files import (
    UNKNOWN,
    ByteRangeReader,
    ChangedFile,
    Refused,
    exists,
    file_signature,
    file_signatures,
    is_url,
    read_file,
    remotely,
    retry,
)
from dino_vit.data.sources.index import bytes_to_arrow, cache_folder, fingerprint_of, to_arrow
from dino_vit.data.sources.source import ShardLayout, suffix_of

CATALOGUE, INDEX = "catalogue.arrow", ".arrow"  # the file, and what the name of an index ends in
DIGESTS = ("digest", "index")
FINGERPRINTED = 2**24  # with more images, the fingerprint is that of the indexes, not of names and sizes
HELD = 256  # indexes in each process
VERSION = 1


class StaleIndex(Refused):
    """The images are not where the catalogue says that they are."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}. Write the catalogue again: dino-vit pack FOLDER index_only=true")


@dataclass(frozen=True, kw_only=True)
class Shard:
    """What a catalogue needs to know of a shard."""

    file: str  # below the folder of the catalogue
    images: int
    size: int
    version: int
    digest: str  # SHA-256, empty if it was not computed
    index: str  # the digest of its index
    first: bytes  # name
    last: bytes
    paths: set[bytes]  # of an image in each folder
    labels: set[str | None]


def index_shard(folder: str, file: str, digest: str = "") -> Shard:
    """Write the index of an archive beside it; with a digest, the checksums in it are of the images."""
    path = os.path.join(folder, file)
    size, version, _ = file_signature(path)
    members = named(ARCHIVES[suffix_of(file)](path), class_names(os.path.dirname(path)))
    members.sort(key=lambda member: member.name)
    if digest:  # of a local tar, whose images are read once more
        with open(path, "rb") as archive:
            contents = (os.pread(archive.fileno(), member.size, member.start) for member in members)
            crcs = [zlib.crc32(content) for content in contents]
        stored = zipfile.ZIP_STORED
        members = [m._replace(method=stored, crc=crc) for m, crc in zip(members, crcs, strict=True)]
    names = [member.name for member in members]
    labels = [None if member.label is None else str(member.label) for member in members]
    columns = {"name": bytes_to_arrow(names), "label": pa.array(labels, pa.string())}
    columns |= {field: to_arrow(np.array([getattr(m, field) for m in members], np.int64)) for field in FIELDS}
    return Shard(
        file=file,
        images=len(members),
        size=size,
        version=version if is_url(path) else UNKNOWN,
        digest=digest,
        index=_write(path + INDEX, pa.record_batch(columns)),
        first=names[0] if names else b"",
        last=names[-1] if names else b"",
        paths={b"".join(name.rpartition(b"/")[:2]) + b"x" for name in names},
        labels=set(labels),
    )


def write_catalogue(folder: str, shards: Sequence[Shard]) -> dict[str, Any]:
    """Write the catalogue of some shards, and return its metadata."""
    shards = sorted((shard for shard in shards if shard.images), key=lambda shard: os.fsencode(shard.file))
    if not shards:
        raise ValueError(f"the archives in {folder} contain no images")
    ordered = all(shard.last < after.first for shard, after in pairwise(shards))
    paths = sorted(set[bytes]().union(*(shard.paths for shard in shards)))
    labels = set[str | None]().union(*(shard.labels for shard in shards))
    below = list(below_shared(paths))
    splits, shared = find_splits(below), paths[0].removesuffix(below[0])
    metadata = {
        "version": VERSION,
        "classes": (folder_labels(paths) if labels == {None} else number_labels([*labels])).classes,
        # Which folder of a name is its label, if labels are folders.
        "label_depth": shared.count(b"/") + bool(splits) if labels == {None} else None,
        "splits": {
            split: [_count_before(folder, shards, shared + split.encode() + end) for end in (b"/", b"0")]
            for split in (splits if ordered else ())
        },  # 0 follows the slash
        "ordered": ordered,
        "class_names": _names_digest(folder, [shard.file for shard in shards]),
        "fingerprint": _fingerprint(folder, shards, ordered),
    }
    columns: dict[str, Any] = {"file": pa.array([shard.file for shard in shards], pa.large_string())}
    columns |= {
        "images": pa.array([shard.images for shard in shards], pa.int64()),
        "signature": signature_column(np.array([(shard.size, shard.version, 0) for shard in shards])),
    }
    for name in DIGESTS:
        columns[name] = pa.array([bytes.fromhex(getattr(shard, name)) for shard in shards], pa.binary())
    batch = pa.record_batch(columns, metadata={"dino_vit": json.dumps(metadata)})
    _write(os.path.join(folder, CATALOGUE), batch)
    return metadata


def signature_column(signatures: NDArray[np.int64]) -> pa.Array:
    """Return signatures of files (n, 3) as a column, which can be mapped into memory as it is."""
    return pa.FixedSizeListArray.from_arrays(pa.array(signatures.ravel(), pa.int64()), 3)


def _names_digest(folder: str, files: Sequence[str]) -> str:
    """Return a digest of the names of classes beside archives, which their indexes hold."""
    folders = [os.path.join(folder, parent) for parent in sorted(set(map(os.path.dirname, files)))]
    return hashlib.sha256(json.dumps(list(map(class_names, folders))).encode()).hexdigest()


def _count_before(folder: str, shards: Sequence[Shard], name: bytes) -> int:
    """Return how many images of ordered shards come before a name."""
    number = bisect_left([shard.last for shard in shards], name)
    names = []
    if number < len(shards):
        index = read_index(os.path.join(folder, shards[number].file), shards[number].index)
        names = index["name"].to_pylist()
    return sum(shard.images for shard in shards[:number]) + bisect_left(names, name)


def _fingerprint(folder: str, shards: Sequence[Shard], ordered: bool) -> str:
    """Return the fingerprint of the same images in any other source, as far as these are few enough."""
    images = sum(shard.images for shard in shards)
    if ordered and images <= FINGERPRINTED:
        indexes = [read_index(os.path.join(folder, shard.file), shard.index) for shard in shards]
        names = [name for index in indexes for name in index["name"].to_pylist()]
        return fingerprint_of(names, np.concatenate([np.from_dlpack(index["size"]) for index in indexes]))
    text = "".join(f"{shard.file}\0{shard.index}\0" for shard in shards)
    return f"shards-{images}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _write(path: str, batch: pa.RecordBatch) -> str:
    """Write rows to a local or remote file, and return its digest."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    data = bytes(sink.getvalue())
    if is_url(path):
        try:
            remotely(path, lambda system, inner: system.pipe_file(inner, data))
        except OSError as error:
            raise ValueError(f"{path} cannot be written: {brief(error, 300)}") from error
    else:
        write_bytes(Path(path), data)
    return hashlib.sha256(data).hexdigest()


def read_index(path: str, digest: str) -> pa.RecordBatch:
    """Return the index of an archive, which must be the one in the catalogue."""
    path += INDEX
    try:
        data = retry(lambda: read_file(path), path) if is_url(path) else read_file(path)
    except FileNotFoundError:
        raise StaleIndex(f"{path} does not exist") from None
    if hashlib.sha256(data).hexdigest() != digest:
        raise StaleIndex(f"{path} is not the one in the catalogue beside it")
    return pa.ipc.open_file(pa.py_buffer(data)).get_batch(0)


class Catalogue(Sequence[str]):
    """The paths of archives, and what is stated of them, mapped into memory; pickled as its path."""

    def __init__(self, folder: str, path: Path) -> None:
        self.folder, self.path = folder, path
        try:
            with pa.memory_map(str(path)) as file:
                batch = pa.ipc.open_file(file).get_batch(0)
            self.metadata: dict[str, Any] = json.loads(batch.schema.metadata[b"dino_vit"])
            self.files, self._digests, self.indexes = batch["file"], batch["digest"], batch["index"]
            self.images = np.from_dlpack(batch["images"])
            flat: Any = np.from_dlpack(batch["signature"].values)
            self.signatures: NDArray[np.int64] = flat.reshape(-1, 3)
        except (pa.ArrowException, OSError, ValueError, LookupError, TypeError) as error:
            raise StaleIndex(f"{path} is damaged or not a catalogue: {error}") from error
        if self.metadata["version"] != VERSION:
            raise StaleIndex(f"{path} is a catalogue of another version of dino-vit")

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
        self.classes = list(map(printable, metadata["classes"]))
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
            raise StaleIndex(f"{self.catalogue[shard]} is not as it was when it was catalogued") from error

    def label(self, index: int) -> int | None:
        shard, row = self._locate(index)
        rows, depth = _rows(self.catalogue, shard), self.catalogue.metadata["label_depth"]
        if depth is None:
            return self._number.get(rows["label"][row].as_py())
        folders = rows["name"][row].as_py().split(b"/")[:-1]
        return self._number[os.fsdecode(folders[depth])] if len(folders) > depth else None

    def name(self, index: int) -> str:
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
        """A digest of the catalogue, and of the times of local shards: an image may be replaced in one."""
        digest = hashlib.sha256(self.catalogue.path.read_bytes())
        if not self.ranges.is_remote:
            digest.update(file_signatures(list(self.catalogue)).tobytes())
        return digest.hexdigest()

    def _locate(self, index: int) -> tuple[int, int]:
        shard = int(np.searchsorted(self.starts, index, side="right")) - 1
        return shard, index - int(self.starts[shard])


def open_catalogued(spec: str) -> CataloguedSource | None:
    """Open archives, given by their folder or a pattern, if a catalogue there is of these and no others."""
    folder, pattern = os.path.split(spec) if suffix_of(spec) in ARCHIVES else (spec.rstrip("/"), "")
    path = os.path.join(folder, CATALOGUE)
    try:
        if not exists(path):
            return None
    except PermissionError:  # object stores forbid what is not there
        return None
    catalogue = Catalogue(folder, _on_this_host(path))
    if pattern and not _matches_all(pattern, set(catalogue.files.to_pylist())):
        return None
    from_rank_0(lambda: _check_files(catalogue))
    return CataloguedSource(catalogue)


def _on_this_host(path: str) -> Path:
    """Return the catalogue, or the copy of a remote one in the cache folder."""
    if not is_url(path):
        return Path(path)
    key = hashlib.sha256(f"{path}\0{file_signature(path)}".encode()).hexdigest()
    copy = cache_folder() / f"catalogue-{key[:24]}.arrow"
    if not copy.exists():
        write_bytes(copy, retry(lambda: read_file(path), path))
    return copy


def _matches_all(pattern: str, files: set[str]) -> bool:
    """Tell whether a pattern is of these files, none of which then lies in a folder below."""
    given = set(expand_braces(pattern))
    patterns = set(filter(glob.has_magic, given))
    matched = {file for file in files if "/" not in file and any(fnmatchcase(file, p) for p in patterns)}
    return files == (given - patterns) | matched


def _check_files(catalogue: Catalogue) -> None:
    """Check the names of classes and, in a local folder, that it has these archives and no others."""
    files = catalogue.files.to_pylist()
    if _names_digest(catalogue.folder, files) != catalogue.metadata["class_names"]:
        raise StaleIndex(f"{CLASS_NAMES} in {catalogue.folder} is not as it was when it was catalogued")
    if is_url(catalogue.folder):
        return
    expected = dict(zip(files, catalogue.signatures[:, 0].tolist(), strict=True))
    wrong = []
    for parent in sorted(set(map(os.path.dirname, expected))):
        for entry in os.scandir(os.path.join(catalogue.folder, parent)):
            name = os.path.join(parent, entry.name)
            if suffix_of(name) in ARCHIVES and expected.pop(name, 0) != entry.stat().st_size:
                wrong.append(name)
    if wrong := [*wrong, *expected]:
        counted = plural(len(wrong), "archive")
        raise StaleIndex(
            f"{catalogue.folder} is not as it was catalogued: {counted} changed, such as {wrong[0]}"
        )
