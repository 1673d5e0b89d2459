"""Where each member of a tar lies, from its headers alone: plain, GNU and PAX names, sizes, hard links."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

BLOCK = 512
LONG_NAME, LONG_LINK, HARD_LINK, PAX, PAX_GLOBAL = b"L", b"K", b"1", b"x", b"g"
EXTENSION = 2**24  # bytes of names that a header may announce, far beyond what any writer does
COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


class Member(NamedTuple):
    """A file in an archive: its bytes' place and size."""

    name: bytes
    start: int
    size: int


class BrokenTar(ValueError):
    """A tar that is no tar, or not all of one."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path} is broken: {reason}. Copy or pack it again, or take it out of the set.")


def read_members(path: str, file: BinaryIO, length: int) -> Iterator[Member]:
    """Yield the regular files of a tar; names are bytes as they stand there, without a leading `./`."""
    placed: dict[bytes, Member] = {}
    for header, start in _headers(path, file, length):
        if header.kind == HARD_LINK:
            target = placed.get(_clean(header.link))
            if target is None:
                raise BrokenTar(path, f"{header.name!r} is a link to {header.link!r}, which is not before it")
            member = Member(_clean(header.name), target.start, target.size)
        elif header.kind in (b"\0", b"0", b"7"):
            member = Member(_clean(header.name), start, header.size)
        else:
            continue
        placed[member.name] = member
        yield member


class _Header(NamedTuple):
    name: bytes
    link: bytes
    size: int
    kind: bytes


def _headers(path: str, file: BinaryIO, length: int) -> Iterator[tuple[_Header, int]]:
    """Yield the members' headers with what extensions say put in, and where their bytes begin."""
    place, ended = 0, False
    said: dict[bytes, bytes] = {}
    while place < length:
        block = _read(path, file, place, BLOCK)
        place += BLOCK
        if not block.strip(b"\0"):
            ended = True
            continue
        header = _parse(path, block, place - BLOCK)
        if header.kind in (LONG_NAME, LONG_LINK, PAX, PAX_GLOBAL):
            if header.size > EXTENSION:
                raise BrokenTar(
                    path, f"the header at byte {place - BLOCK} announces {header.size} bytes of names"
                )
            data = _read(path, file, place, header.size)
            if header.kind in (LONG_NAME, LONG_LINK):
                said[b"path" if header.kind == LONG_NAME else b"linkpath"] = data.partition(b"\0")[0]
            elif header.kind == PAX:
                said.update(_pax(path, data))
            place += _padded(header.size)
            continue
        header = _extended(path, header, said)
        said, ended = {}, False
        stored = 0 if header.kind in (HARD_LINK, b"2", b"5") else header.size
        if place + stored > length:
            raise BrokenTar(path, f"it ends in the middle of {header.name!r}, it was cut off")
        yield header, place
        place += _padded(stored)
    if not ended:
        raise BrokenTar(path, "it has no end mark, it was cut off or never finished")


def _read(path: str, file: BinaryIO, place: int, size: int) -> bytes:
    file.seek(place)
    data = file.read(size)
    if len(data) < size:
        raise BrokenTar(path, "it ends in the middle of a header, it was cut off")
    return data


def _parse(path: str, block: bytes, place: int) -> _Header:
    try:
        checksum = int(block[148:156].strip(b" \0") or b"0", 8)
    except ValueError:
        checksum = -1
    if checksum != sum(block[:148]) + sum(block[156:]) + 8 * ord(" "):
        kind = next(
            (name for magic, name in COMPRESSED.items() if place == 0 and block.startswith(magic)), None
        )
        if kind:
            raise ValueError(
                f"{path} is compressed ({kind}), so that nothing in it can be found without reading all "
                f"before it. Decompress it: images hardly shrink."
            )
        raise BrokenTar(path, f"there is no header at byte {place}")
    name, prefix = block[:100].partition(b"\0")[0], block[345:500].partition(b"\0")[0]
    if block[257:263] == b"ustar\0" and prefix:
        name = prefix + b"/" + name
    return _Header(name, block[157:257].partition(b"\0")[0], _number(path, block[124:136]), block[156:157])


def _number(path: str, digits: bytes) -> int:
    """Read a size: octal digits or, as GNU writes what is too large for them, a binary number."""
    if digits[0] & 0x80:
        return int.from_bytes(bytes([digits[0] & 0x7F]) + digits[1:], "big")
    try:
        return int(digits.partition(b"\0")[0].strip() or b"0", 8)
    except ValueError as error:
        raise BrokenTar(path, f"{digits!r} is no size") from error


def _pax(path: str, data: bytes) -> dict[bytes, bytes]:
    """Read the records `length key=value` of an extended header."""
    found: dict[bytes, bytes] = {}
    while data.strip(b"\0"):
        length, _, rest = data.partition(b" ")
        if not length.isdigit() or not len(length) + 3 <= int(length) <= len(data):
            raise BrokenTar(path, f"an extended header says {data[:40]!r}")
        key, _, value = rest[: int(length) - len(length) - 1].partition(b"=")
        found[key] = value.removesuffix(b"\n")
        data = data[int(length) :]
    return found


def _extended(path: str, header: _Header, said: dict[bytes, bytes]) -> _Header:
    if any(key.startswith(b"GNU.sparse") for key in said):
        raise BrokenTar(path, f"{header.name!r} is stored as a sparse file, which cannot be read in place")
    return _Header(
        said.get(b"path", header.name),
        said.get(b"linkpath", header.link),
        _decimal(path, said[b"size"]) if b"size" in said else header.size,
        header.kind,
    )


def _decimal(path: str, digits: bytes) -> int:
    if not digits.isdigit():
        raise BrokenTar(path, f"{digits!r} is no size")
    return int(digits)


def _padded(size: int) -> int:
    return -size % BLOCK + size


def _clean(name: bytes) -> bytes:
    while name.startswith(b"./"):
        name = name[2:].lstrip(b"/")
    return name
