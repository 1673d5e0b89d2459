"""Images in tar shards and zip archives, read in place: the index holds where each image's bytes are."""

import bz2
import os
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import chain
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dino_vit.core.process import in_threads
from dino_vit.core.text import brief, printable, progress, public
from dino_vit.data.image_set import ImageSet, Store
from dino_vit.data.index import Index, IndexContents, indexing, open_index
from dino_vit.data.labels import LABEL_COLUMNS, NO_LABEL, encode_labels, is_label, parse_json
from dino_vit.data.paths import file_identity, folder_of, is_image, short_names
from dino_vit.data.remote import exists, is_url, open_file, read_file
from dino_vit.data.shards import RemoteShards, Shards

CLASS_NAMES = "classes.txt"  # beside shards: their labels are its lines, counted from 0; empty: no labels
FIELDS = "start", "stored", "size", "method", "crc"  # of a member, in the index
# Given the bytes of a member and the largest size that it may have, return its content.
DECOMPRESS: dict[int, Callable[[bytes, int], bytes]] = {
    zipfile.ZIP_STORED: lambda data, _: data,
    zipfile.ZIP_DEFLATED: lambda data, most: zlib.decompressobj(-15).decompress(data, most),
    zipfile.ZIP_BZIP2: lambda data, most: bz2.BZ2Decompressor().decompress(data, most),
}
HEADERS = 2**12  # bytes that are requested for a header in a remote archive
TAR_BLOCK = 512  # bytes of the header before a member
HEADER = -1  # method of a member of a tar, whose checksum is that of its header
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


class Ranges(Store):
    """Images in archives, whose names are never used as paths."""

    shards: Shards

    def __init__(
        self,
        index: Index,
        path: Callable[[int], str],
        signatures: NDArray[np.int64],
        digest: Callable[[int], str] | None = None,
    ) -> None:
        kind = RemoteShards if is_url(path(0)) else Shards
        self.index, self.shards = index, kind(path, index.starts, signatures, digest)

    def read(self, row: int) -> bytes:
        """Return a file that has the checksum in the index, which in a tar is mostly that of its header."""
        shard, columns, at = self.index.locate(row)
        start, stored, size, method, crc = (int(columns[field][at]) for field in FIELDS)
        header = TAR_BLOCK if method == HEADER else 0
        data = self.shards.read(shard, start - header, stored + header)
        if not header:
            return decompress(data, method, size, crc)
        if zlib.crc32(data[:header]) != crc:
            raise self.shards.changed(shard)
        return data[header:]

    def size(self, row: int) -> int:
        _, columns, at = self.index.locate(row)
        return int(columns["size"][at])

    def origins(self, rows: Iterable[int]) -> list[Hashable]:
        files = [file_identity(self.shards.path(shard)) for shard in range(len(self.shards.sizes))]
        located = map(self.index.locate, rows)
        return [(files[shard], int(columns["start"][at])) for shard, columns, at in located]


def open_archives(suffix: str, spec: str, files: Sequence[str]) -> ImageSet:
    """Open the images in archives of one kind.

    Labels are those in the archive, or else the first-level folders of the names in it. If several archives
    contain the same name, all names begin with the archive's own, or its path if another is called so.
    """
    beside = sorted({os.path.join(folder_of(path), CLASS_NAMES) for path in files})
    with indexing(spec):
        read = [*files, *filter(exists, beside)]
    index = open_index(suffix[1:], spec, lambda *_: _contents(suffix, spec, files), read)
    ranges = Ranges(index, list(files).__getitem__, index.file_signatures[: len(files)])
    return index.image_set(ranges, index.stamp)


def _contents(suffix: str, spec: str, files: Sequence[str]) -> IndexContents:
    folders = list(map(folder_of, files))
    classes = {folder: class_names(folder) for folder in set(folders)}
    with progress(f"Indexing {public(spec)}") as advance:
        listed = in_threads(ARCHIVES[suffix], files, lambda images: advance(len(images)))
    listed = [named(part, classes[folder] or []) for part, folder in zip(listed, folders, strict=True)]
    images = [image for members in listed for image in members]
    if not images:
        raise ValueError(f"{public(spec)} contains no images.")
    names, labels = [image.name for image in images], [image.label for image in images]
    stated = labels.count(None) < len(labels) or [] in classes.values()
    titles, parts = short_names(files), [[image.name for image in members] for members in listed]
    columns = {field: np.array([getattr(image, field) for image in images], np.int64) for field in FIELDS}
    return IndexContents(
        names=[*chain.from_iterable(with_titles(titles, parts))],
        sizes=columns["size"],
        labels=encode_labels(labels) if stated else None,
        folders=names,
        columns=columns,
        counts=[*map(len, listed)],
    )


def with_titles(titles: Sequence[str], parts: Sequence[Sequence[bytes]]) -> Sequence[Sequence[bytes]]:
    """Return the names in several archives, after the archive's own where two have the same."""
    if len(parts) < 2 or len(set[bytes]().union(*parts)) == sum(map(len, parts)):
        return parts
    return [
        [os.fsencode(f"{title}/") + name for name in part] for title, part in zip(titles, parts, strict=True)
    ]


def class_names(folder: str) -> list[str] | None:
    """Return the names of the classes that are stated beside shards; none: their images have no labels."""
    path = os.path.join(folder, CLASS_NAMES)
    return read_file(path).decode().splitlines() if exists(path) else None


def named(members: list[Member], classes: Sequence[str]) -> list[Member]:
    """Return members with the names of their classes, if all labels are numbers of these."""
    names: dict[object, str | None] = {str(number): name for number, name in enumerate(classes)}
    names |= dict.fromkeys((None, *NO_LABEL))
    if not all(not isinstance(member.label, list) and member.label in names for member in members):
        return members
    return [member._replace(label=names[member.label]) for member in members]


def decompress(data: bytes, method: int, size: int, crc: int) -> bytes:
    """Decompress a member of a zip, and check its size and checksum; `zipfile` takes half as long again."""
    if method not in DECOMPRESS:
        raise OSError(f"compression method {method} is not supported")
    try:
        content = DECOMPRESS[method](data, size + 1)
    except (zlib.error, ValueError, OSError) as error:
        raise OSError(f"it cannot be decompressed: {error}") from error
    if len(content) != size:
        raise OSError(f"it has not the {size:,} bytes that the archive states")
    if zlib.crc32(content) != crc:
        raise OSError("its checksum does not match the archive's")
    return content


def tar_images(path: str) -> list[Member]:
    """List the images of a tar in WebDataset's layout: `key.jpg`, its label in `key.cls` or `key.json`."""
    with open_file(path, HEADERS) as file:
        members = list_members(path, file)
        images = [member for member in members if is_image(member.name)]
    keys = [split_key(image.name)[0] for image in images]
    labels = _read_labels(path, members, set(keys))
    return [image._replace(label=labels.get(key)) for image, key in zip(images, keys, strict=True)]


def list_members(path: str, file: BinaryIO) -> list[Member]:
    """Return the regular files and hard links of a tar.

    `tarfile` takes damage for the end of the archive, so the end is checked for its block of zeros.
    """
    members: dict[bytes, Member] = {}
    listed: list[Member] = []
    try:
        with tarfile.TarFile(fileobj=file, encoding="utf-8", errors="surrogateescape") as tar:
            for info in tar:
                if info.isreg() or info.islnk():
                    member = _tar_member(info, members, file)
                    members[member.name] = member
                    listed.append(member)
        file.seek(tar.offset)
        if file.read(TAR_BLOCK) != bytes(TAR_BLOCK):
            raise ValueError(f"neither a header nor its end is at byte {tar.offset:,}")
    except (tarfile.TarError, ValueError, IndexError, OverflowError) as error:
        text = f"{public(path)} is truncated, damaged or compressed as a whole: {brief(error, 300)}"
        raise ValueError(text) from error
    return listed


def _tar_member(info: tarfile.TarInfo, members: Mapping[bytes, Member], file: BinaryIO) -> Member:
    """Return a member, with the checksum of its header and, if it may be a label, with its text."""
    name = _clean(info.name)
    if info.isreg():
        file.seek(info.offset_data - TAR_BLOCK)
        crc, text = zlib.crc32(file.read(TAR_BLOCK)), None
        if split_key(name)[1] in (b"cls", b"json"):
            text = file.read(info.size).decode("utf-8", errors="replace").strip()
        return Member(name, info.offset_data, info.size, info.size, HEADER, crc, text)
    target = members.get(_clean(info.linkname))
    if target is None:
        raise ValueError(f"{info.name!r} is a link to {info.linkname!r}, which does not come before it")
    return target._replace(name=name)


def _clean(name: str) -> bytes:
    while name.startswith("./"):
        name = name[2:].lstrip("/")
    return name.encode("utf-8", "surrogateescape")


def split_key(name: bytes) -> tuple[bytes, bytes]:
    """Split a name as WebDataset does, at the first dot of its last part."""
    folder, slash, last = name.rpartition(b"/")
    key, _, extension = last.partition(b".")
    return folder + slash + key, extension


def _read_labels(path: str, members: Iterable[Member], keys: set[bytes]) -> dict[bytes, object]:
    """Return the labels by key; a .cls takes precedence over a .json."""
    labels: dict[bytes, object] = {}
    for member in members:
        key, extension = split_key(member.name)
        if key not in keys or not isinstance(member.label, str):
            continue
        if extension == b"cls":
            labels[key] = member.label
        elif key not in labels:
            labels[key] = _label_in_json(path, member.name, member.label)
    return labels


def _label_in_json(path: str, name: bytes, text: str) -> object:
    content = parse_json(text, f"{public(path)}: {os.fsdecode(name)!r}")
    columns = dict(content) if isinstance(content, tuple) else {}
    label = next((columns[key] for key in LABEL_COLUMNS if key in columns), None)
    if isinstance(label, list) and is_label(label):
        return [printable(str(each)) for each in label]
    return printable(str(label)) if is_label(label) else None


def zip_images(path: str) -> list[Member]:
    """List the images of a zip archive."""
    try:
        with open_file(path, HEADERS) as file, zipfile.ZipFile(file) as archive:
            infos = [info for info in archive.infolist() if is_image(info.filename)]
            images = [_zip_member(file, info) for info in infos]
    except OSError:
        raise
    except Exception as error:  # zipfile raises nearly anything on damaged files
        raise ValueError(f"{public(path)} is damaged or not a zip archive: {brief(error, 300)}") from error
    if any(info.flag_bits & 1 for info in infos):
        raise ValueError(f"{public(path)} is encrypted. Unpack it, or pack it again without a password.")
    return images


def _zip_member(file: BinaryIO, info: zipfile.ZipInfo) -> Member:
    """Find where a member's bytes begin, after a header of its own, which `zipfile` does not tell."""
    file.seek(info.header_offset)
    *_, name_length, extra_length = LOCAL_HEADER.unpack(file.read(LOCAL_HEADER.size))
    start = info.header_offset + LOCAL_HEADER.size + name_length + extra_length
    name = os.fsencode(info.filename.removeprefix("./"))
    return Member(name, start, info.compress_size, info.file_size, info.compress_type, info.CRC)


ARCHIVES = {".tar": tar_images, ".zip": zip_images}
