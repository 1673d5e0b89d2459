"""Files of some kilobytes that would fill memory, and files without an end, among images."""

import os
import struct
import zipfile
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq

from tests.support.images import png, saved, smooth

MIB = 2**20


@cache
def zeros(mib: int) -> bytes:
    """Return so many MiB of zeros, compressed."""
    packer = zlib.compressobj(9)
    return b"".join([*(packer.compress(bytes(MIB)) for _ in range(mib)), packer.flush()])


def zip_of_zeros(rng: Random, folder: Path) -> Path:
    """Images with zeros after them, whose sizes are stated truly or not."""
    content = saved(smooth(), "PNG") + bytes(rng.choice([1, 1, 1, 8, 64]) * MIB)
    path = folder / "a.zip"
    with zipfile.ZipFile(path, "w", rng.choice([zipfile.ZIP_DEFLATED] * 4 + [zipfile.ZIP_BZIP2])) as archive:
        for number in range(3):
            archive.writestr(f"{number}.png", content)
    stated = rng.choice([len(content), 0, 1, 1000, 2**31, 2**32 - 2])
    path.write_bytes(path.read_bytes().replace(struct.pack("<L", len(content)), struct.pack("<L", stated)))
    return path


def wide_images(rng: Random, folder: Path) -> Path:
    """PNG with many pixels or texts in little data."""
    for name in "abc":
        side = rng.choice([1, 1, 1, 500, 500, 2000, 2000, 14_000, 60_000, 2**31 - 1])
        depth, kind = rng.choice([(8, 0), (8, 2), (8, 3), (8, 6), (16, 2), (1, 0)])
        data = png(side, rng.choice([side, 1]), b"", depth=depth, kind=kind, packed=zeros(8))
        content = b"a\0\0" + zeros(20)
        title = rng.choice([b"zTXt", b"iCCP"])
        chunk = struct.pack(">I", len(content)) + title + content
        chunk += struct.pack(">I", zlib.crc32(title + content))
        (folder / f"{name}.png").write_bytes(rng.choice([data, data[:33] + chunk + data[33:]]))
    return folder


def links(rng: Random, folder: Path) -> Path:
    """Folders with links to each other, to those above and to themselves."""
    names = ["a", "b", "c", "a/d", "b/e"]
    for name in names:
        (folder / name).mkdir()
        smooth().save(folder / name / "1.png")
    for number in range(rng.randrange(1, 30)):
        target = rng.choice([folder / rng.choice(names), folder, folder.parent, Path(f"link-{number}")])
        (folder / rng.choice(names) / f"link-{number}").symlink_to(target, target_is_directory=True)
    return rng.choice([folder, folder / "**" / "*.png"])


def endless(rng: Random, folder: Path) -> Path:
    """Pipes, devices and files with terabytes of nothing, among images or instead of a source."""
    suffixes = ["png", "npy", "txt", "csv", "tar", "zip", "parquet"]
    smooth().save(folder / "a.jpg")
    path = folder / f"b.{rng.choice(suffixes)}"
    match rng.randrange(4):
        case 0:
            os.mkfifo(path)
        case 1:
            path.symlink_to(
                rng.choice(["/dev/zero", "/dev/stdin", "/dev/null", "/proc/kmsg", "/proc/self/mem"])
            )
        case 2:
            path.write_bytes(b"")
        case _:
            with path.open("wb") as file:
                file.write(rng.choice([b"", saved(smooth(), "PNG"), b"a/x.png\n", b"PAR1"]))
                file.truncate(2**40)
    return rng.choice([folder, path])


def table(rng: Random, folder: Path) -> Path:
    """A column of which all rows are the same large image."""
    image, rows = bytes(rng.choice([1, 1, 20]) * MIB), rng.choice([1, 4])
    indices = pa.array([0] * rows, pa.int32())
    column = pa.DictionaryArray.from_arrays(indices, pa.array([image], pa.binary()))
    options = {"compression": "zstd", "dictionary_pagesize_limit": 2**30, "store_schema": False}
    pq.write_table(pa.table({"image": column}), folder / "a.parquet", **options)
    return folder / "a.parquet"


BOMBS: list[Callable[[Random, Path], Path]] = [zip_of_zeros, wide_images, links, endless, table]


def bomb(rng: Random, folder: Path) -> Path:
    """Write one of any kind, and return the source that has it."""
    (folder / "photos").mkdir()
    return rng.choice(BOMBS)(rng, folder / "photos")
