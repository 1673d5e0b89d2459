"""Images in tar shards and zip archives, read in place: the index holds where each image's bytes are."""

import bz2
import os
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import BinaryIO, NamedTuple

import numpy as np

from dino_vit.core.text import brief, printable, progress
from dino_vit.data.labels import LABEL_COLUMNS, number_labels, parse_json
from dino_vit.data.shards import ShardedSource
from dino_vit.data.sources.files import exists, open_file, read_file
from dino_vit.data.sources.index import IndexContents, WriteImages, open_index
from dino_vit.data.sources.remote import in_threads
from dino_vit.data.sources.source import is_image

CLASS_NAMES = "classes.txt"  # beside shards whose labels are its lines, counted from 0
FIELDS = "start", "stored", "size", "method", "crc"  # of a member, in the index
LABEL_BYTES = 2**20  # a larger .cls or .json is not a label
DECOMPRESS: dict[int, Callable[[bytes], bytes]] = {
    zipfile.ZIP_STORED: bytes,
    zipfile.ZIP_DEFLATED: partial(zlib.decompress, wbits=-15),
    zipfile.ZIP_BZIP2: bz2.decompress,
}
LOCAL_HEADER = struct.Struct("<4s5HLLLHH")


class Member(NamedTuple):
    """A file in an archive."""

    name: bytes
    start: int
    stored: int  # bytes in the archive
    size: int  # bytes when decompressed
    method: int = zipfile.ZIP_STORED
    crc: int = 0
    label: object = None


class ArchiveSource(ShardedSource):
    """Images in archives of one kind. Their names are never used as paths.

    Labels are those in the archive, or else the first-level folders of the names. If several archives contain
    the same name, all names are prefixed with the archive's own.
    """

    def __init__(self, suffix: str, spec: str, files: Sequence[str]) -> None:
        self._suffix, self._spec, self._files = suffix, spec, list(files)
        super().__init__(open_index(suffix[1:], spec, self._build, self._files), self._files)

    def read(self, index: int) -> bytes:
        item = {name: int(column[index]) for name, column in self.index.columns.items()}
        stored = item["file"], item["start"], item["stored"]
        data = self.local_copies.read(*stored) if self.ranges.is_remote else None
        if data is None:
            data = self.ranges.read(*stored)
        return data if self._suffix == ".tar" else _unzip(data, item["method"], item["crc"])

    def _is_same(self, file: int) -> bool:
        columns = self.index.columns
        rows = np.flatnonzero(columns["file"] == file)
        try:
            members = sorted(ARCHIVES[self._suffix](self._files[file]), key=lambda member: member.start)
        except (OSError, ValueError):
            return False
        rows = rows[np.argsort(columns["start"][rows], kind="stable")]
        return len(rows) == len(members) and all(
            self.raw_name(row).endswith(member.name)
            and all(columns[field][row] == getattr(member, field) for field in FIELDS)
            for row, member in zip(rows.tolist(), members, strict=True)
        )

    def _build(self, _: WriteImages) -> IndexContents:
        list_images = ARCHIVES[self._suffix]
        with progress(f"Indexing {self._spec}") as advance:
            listed = in_threads(list_images, self._files, lambda members: advance(len(members)))
        tables = [f"{archive.rpartition('/')[0] or '.'}/{CLASS_NAMES}" for archive in self._files]
        classes = {path: read_file(path).decode().splitlines() for path in set(tables) if exists(path)}
        listed = [_named(of, classes.get(path, [])) for of, path in zip(listed, tables, strict=True)]
        images = [image for members in listed for image in members]
        if not images:
            raise ValueError(f"{self._spec} contains no images.")
        file = np.repeat(np.arange(len(listed), dtype=np.int32), [len(members) for members in listed])
        names = [image.name for image in images]
        if len(set(names)) < len(names) and len(self._files) > 1:
            prefixes = [os.fsencode(os.path.basename(archive)) for archive in self._files]
            names = [prefixes[number] + b"/" + name for number, name in zip(file, names, strict=True)]
        labels = [image.label for image in images]
        columns = {field: np.array([getattr(image, field) for image in images]) for field in FIELDS}
        return IndexContents(
            names=names,
            sizes=columns["size"],
            labels=None if labels.count(None) == len(labels) else number_labels(labels),
            columns={"file": file, **columns},
        )


def _named(members: list[Member], classes: Sequence[str]) -> list[Member]:
    """Return members with the names of their classes, if all labels are numbers of these."""
    names: dict[object, str | None] = {str(number): name for number, name in enumerate(classes)}
    names[None] = None
    if not all(member.label in names for member in members):
        return members
    return [member._replace(label=names[member.label]) for member in members]


def _unzip(data: bytes, method: int, crc: int) -> bytes:
    """Decompress a member of a zip, and check its checksum; `zipfile` takes half as long again."""
    if method not in DECOMPRESS:
        raise OSError(f"compression method {method} is not supported")
    try:
        content = DECOMPRESS[method](data)
    except (zlib.error, ValueError, OSError) as error:
        raise OSError(f"it cannot be decompressed: {error}") from error
    if zlib.crc32(content) != crc:
        raise OSError("its checksum does not match the archive's")
    return content


def tar_images(path: str) -> list[Member]:
    """List the images of a tar in WebDataset's layout: `key.jpg`, its label in `key.cls` or `key.json`."""
    with open_file(path) as file:
        members = list_members(path, file)
        images = [member for member in members if is_image(member.name)]
        keys = [split_key(image.name) for image in images]
        labels = _read_labels(path, file, members, {key for key, _ in keys})
    return [image._replace(label=labels.get(key)) for image, (key, _) in zip(images, keys, strict=True)]


def list_members(path: str, file: BinaryIO) -> list[Member]:
    """Return the regular files and hard links of a tar, also of several tars one after another.

    `tarfile` takes damage for the end of the archive, so each end is checked for its block of zeros.
    """
    length = file.seek(0, os.SEEK_END)
    members: dict[bytes, Member] = {}
    listed: list[Member] = []
    position = 0
    try:
        while position < length:
            file.seek(position)
            with tarfile.TarFile(fileobj=file, encoding="utf-8", errors="surrogateescape") as tar:
                for info in tar:
                    if info.isreg() or info.islnk():
                        member = _tar_member(info, members)
                        members[member.name] = member
                        listed.append(member)
            position = _skip_end(file, tar.offset)
    except (tarfile.TarError, ValueError, IndexError, OverflowError) as error:
        text = f"{path} is truncated, damaged or compressed as a whole: {brief(error, 300)}"
        raise ValueError(text) from error
    return listed


def _tar_member(info: tarfile.TarInfo, members: Mapping[bytes, Member]) -> Member:
    name = _clean(info.name)
    if info.isreg():
        return Member(name, info.offset_data, info.size, info.size)
    target = members.get(_clean(info.linkname))
    if target is None:
        raise ValueError(f"{info.name!r} is a link to {info.linkname!r}, which does not come before it")
    return target._replace(name=name)


def _skip_end(file: BinaryIO, position: int) -> int:
    """Return the position after the blocks of zeros that end an archive."""
    end = position
    file.seek(position)
    while (block := file.read(tarfile.BLOCKSIZE)) == bytes(tarfile.BLOCKSIZE):
        end += tarfile.BLOCKSIZE
    if end == position:
        raise ValueError(f"no valid header at byte {position}" if block else "its end is missing")
    return end


def _clean(name: str) -> bytes:
    while name.startswith("./"):
        name = name[2:].lstrip("/")
    return name.encode("utf-8", "surrogateescape")


def split_key(name: bytes) -> tuple[bytes, bytes]:
    """Split a name as WebDataset does, at the first dot of its last part."""
    folder, slash, last = name.rpartition(b"/")
    key, _, extension = last.partition(b".")
    return folder + slash + key, extension


def _read_labels(
    path: str, file: BinaryIO, members: Iterable[Member], keys: set[bytes]
) -> dict[bytes, object]:
    """Return the labels by key; a .cls takes precedence over a .json."""
    labels: dict[bytes, object] = {}
    for member in members:
        key, extension = split_key(member.name)
        if key not in keys or extension not in (b"cls", b"json") or member.size > LABEL_BYTES:
            continue
        file.seek(member.start)
        text = file.read(member.size).decode("utf-8", errors="replace").strip()
        if extension == b"cls":
            labels[key] = text
        elif key not in labels:
            labels[key] = _label_in_json(path, member.name, text)
    return labels


def _label_in_json(path: str, name: bytes, text: str) -> object:
    content = parse_json(text, f"{path}: {os.fsdecode(name)!r}")
    columns = dict(content) if isinstance(content, tuple) else {}
    label = next((columns[key] for key in LABEL_COLUMNS if key in columns), None)
    return printable(label) if isinstance(label, str | int | float) else None  # a list is none


def zip_images(path: str) -> list[Member]:
    """List the images of a zip archive."""
    try:
        with open_file(path) as file, zipfile.ZipFile(file) as archive:
            infos = [info for info in archive.infolist() if is_image(info.filename)]
            images = [_zip_member(file, info) for info in infos]
    except OSError:
        raise
    except Exception as error:  # zipfile raises nearly anything on damaged files
        raise ValueError(f"{path} is damaged or not a zip archive: {brief(error, 300)}") from error
    if any(info.flag_bits & 1 for info in infos):
        raise ValueError(f"{path} is encrypted. Unpack it, or pack it again without a password.")
    return images


def _zip_member(file: BinaryIO, info: zipfile.ZipInfo) -> Member:
    """Find where a member's bytes begin, after a header of its own, which `zipfile` does not tell."""
    file.seek(info.header_offset)
    *_, name_length, extra_length = LOCAL_HEADER.unpack(file.read(LOCAL_HEADER.size))
    start = info.header_offset + LOCAL_HEADER.size + name_length + extra_length
    name = os.fsencode(info.filename.removeprefix("./"))
    return Member(name, start, info.compress_size, info.file_size, info.compress_type, info.CRC)


ARCHIVES = {".tar": tar_images, ".zip": zip_images}
