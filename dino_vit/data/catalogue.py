"""Archives with a catalogue, which `dino-vit pack` writes: what is held does not grow with the images.

    catalogue.arrow   a row for each shard: file, images, size, version, digest, digest of its index
    000000.tar.arrow  an index, a row for each image: name, where it is, its checksum, its label and folder

The catalogue is mapped into memory, and the index of a shard is read when an image of it is.
"""

import glob
import hashlib
import json
import os
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dino_vit.core.cache import cache_folder, note_use
from dino_vit.core.distributed import from_rank_0
from dino_vit.core.storage import write_bytes
from dino_vit.core.text import brief, plural, public, public_text
from dino_vit.data.image_set import ImageSet
from dino_vit.data.index import Index, bytes_to_arrow, fingerprint_of, label_facts, to_arrow
from dino_vit.data.labels import Column, Folders, encode_labels, folder_of_name
from dino_vit.data.paths import CATALOGUE, expand_braces, suffix_of
from dino_vit.data.remote import (
    UNKNOWN,
    Refused,
    file_signature,
    file_signatures,
    is_url,
    read_file,
    remotely,
)
from dino_vit.data.shards import CATALOGUE_AGAIN, ChangedFile
from dino_vit.data.stores.ranges import ARCHIVES, CLASS_NAMES, FIELDS, Ranges, class_names, named, with_titles

INDEX = ".arrow"  # what the name of an index ends in
HELD = 256  # indexes in each process
FINGERPRINTED = 2**24  # with more images, the fingerprint is that of the indexes, not of names and sizes
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
