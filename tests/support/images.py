"""Sets of image files for the tests: of every kind, and broken in every way."""

import io
import struct
import zlib

import numpy as np
import tifffile
import torch
from einops import rearrange
from PIL import Image

from dino_vit.data.synthetic import make_textures

CLEAR = ("LA", "RGBA")
RANDOM = np.random.default_rng(0)


def picture(*shape, dtype=np.uint8):
    high = 2 if dtype is bool else np.iinfo(dtype).max + 1
    return RANDOM.integers(0, high, shape).astype(dtype)


def smooth(mode="RGB", size=(30, 20)):
    small = Image.fromarray(picture(4, 5, 3))
    image = small.resize(size, Image.Resampling.BICUBIC).convert(mode)
    if mode in CLEAR:
        image.putalpha(image.getchannel(0))
    return image


def write_synthetic(path, number, *, size=32):
    """Write a generated image; the last digit of its number is its pattern."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = make_textures(length=number + 1, size=size).read(number)
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)


def write_classes(folder, classes, count, *, first=0):
    """Write a folder of each class, with a pattern that is its own, whichever classes there are beside it."""
    for name in classes:
        for number in range(first, first + count):
            pattern = "abcdefghij".index(name[0])
            write_synthetic(folder / name / f"{number}.png", 10 * number + pattern, size=16)
    return folder


def tensor(array):
    array = np.asarray(array)
    return torch.from_numpy(rearrange(array.reshape(*array.shape[:2], -1), "h w c -> c h w").copy())


def saved(image, kind, **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def tiff(array, **options):
    buffer = io.BytesIO()
    tifffile.imwrite(buffer, array, **options)
    return buffer.getvalue()


def npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def png16(array, exif=None, clear=None):
    """Write 16-bit PNG in colour, which Pillow cannot; `clear` is a transparent colour."""
    height, width, channels = array.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in array)
    return png(width, height, rows, depth=16, kind={1: 0, 2: 4, 3: 2, 4: 6}[channels], exif=exif, clear=clear)


def png(width, height, rows, *, depth=8, kind=0, interlaced=0, packed=None, exif=None, clear=None):
    """Write PNG with any claims in its header."""
    header = struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, interlaced)
    chunks = ((b"IHDR", header),)
    chunks += ((b"tRNS", np.array(clear, ">u2").tobytes()),) if clear else ()
    chunks += ((b"IDAT", packed or zlib.compress(rows)),)
    chunks += ((b"eXIf", exif.tobytes().removeprefix(b"Exif\0\0")),) if exif else ()
    chunks += ((b"IEND", b""),)
    whole = (struct.pack(">I", len(b)) + n + b + struct.pack(">I", zlib.crc32(n + b)) for n, b in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(whole)


def broken_files():
    """Return files that cannot be used, by kind; all begin as images do, but for the text."""
    whole = Image.fromarray(make_textures(length=1).read(0).permute(1, 2, 0).numpy())
    jpeg, plain = saved(whole, "JPEG"), saved(whole, "PNG")
    not_a_number = np.full((32, 32), np.nan, dtype=np.float32)
    return {
        "empty.jpg": b"",
        "text.jpg": b"<html>404 Not Found</html>",
        "truncated.jpg": jpeg[: len(jpeg) // 2],
        "truncated.png": plain[: len(plain) // 2],
        "damaged.png": plain[:60] + bytes(20) + plain[80:],
        "header.jpg": jpeg[:3],
        "bomb.png": png(60_000, 60_000, bytes(100)),
        "bomb.gif": b"GIF89a" + struct.pack("<HH", 65_000, 65_000) + saved(whole, "GIF")[10:],
        "bands.tif": tiff(np.zeros((32, 32, 5), np.uint8), photometric="minisblack", planarconfig="contig"),
        "nan.npy": npy(not_a_number),
        "zeros.webp": b"RIFF" + bytes(500),
        "objects.npy": npy(np.array([{}, []], dtype=object)),
    }
