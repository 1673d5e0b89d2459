"""Write a catalogue of archives: an index beside each, and a file that lists them (`data/catalogue.py`)."""

import hashlib
import json
import os
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dino_vit.core.storage import write_bytes
from dino_vit.core.text import brief, public
from dino_vit.data.catalogue import INDEX, VERSION, names_digest, read_index
from dino_vit.data.index import bytes_to_arrow, fingerprint_of, label_facts, to_arrow
from dino_vit.data.labels import Column, Folders, encode_labels, folder_of_name
from dino_vit.data.paths import CATALOGUE, suffix_of
from dino_vit.data.remote import UNKNOWN, file_signature, is_url, remotely
from dino_vit.data.stores.ranges import ARCHIVES, FIELDS, class_names, named, with_titles

FINGERPRINTED = 2**24  # with more images, the fingerprint is that of the indexes, not of names and sizes


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
    kinds: Sequence[tuple[str, bytes]]  # of images: label in JSON, and folder


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
    given = [(json.dumps(member.label), folder_of_name(member.name)) for member in members]
    kinds = {kind: number for number, kind in enumerate(sorted(set(given)))}
    columns = {
        "name": bytes_to_arrow(names),
        "kind": to_arrow(np.array([kinds[each] for each in given], np.int32)),
    }
    columns |= {field: to_arrow(np.array([getattr(m, field) for m in members], np.int64)) for field in FIELDS}
    shown = json.dumps([(label, os.fsdecode(below)) for label, below in kinds])
    return Shard(
        file=file,
        images=len(members),
        size=size,
        version=version if is_url(path) else UNKNOWN,
        digest=digest,
        index=_write(path + INDEX, pa.record_batch(columns, metadata={"kinds": shown})),
        first=names[0] if names else b"",
        last=names[-1] if names else b"",
        kinds=[*kinds],
    )


def write_catalogue(folder: str, shards: Sequence[Shard]) -> dict[str, Any]:
    """Write the catalogue of some shards, and return its metadata."""
    shards = sorted(shards, key=lambda shard: os.fsencode(shard.file))
    if not any(shard.images for shard in shards):
        raise ValueError(f"the archives in {public(folder)} contain no images")
    metadata = {
        "version": VERSION,
        "class_names": names_digest(folder, [shard.file for shard in shards]),
        **_meaning(folder, shards),
        **_identity(folder, shards),
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


def _meaning(folder: str, shards: Sequence[Shard]) -> dict[str, Any]:
    """Return what kinds of images mean: their labels, if some are stated, or their folders; and splits."""
    kinds = sorted(set[tuple[str, bytes]]().union(*(shard.kinds for shard in shards)))
    folders = Folders.of(below for _, below in kinds)
    stated = sorted({label for label, _ in kinds})
    beside = {os.path.dirname(os.path.join(folder, shard.file)) for shard in shards}
    if stated != ["null"] or [] in map(class_names, beside):
        labels = encode_labels([json.loads(label) for label in stated])
        codes = dict(zip(stated, labels.codes(np.arange(len(stated))).tolist(), strict=True))
    else:
        labels, codes = encode_labels([folders.label(below) for _, below in kinds]), None
    return {**label_facts(labels, Column(names=folders.splits)), "depth": folders.depth, "stated": codes}


def _identity(folder: str, shards: Sequence[Shard]) -> dict[str, Any]:
    """Return the fingerprint of the same images in any other source, as far as these are few enough.

    If archives contain the same name, or may contain it, names begin with the archive's.
    """
    filled = [shard for shard in shards if shard.images]
    images = sum(shard.images for shard in filled)
    if images > FINGERPRINTED:
        titled = any(shard.last >= after.first for shard, after in pairwise(filled))
        text = "".join(f"{shard.file}\0{shard.index}\0" for shard in shards)
        fingerprint = f"shards-{images}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        return {"titled": titled, "fingerprint": fingerprint}
    indexes = [read_index(os.path.join(folder, shard.file), shard.index) for shard in filled]
    parts = [index["name"].to_pylist() for index in indexes]
    names = with_titles([shard.file for shard in filled], parts)
    sizes = np.concatenate([np.from_dlpack(index["size"]) for index in indexes])
    fingerprint = fingerprint_of([*chain.from_iterable(names)], sizes)
    return {"titled": names is not parts, "fingerprint": fingerprint}


def signature_column(signatures: NDArray[np.int64]) -> pa.Array:
    """Return signatures of files (n, 3) as a column, which can be mapped into memory as it is."""
    return pa.FixedSizeListArray.from_arrays(pa.array(signatures.ravel(), pa.int64()), 3)


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
