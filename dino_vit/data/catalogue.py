"""Archives with a catalogue, which `dino-vit pack` writes: what is held does not grow with the images.

    catalogue.arrow   a row for each shard: file, images, size, version, digest, digest of its index
    000000.tar.arrow  an index, a row for each image: name, where it is, its checksum, its label

The catalogue is mapped into memory, and the index of a shard is read when an image of it is. Images are
ordered by shard, and in each by name. Unless that is the order of all names, they begin with their shard.
"""

import hashlib
import json
import os
import zipfile
import zlib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dino_vit.core.cache import keep
from dino_vit.core.storage import write_bytes
from dino_vit.core.text import brief, public, public_text
from dino_vit.data.index import bytes_to_arrow, fingerprint_of, to_arrow
from dino_vit.data.labels import below_shared, encode_labels, find_splits, folder_labels
from dino_vit.data.sources.archives import ARCHIVES, FIELDS, class_names, named
from dino_vit.data.sources.paths import suffix_of
from dino_vit.data.sources.remote import UNKNOWN, Refused, file_signature, is_url, read_file, remotely

CATALOGUE, INDEX = "catalogue.arrow", ".arrow"  # the file, and what the name of an index ends in
FINGERPRINTED = 2**24  # with more images, the fingerprint is that of the indexes, not of names and sizes
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
    members = named(ARCHIVES[suffix_of(file)](path), class_names(os.path.dirname(path)) or [])
    members.sort(key=lambda member: member.name)
    if digest:  # of a local tar, whose images are read once more
        with open(path, "rb") as archive:
            contents = (os.pread(archive.fileno(), member.size, member.start) for member in members)
            crcs = [zlib.crc32(content) for content in contents]
        stored = zipfile.ZIP_STORED
        members = [m._replace(method=stored, crc=crc) for m, crc in zip(members, crcs, strict=True)]
    names = [member.name for member in members]
    labels = [None if member.label is None else json.dumps(member.label) for member in members]
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
    shards = sorted(shards, key=lambda shard: os.fsencode(shard.file))
    filled = [shard for shard in shards if shard.images]
    if not filled:
        raise ValueError(f"the archives in {public(folder)} contain no images")
    ordered = all(shard.last < after.first for shard, after in pairwise(filled))
    paths = sorted(set[bytes]().union(*(shard.paths for shard in shards)))
    labels = set[str | None]().union(*(shard.labels for shard in shards))
    folders = {os.path.dirname(os.path.join(folder, shard.file)) for shard in shards}
    stated = labels != {None} or [] in map(class_names, folders)
    values = [None if label is None else json.loads(label) for label in labels]
    column = encode_labels(values) if stated else folder_labels(paths)
    below = list(below_shared(paths))
    splits, shared = find_splits(below), paths[0].removesuffix(below[0])
    metadata = {
        "version": VERSION,
        "labels": list(column.names),
        "sets": None if column.sets is None else [np.flatnonzero(each).tolist() for each in column.sets],
        # Which folder of a name is its label, if labels are folders.
        "label_depth": None if stated else shared.count(b"/") + bool(splits),
        "splits": {
            split: [_count_before(folder, filled, shared + split.encode() + end) for end in (b"/", b"0")]
            for split in (splits if ordered else ())
        },  # 0 follows the slash
        "ordered": ordered,
        "class_names": names_digest(folder, [shard.file for shard in shards]),
        "fingerprint": _fingerprint(folder, shards, ordered),
    }
    columns: dict[str, Any] = {"file": pa.array([shard.file for shard in shards], pa.large_string())}
    columns |= {
        "images": pa.array([shard.images for shard in shards], pa.int64()),
        "signature": signature_column(np.array([(shard.size, shard.version, 0) for shard in shards])),
    }
    for name in ("digest", "index"):
        columns[name] = pa.array([bytes.fromhex(getattr(shard, name)) for shard in shards], pa.binary())
    batch = pa.record_batch(columns, metadata={"dino_vit": json.dumps(metadata)})
    _write(os.path.join(folder, CATALOGUE), batch)
    return metadata


def signature_column(signatures: NDArray[np.int64]) -> pa.Array:
    """Return signatures of files (n, 3) as a column, which can be mapped into memory as it is."""
    return pa.FixedSizeListArray.from_arrays(pa.array(signatures.ravel(), pa.int64()), 3)


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
            raise ValueError(f"{public(path)} cannot be written: {brief(error, 300)}") from error
    else:
        write_bytes(Path(path), data)
    return hashlib.sha256(data).hexdigest()
