import subprocess
import sys
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from dino_vit.data.images.decode import UnreadableImage, decode
from tests.support.images import RANDOM, npy, picture, png, png16, saved, smooth, tensor, tiff


@pytest.mark.parametrize("channels", [2, 3, 4])
def test_deep_png_that_would_end_the_process_is_refused(channels):
    """Whatever libpng stumbles over in rows, torchvision's decoder does not survive."""
    rows = [b"\0" + RANDOM.bytes(2 * channels * 30) for _ in range(20)]
    packed, kind = zlib.compress(b"".join(rows)), {2: 4, 3: 2, 4: 6}[channels]
    for damaged in (
        png(30, 20, b"".join(rows[:-1]), depth=16, kind=kind),
        png(30, 20, b"".join([*rows[:-1], b"\7" + rows[-1][1:]]), depth=16, kind=kind),
        png(30, 20, b"", depth=16, kind=kind, packed=packed[:-4] + bytes(4)),
        png(30, 20, b"", depth=16, kind=kind, packed=packed[:100] + bytes(9) + packed[109:]),
        png(30, 20, b"", depth=16, kind=kind, packed=packed[:-9]),
        png(30, 20, b"".join(rows), depth=16, kind=kind)[:-30],
        png(30, 20, b"".join(rows), depth=16, kind=kind).replace(packed[50:60], bytes(10)),
    ):
        with pytest.raises(UnreadableImage):
            decode(damaged, "x")
    assert decode(png(30, 20, b"".join(rows), depth=16, kind=kind), "x").shape == (channels, 20, 30)


def test_deep_png_may_be_interlaced():
    array = picture(13, 11, 3, dtype=np.uint16)
    starts = ((0, 0), (4, 0), (0, 4), (2, 0), (0, 2), (1, 0), (0, 1))
    passes = zip(starts, ((8, 8), (8, 8), (4, 8), (4, 4), (2, 4), (2, 2), (1, 2)), strict=True)
    parts = [array[y::down, x::right] for (x, y), (right, down) in passes]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for part in parts for row in part if row.size)
    image = decode(png(11, 13, rows, depth=16, kind=2, interlaced=1), "x")
    assert torch.equal(image.int(), tensor(array.astype(np.int32)))


FUZZ = """
import random, sys, warnings, logging, time
warnings.simplefilter("ignore")
from tests.data.images.test_formats import fuzzed
from dino_vit.data.images.decode import UnreadableImage, decode
read = refused = 0
for name, data in fuzzed(random.Random(0)):
    start = time.monotonic()
    try:
        image = decode(data, name, max_pixels=1 << 20)
        assert image.ndim == 3 and image.numel() and image.shape[1] * image.shape[2] <= 1 << 20
        int(image.flatten()[:1].float().isnan())
        read += 1
    except UnreadableImage as error:
        assert str(error).startswith(name + ": ") and len(str(error)) > len(name) + 2
        refused += 1
    assert time.monotonic() - start < 5, name
print(read, refused)
"""


def fuzzed(random):
    """Yield whole files of every format, cut off and with flipped bits and bytes."""
    small, deep = smooth(size=(24, 16)), picture(16, 24, 3, dtype=np.uint16)
    exif = Image.Exif()
    exif[0x0112] = 6
    files = {
        "grey.jpg": saved(small.convert("L"), "JPEG"),
        "colour.jpg": saved(small, "JPEG", exif=exif),
        "progressive.jpg": saved(small, "JPEG", progressive=True),
        "cmyk.jpg": saved(small.convert("CMYK"), "JPEG"),
        "colour.png": saved(small, "PNG", exif=exif),
        "palette.png": saved(small.quantize(16), "PNG", transparency=3),
        "deep.png": png16(deep),
        "deep-grey.png": png16(deep[..., :1]),
        "lossy.webp": saved(small, "WEBP"),
        "lossless.webp": saved(smooth("RGBA", size=(24, 16)), "WEBP", lossless=True),
        "two.gif": saved(small.quantize(16), "GIF", save_all=True, append_images=[small.quantize(8)]),
        "plain.bmp": saved(small, "BMP"),
        "palette.bmp": saved(small.quantize(16), "BMP"),
        "plain.tif": saved(small, "TIFF"),
        "lzw.tif": saved(small, "TIFF", compression="tiff_lzw"),
        "jpeg.tif": saved(small, "TIFF", compression="jpeg"),
        "deep.tif": tiff(deep, photometric="rgb", compression="zlib"),
        "pages.tif": tiff(picture(5, 16, 24), photometric="minisblack"),
        "ome.tif": tiff(picture(5, 16, 24), ome=True, metadata={"axes": "CYX"}, photometric="minisblack"),
        "array.npy": npy(deep),
    }
    for name, data in files.items():
        yield name, data
        for _ in range(30):
            cut = data[: random.randrange(len(data))]
            flipped = bytearray(data)
            for _ in range(random.choice([1, 1, 2, 8, 50])):
                at = random.randrange(len(data) if random.random() < 0.5 else min(len(data), 200))
                flipped[at] = flipped[at] ^ (1 << random.randrange(8)) if random.random() < 0.7 else 255
            yield name, cut
            yield name, bytes(flipped)


def test_damaged_files_of_every_format_give_an_image_or_an_error_and_never_a_crash():
    done = subprocess.run([sys.executable, "-c", FUZZ], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    read, refused = map(int, done.stdout.split())
    assert read > 100
    assert refused > 500


def test_warnings_of_other_code_are_shown():
    program = "import warnings, numpy; import dino_vit.data.images.decode; numpy.nanstd([numpy.nan])"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "RuntimeWarning: Degrees of freedom" in ended.stderr
