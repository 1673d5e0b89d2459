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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dino_vit.core.storage import write_bytes
from dino_vit.core.text import brief
from dino_vit.data.catalogued import CATALOGUE, DIGESTS, INDEX, NUMBERS, VERSION, read_index
from dino_vit.data.labels import below_shared, find_splits, folder_labels, number_labels
from dino_vit.data.sources.archives import ARCHIVES, FIELDS, Member, class_names, named
from dino_vit.data.sources.files import UNKNOWN, file_signature
from dino_vit.data.sources.index import bytes_to_arrow, to_arrow
from dino_vit.data.sources.remote import is_url, remotely
from dino_vit.data.sources.source import suffix_of

# With more images, the fingerprint is that of the indexes, not of the names and sizes themselves.
FINGERPRINTED = 2**24


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
    folders: set[bytes]
    labels: set[str | None]
    image_bytes: int


def index_shard(folder: str, file: str, *, digest: str = "", classes: Sequence[str] = ()) -> Shard:
    """Write the index of an archive beside it; with a digest, the checksums in it are of the images."""
    path = os.path.join(folder, file)
    size, version, _ = file_signature(path)
    members = named(ARCHIVES[suffix_of(file)](path), classes or class_names(os.path.dirname(path)))
    members.sort(key=lambda member: member.name)
    if digest:
        members = _with_checksums(path, members)
    names = [member.name for member in members]
    labels = [None if member.label is None else str(member.label) for member in members]
    columns = {"name": bytes_to_arrow(names), "label": pa.array(labels, pa.string())}
    columns |= {field: to_arrow(np.array([getattr(m, field) for m in members], np.int64)) for field in FIELDS}
    index = _to_bytes(pa.record_batch(columns))
    write_anywhere(path + INDEX, index)
    return Shard(
        file=file,
        images=len(members),
        size=size,
        version=version if is_url(path) else UNKNOWN,
        digest=digest,
        index=hashlib.sha256(index).hexdigest(),
        first=names[0] if names else b"",
        last=names[-1] if names else b"",
        folders={name.rpartition(b"/")[0] for name in names},
        labels=set(labels),
        image_bytes=sum(member.size for member in members),
    )


def _with_checksums(path: str, members: Sequence[Member]) -> list[Member]:
    """Return the members of a local tar with the checksums of their contents."""
    with open(path, "rb") as file:
        checksums = [zlib.crc32(os.pread(file.fileno(), member.size, member.start)) for member in members]
    pairs = zip(members, checksums, strict=True)
    return [member._replace(method=zipfile.ZIP_STORED, crc=crc) for member, crc in pairs]


def write_catalogue(folder: str, shards: Sequence[Shard]) -> dict[str, Any]:
    """Write the catalogue of some shards, and return its metadata."""
    shards = sorted((shard for shard in shards if shard.images), key=lambda shard: os.fsencode(shard.file))
    if not shards:
        raise ValueError(f"the archives in {folder} contain no images")
    ordered = all(shard.last < after.first for shard, after in pairwise(shards))
    # Labels and splits by folders are those of an image in each.
    folders = sorted({name + b"/x" if name else b"x" for shard in shards for name in shard.folders})
    labels = set[str | None]().union(*(shard.labels for shard in shards))
    below = list(below_shared(folders))
    splits = find_splits(below) if ordered else {}
    metadata = {
        "version": VERSION,
        "classes": (folder_labels(folders) if labels == {None} else number_labels([*labels])).classes,
        "by_folder": labels == {None},
        "shared": len(folders[0]) - len(below[0]),
        "in_splits": bool(find_splits(below)),
        "splits": dict(_split_ranges(folder, shards, folders[0][: len(folders[0]) - len(below[0])], splits)),
        "ordered": ordered,
        "fingerprint": _fingerprint(folder, shards, ordered),
        "statistics": {"images": sum(shard.images for shard in shards)}
        | {name: sum(getattr(shard, name) for shard in shards) for name in ("size", "image_bytes")},
    }
    columns: dict[str, Any] = {"file": pa.array([shard.file for shard in shards], pa.large_string())}
    columns |= {name: pa.array([getattr(shard, name) for shard in shards], pa.int64()) for name in NUMBERS}
    for name in DIGESTS:
        columns[name] = pa.array([bytes.fromhex(getattr(shard, name)) for shard in shards], pa.binary())
    batch = pa.record_batch(columns, metadata={"dino_vit": json.dumps(metadata)})
    write_anywhere(os.path.join(folder, CATALOGUE), _to_bytes(batch))
    return metadata


def _split_ranges(
    folder: str, shards: Sequence[Shard], shared: bytes, splits: Mapping[str, object]
) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the first and the last image, plus one, of each split."""
    before = np.cumsum([0, *(shard.images for shard in shards)]).tolist()

    def position(name: bytes) -> int:
        number = bisect_left([shard.last for shard in shards], name)
        if number == len(shards):
            return int(before[-1])
        names = read_index(os.path.join(folder, shards[number].file), shards[number].index)["name"]
        return int(before[number]) + bisect_left(names.to_pylist(), name)

    for split in splits:
        start = shared + split.encode()
        yield split, (position(start + b"/"), position(start + b"0"))  # 0 follows the slash


def _fingerprint(folder: str, shards: Sequence[Shard], ordered: bool) -> str:
    """Return the fingerprint of the same images in any other source, as far as these are few enough."""
    images = sum(shard.images for shard in shards)
    digest = hashlib.sha256()
    if not ordered or images > FINGERPRINTED:
        for shard in shards:
            digest.update(f"{shard.file}\0{shard.index}\0".encode())
        return f"shards-{images}-{digest.hexdigest()[:16]}"
    lengths, sizes = list[int](), list[NDArray[Any]]()
    for shard in shards:
        index = read_index(os.path.join(folder, shard.file), shard.index)
        names = index["name"].to_pylist()
        digest.update(b"".join(names))
        lengths += map(len, names)
        sizes.append(np.from_dlpack(index["size"]))
    digest.update(np.cumsum(lengths, dtype=np.int64).tobytes())
    digest.update(np.concatenate(sizes).tobytes())
    return f"images-{images}-{digest.hexdigest()[:16]}"


def _to_bytes(batch: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def write_anywhere(path: str, data: bytes) -> None:
    """Write a local or remote file."""
    if is_url(path):
        try:
            remotely(path, lambda system, inner: system.pipe_file(inner, data))
        except OSError as error:
            raise ValueError(f"{path} cannot be written: {brief(error, 300)}") from error
    else:
        write_bytes(Path(path), data)
