"""Images in tar shards and zip archives, read in place: an index says where each one's bytes are."""

from __future__ import annotations

import bz2
import json
import logging
import os
import struct
import zipfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dino_vit.core.progress import progress
from dino_vit.data.labels import folder_labels, number_labels
from dino_vit.data.sources.files import Ranges, in_threads, open_file, stamps
from dino_vit.data.sources.index import Draft, Sink, open_index
from dino_vit.data.sources.indexed import IndexedSource, by_name, draft_items
from dino_vit.data.sources.source import is_image
from dino_vit.data.sources.tarfiles import Member, read_members

log = logging.getLogger("dino_vit")

COLUMNS = ("file", "start", "stored", "size", "method", "crc")
LABEL_KEYS = ("label", "cls", "class", "target", "category")  # of a shard's .json
LABEL_BYTES = 2**20  # of a .cls or .json; a larger one is no label
LOCAL_HEADER = struct.Struct("<4s5HLLLHH")


class Item(NamedTuple):
    """An image in an archive."""

    name: bytes
    start: int
    stored: int  # bytes in the archive
    size: int  # bytes of the image file
    method: int = zipfile.ZIP_STORED
    crc: int = -1  # of the image file, where the archive has one
    label: object = None


class ArchiveSource(IndexedSource):
    """Images in archives; their names are data, and nothing is ever written where they point.

    Labels are those of the archive, or else the first-level folders of the names. Where several archives have
    the same name in them, all names begin with the archive's own.
    """

    kind: str

    def __init__(self, spec: str, files: Sequence[str]) -> None:
        self._spec, self._files = spec, list(files)
        super().__init__(open_index(self.kind, spec, self._build, self._files))
        self._ranges = Ranges(self._files, self.index["stamps"])

    def read(self, index: int) -> bytes:
        row = self._row(index)
        file, start, stored, size, method, crc = (int(self.index[name][row]) for name in COLUMNS)
        data = self._ranges.read(file, start, stored)
        if method != zipfile.ZIP_STORED:
            data = _inflate(data, method, size)
        if crc >= 0 and zlib.crc32(data) != crc:
            raise OSError("its bytes do not have the checksum that the archive has for them")
        return data

    @staticmethod
    def list_archive(path: str, length: int) -> list[Item]:
        """Return the images of an archive."""
        raise NotImplementedError

    def _build(self, _: Sink) -> Draft:
        before = stamps(self._files)
        pairs = [(path, int(length)) for path, length in zip(self._files, before[:, 0], strict=True)]
        with progress(f"Indexing {self._spec}") as advance:
            listed = in_threads(
                lambda pair: self.list_archive(*pair), pairs, lambda found: advance(len(found))
            )
        items = [item for found in listed for item in found]
        if not items:
            raise ValueError(f"{self._spec} has no images in it, only other files or none.")
        numbers = np.repeat(np.arange(len(listed), dtype=np.int32), [len(found) for found in listed])
        names = _unique(items, [os.path.basename(path) for path in self._files], numbers)
        order = by_name(names)
        names = [names[place] for place in order]
        labels = [items[place].label for place in order]
        sizes = np.array([item.size for item in items], dtype=np.int64)[order]
        return draft_items(
            names=names,
            sizes=sizes,
            labels=folder_labels(names) if not any(map(_given, labels)) else number_labels(labels),
            columns={
                "file": numbers[order],
                "start": np.array([item.start for item in items], dtype=np.int64)[order],
                "stored": np.array([item.stored for item in items], dtype=np.int64)[order],
                "size": sizes,
                "method": np.array([item.method for item in items], dtype=np.int16)[order],
                "crc": np.array([item.crc for item in items], dtype=np.int64)[order],
            },
            watched=self._files,
            stamps=before,
        )


def _given(label: object) -> bool:
    return label is not None


def _unique(items: Sequence[Item], archives: Sequence[str], numbers: NDArray[np.int32]) -> list[bytes]:
    """Return names, with the archives' before them where a name is in several."""
    names = [item.name for item in items]
    if len(set(names)) == len(names) or len(archives) == 1:
        return names
    tops = [os.fsencode(archive) for archive in archives]
    return [tops[number] + b"/" + name for number, name in zip(numbers.tolist(), names, strict=True)]


def _inflate(data: bytes, method: int, size: int) -> bytes:
    """Decompress a member of a zip, and no further than to the size that it says it has."""
    try:
        if method == zipfile.ZIP_DEFLATED:
            data = zlib.decompressobj(-15).decompress(data, size + 1)
        elif method == zipfile.ZIP_BZIP2:
            data = bz2.BZ2Decompressor().decompress(data, size + 1)
        else:
            raise OSError(f"compressed by method {method}, which is not read")
    except zlib.error as error:
        raise OSError(f"it cannot be decompressed: {error}") from error
    if len(data) != size:
        raise OSError(f"the archive says that it has {size} bytes, which it has not")
    return data


class TarSource(ArchiveSource):
    """Tar shards in WebDataset's layout: `key.jpg` and perhaps its label in `key.cls` or `key.json`."""

    kind = "tar"

    @staticmethod
    def list_archive(path: str, length: int) -> list[Item]:
        with open_file(path) as file:
            members = list(read_members(path, file, length))
            images = [member for member in members if is_image(member.name)]
            keys = {key_of(member.name)[0] for member in images}
            labels = _read_labels(path, file, members, keys)
        _warn_of_several(path, images)
        return [Item(m.name, m.start, m.size, m.size, label=labels.get(key_of(m.name)[0])) for m in images]


def key_of(name: bytes) -> tuple[bytes, bytes]:
    """Split a member's name as WebDataset does, at the first dot of its last part."""
    folder, slash, last = name.rpartition(b"/")
    key, _, extension = last.partition(b".")
    return folder + slash + key, extension


def _read_labels(
    path: str, file: BinaryIO, members: Iterable[Member], keys: set[bytes]
) -> dict[bytes, object]:
    """Return the labels by key; a .cls goes before a .json."""
    labels: dict[bytes, object] = {}
    for member in members:
        key, extension = key_of(member.name)
        if key not in keys or extension not in (b"cls", b"json") or member.size > LABEL_BYTES:
            continue
        file.seek(member.start)
        text = file.read(member.size).decode("utf-8", errors="replace").strip()
        if extension == b"cls":
            labels[key] = text
        elif key not in labels:
            labels[key] = _label_in_json(path, member.name, text)
    return {key: label for key, label in labels.items() if label is not None}


def _label_in_json(path: str, name: bytes, text: str) -> object:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path}: {os.fsdecode(name)!r} is no JSON: {error}") from error
    if isinstance(content, dict):
        content = next((content[key] for key in LABEL_KEYS if key in content), None)
    return content if isinstance(content, (str, int, float)) else None


def _warn_of_several(path: str, images: Iterable[Member]) -> None:
    """Say where a sample has several images, which may be a mask beside a photograph."""
    extensions: dict[bytes, set[bytes]] = defaultdict(set)
    for member in images:
        key, extension = key_of(member.name)
        extensions[key].add(extension)
    several = Counter(b", ".join(sorted(found)) for found in extensions.values() if len(found) > 1)
    for found, count in several.most_common(1):
        text = "%s: %d samples have several images (%s); each is taken for itself"
        log.warning(text, path, count, os.fsdecode(found))


class ZipSource(ArchiveSource):
    """The images in zip archives."""

    kind = "zip"

    @staticmethod
    def list_archive(path: str, length: int) -> list[Item]:
        with open_file(path) as file:
            try:
                with zipfile.ZipFile(file) as archive:
                    infos = [info for info in archive.infolist() if is_image(info.filename)]
            except (zipfile.BadZipFile, NotImplementedError) as error:
                raise ValueError(
                    f"{path} is broken or no zip archive: {error}. Copy or pack it again."
                ) from error
            if any(info.flag_bits & 1 for info in infos):
                raise ValueError(f"{path} is encrypted. Unpack it, or pack it again without a password.")
            return [_zip_item(path, file, info) for info in infos]


def _zip_item(path: str, file: BinaryIO, info: zipfile.ZipInfo) -> Item:
    try:
        start = member_start(file, info)
    except ValueError as error:
        raise ValueError(f"{path} is broken: {error}. Copy it again.") from error
    name = os.fsencode(info.filename.removeprefix("./"))
    return Item(name, start, info.compress_size, info.file_size, info.compress_type, info.CRC)


def member_start(file: BinaryIO, info: zipfile.ZipInfo) -> int:
    """Find where a member's bytes begin in a zip, behind a header of its own."""
    file.seek(info.header_offset)
    header = file.read(LOCAL_HEADER.size)
    if len(header) < LOCAL_HEADER.size or not header.startswith(b"PK\3\4"):
        raise ValueError(f"{info.filename!r} is not where it should be")
    *_, name_length, extra_length = LOCAL_HEADER.unpack(header)
    return int(info.header_offset + LOCAL_HEADER.size + name_length + extra_length)
