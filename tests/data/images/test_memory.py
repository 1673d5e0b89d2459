"""What large images and what pretends to be one may take, in a process of its own."""

import shutil
import struct
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import pytest

from dino_vit.data.images.decode import UnreadableImage, read_image
from dino_vit.data.images.pixels import Pixels
from dino_vit.data.open import open_source
from tests.support.image_sets import write_tar, write_zip
from tests.support.images import write_synthetic

STATUS = Path("/proc/self/status")
pytestmark = pytest.mark.skipif(
    not STATUS.exists(), reason="the peak of a process is read from Linux's /proc"
)
SIDE = 14_000  # 196 megapixels, below data.max_pixels
INSPECT = """
import sys
from dino_vit.core.process import keep_freed_memory
from dino_vit.data.images.pixels import Pixels
from dino_vit.data.open import open_source
from dino_vit.data.statistics import channel_statistics, inspect_images

keep_freed_memory()  # as a command does
source = open_source(sys.argv[1])
summary = inspect_images(source, [0, 1])
if len(sys.argv) > 2:
    channel_statistics(source, [0, 1], Pixels(bits=16))
print(len(summary.images), *(image.reason for image in summary.unreadable), sep="; ")
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def inspected(source, *more):
    """Return what is said of two images, and the peak of the memory in GB."""
    said = subprocess.check_output([sys.executable, "-c", INSPECT, source, *more], text=True)
    *text, peak = said.splitlines()
    return text[0], int(peak) * 1024 / 1e9


def write_large_png(path):
    """Write a black image, a row at a time."""
    packed = zlib.compressobj(1)
    rows = [packed.compress(bytes(1 + 3 * SIDE)) for _ in range(SIDE)]
    header = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)
    chunks = (b"IHDR", header), (b"IDAT", b"".join([*rows, packed.flush()])), (b"IEND", b"")
    path.parent.mkdir()
    with path.open("wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n")
        for name, data in chunks:
            file.write(
                struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
            )


@pytest.mark.parametrize("more", [[], pytest.param(["statistics"], marks=pytest.mark.slow)])
def test_large_images_are_decoded_one_at_a_time(tmp_path, more):
    write_large_png(tmp_path / "photos" / "a.png")
    shutil.copy(tmp_path / "photos" / "a.png", tmp_path / "photos" / "b.png")
    said, peak = inspected(tmp_path / "photos", *more)
    assert said == "2"
    assert peak < 4


def test_a_member_that_would_inflate_beyond_any_image_is_not_read(tmp_path):
    write_synthetic(tmp_path / "b.png", 0)
    block = zlib.compressobj(9, zlib.DEFLATED, -15)
    mebibyte = block.compress(bytes(2**20)) + block.flush(zlib.Z_FULL_FLUSH)
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a.png", mebibyte * 2**11 + b"\x03\x00")
        archive.write(tmp_path / "b.png", "b.png")
        info = archive.getinfo("a.png")  # of which the directory at the end is written
        info.compress_type, info.file_size, info.CRC = zipfile.ZIP_DEFLATED, 2**31, 0
    assert (tmp_path / "a.zip").stat().st_size < 5e6
    said, peak = inspected(tmp_path / "a.zip")
    assert said == "1; its 2,147,483,648 bytes are more than an image of data.max_pixels=200000000 has"
    assert peak < 1.5


@pytest.mark.parametrize(("suffix", "write"), [("tar", write_tar), ("zip", write_zip)])
def test_a_member_is_measured_by_the_setting(tmp_path, suffix, write):
    write_synthetic(tmp_path / "a.png", 0, size=64)
    data = (tmp_path / "a.png").read_bytes()
    source = open_source(str(write(tmp_path / f"a.{suffix}", {"a.png": data})))
    with pytest.raises(UnreadableImage, match=r"bytes are more than an image of data.max_pixels=100 has"):
        read_image(source, 0, Pixels(max_pixels=100))
    assert read_image(source, 0, Pixels(max_pixels=64 * 64)).shape == (3, 64, 64)
