import io
import sys

import imagecodecs
import numpy as np
import pytest
import simplejpeg
import torch
from einops import rearrange
from PIL import Image, ImageOps

from dino_vit.data.images.decode import UnreadableImage, decode, read_given
from tests.support.images import CLEAR, RANDOM, npy, picture, png, png16, saved, smooth, tensor, tiff


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        *(("JPEG", mode) for mode in ("L", "RGB")),
        *(("PNG", mode) for mode in ("1", "L", "LA", "RGB", "RGBA")),
        *(("WEBP", mode) for mode in ("RGB", "RGBA")),
        *(("BMP", mode) for mode in ("1", "L", "RGB")),
        *(("TIFF", mode) for mode in ("1", "L", "LA", "RGB", "RGBA")),
        *(("JPEG2000", mode) for mode in ("L", "RGB", "RGBA")),
        *(("AVIF", mode) for mode in ("RGB", "RGBA")),
        *(("PPM", mode) for mode in ("L", "RGB")),
    ],
)
def test_every_format_gives_the_channels_that_it_has(kind, mode):
    data = saved(smooth(mode), kind, **({"lossless": True} if kind == "WEBP" else {}))
    image = decode(data, "x")
    expected = Image.open(io.BytesIO(data)).convert("L" if mode == "1" else mode)
    assert image.dtype == torch.uint8
    assert image.shape == (len(expected.getbands()), 20, 30)
    assert torch.equal(image, tensor(expected))
    if mode in CLEAR:
        assert torch.equal(decode(data, "x", alpha=False), image[:-1])


def test_a_palette_is_looked_up_and_with_a_transparent_colour_has_an_alpha_channel():
    colours = smooth().quantize(16)
    for kind in ("PNG", "GIF", "BMP", "TIFF"):
        assert torch.equal(decode(saved(colours, kind), "x"), tensor(colours.convert("RGB")))
    for kind in ("PNG", "GIF"):
        data = saved(colours, kind, transparency=3)
        expected = tensor(Image.open(io.BytesIO(data)).convert("RGBA"))
        assert 0 in expected[3]
        assert torch.equal(decode(data, "x"), expected)
        assert torch.equal(decode(data, "x", alpha=False), expected[:3])


@pytest.mark.parametrize(("mode", "kind"), [("CMYK", "JPEG"), ("CMYK", "TIFF"), ("LAB", "TIFF")])
def test_other_colours_become_the_rgb_that_they_stand_for(mode, kind):
    original = smooth()
    image = decode(saved(original.convert(mode), kind), "x")
    assert image.shape == (3, 20, 30)
    assert (image.float() - tensor(original).float()).abs().mean() < 6


@pytest.mark.parametrize("byteorder", ["<", ">"])
def test_sixteen_bits_stay_sixteen_bits(byteorder):
    grey, colour = picture(20, 30, dtype=np.uint16), picture(20, 30, 3, dtype=np.uint16)
    for data, expected in (
        (saved(Image.fromarray(grey), "PNG"), grey),
        (tiff(grey, byteorder=byteorder), grey),
        (tiff(colour, photometric="rgb", byteorder=byteorder), colour),
        (npy(grey.astype(f"{byteorder}u2")), grey),
    ):
        image = decode(data, "x")
        assert image.dtype == torch.uint16
        assert torch.equal(image.int(), tensor(expected.astype(np.int32)))


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "float32", "float64"])
@pytest.mark.parametrize("compression", [None, "zlib"])
@pytest.mark.parametrize("form", ["contig", "separate", "pages", "ome"])
def test_five_channels_of_a_tiff_in_every_form(form, dtype, compression):
    array = (1000 * RANDOM.random((5, 20, 30))).astype(dtype)
    options = {
        "contig": {"photometric": "minisblack", "planarconfig": "contig"},
        "separate": {"photometric": "minisblack", "planarconfig": "separate"},
        "pages": {"photometric": "minisblack"},
        "ome": {"ome": True, "metadata": {"axes": "CYX"}, "photometric": "minisblack"},
    }[form]
    stored = rearrange(array, "c h w -> h w c") if form == "contig" else array
    image = decode(tiff(stored, compression=compression, **options), "x")
    assert image.numpy().dtype == array.dtype
    assert np.array_equal(image.numpy(), array)


def test_colours_with_a_further_band_lose_nothing():
    array = picture(20, 30, 4)
    infrared = tiff(array, photometric="rgb", extrasamples=[0])
    assert torch.equal(decode(infrared, "x", alpha=False), tensor(array))
    clear = tiff(array, photometric="rgb", extrasamples=[2])
    assert torch.equal(decode(clear, "x", alpha=False), tensor(array[..., :3]))
    deep = tiff(array.astype(np.uint16), photometric="rgb", extrasamples=[2])
    assert torch.equal(decode(deep, "x", alpha=False).int(), tensor(array[..., :3].astype(np.int32)))


def test_a_tiff_of_several_pictures_gives_the_first_and_a_stack_is_refused():
    pictures = [smooth() for _ in range(3)]
    data = saved(pictures[0], "TIFF", save_all=True, append_images=pictures[1:])
    assert torch.equal(decode(data, "x"), tensor(pictures[0]))
    stack = tiff(picture(4, 20, 30), imagej=True, metadata={"axes": "ZYX"})
    with pytest.raises(UnreadableImage, match="a stack along Z and Y and X is not an image"):
        decode(stack, "x")


@pytest.mark.parametrize("shape", [(20, 30), (5, 20, 30), (20, 30, 5), (1, 20, 30)])
@pytest.mark.parametrize("dtype", [bool, np.uint8, np.uint16, np.int32])
def test_arrays_have_their_channels_at_the_shorter_end(shape, dtype):
    array = picture(*shape, dtype=dtype)
    first = len(shape) == 3 and shape[0] < 20
    expected = array if first else rearrange(np.atleast_3d(array), "h w c -> c h w")
    image = decode(npy(np.asfortranarray(array)), "x")
    assert np.array_equal(image.numpy(), expected)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(
    "kind", ["JPEG", "PNG", "WEBP", "TIFF", "PALETTE", "DEEP PNG", "DEEP PNG IN COLOUR", "DEEP TIFF"]
)
def test_every_format_is_turned_upright(kind, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    if kind in ("DEEP TIFF", "DEEP PNG IN COLOUR"):
        array = picture(20, 30, 3, dtype=np.uint16)
        tag = (274, "H", 1, orientation, True)
        data = tiff(array, photometric="rgb", extratags=[tag]) if kind == "DEEP TIFF" else png16(array, exif)
        small = Image.fromarray((array >> 8).astype(np.uint8))
        small.getexif()[0x0112] = orientation
        expected = tensor(ImageOps.exif_transpose(small))
        assert torch.equal((decode(data, "x").int() >> 8).byte(), expected)
        return
    image = smooth("P" if kind == "PALETTE" else "RGB")
    if kind == "DEEP PNG":
        image = Image.fromarray(picture(20, 30, dtype=np.uint16))
    options = {"lossless": True} if kind == "WEBP" else {"quality": 100} if kind == "JPEG" else {}
    name = {"PALETTE": "PNG", "DEEP PNG": "PNG"}.get(kind, kind)
    data = saved(image, name, exif=exif, **options)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    expected = expected.convert("RGB") if kind == "PALETTE" else expected
    assert np.array_equal(decode(data, "x").numpy(), tensor(np.array(expected)).numpy())


def test_an_animation_gives_its_first_frame():
    frames = [Image.new("RGB", (8, 6), colour) for colour in ("white", "black")]
    for kind in ("GIF", "WEBP", "PNG", "AVIF"):
        data = saved(frames[0], kind, save_all=True, append_images=frames[1:])
        assert (decode(data, "x")[:3].amax(0) == 255).all()


def test_what_is_no_image_is_said_in_a_line():
    whole = saved(smooth(size=(200, 200)), "JPEG")
    broken = {
        "empty": (b"", "the file is empty"),
        "text": (
            b"hello",
            "its format is none of AVIF, BMP, GIF, HEIC, JPEG, JPEG 2000, npy, PNG, PPM, TIFF, WebP",
        ),
        "cut": (whole[: len(whole) // 2], "it cannot be decoded: .*[Tt]runcated"),
        "png": (saved(smooth(), "PNG")[:60], "it cannot be decoded: "),
        "tiff": (tiff(picture(20, 30, 5), photometric="minisblack")[:300], "it cannot be decoded: "),
        "words": (npy(np.array([["a", "b"]])), "it cannot be decoded: "),
        "cube": (
            npy(picture(4, 5, 4)),
            r"it cannot be decoded: an array of shape \(4, 5, 4\) is",
        ),
        "short": (npy(picture(20, 30))[:-1], "it cannot be decoded: "),
        "none": (npy(picture(0, 30)), "it cannot be decoded: the image has no pixels"),
    }
    for name, (data, reason) in broken.items():
        with pytest.raises(UnreadableImage, match=f"^{name}: {reason}") as caught:
            decode(data, name)
        assert "\n" not in str(caught.value)


def test_images_beyond_max_pixels_are_refused():
    whole = smooth(size=(64, 64))
    files = {
        "png of nothing": (png(60_000, 60_000, bytes(100)), "60000 × 60000"),
        "deep tiff": (tiff(np.zeros((6, 64, 64), np.uint16), photometric="minisblack"), "64 × 64"),
        "npy": (npy(np.zeros((64, 64), np.uint8)), "64 × 64"),
        **{kind: (saved(whole, kind), "64 × 64") for kind in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")},
    }
    for kind, (data, size) in files.items():
        with pytest.raises(UnreadableImage, match=f"{size} pixels exceed data.max_pixels=4095"):
            decode(data, kind, max_pixels=4095)
        if size == "64 × 64":
            assert decode(data, kind, max_pixels=8192).shape[1:] == (64, 64)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("white", [65535, 4095, 100])
def test_ppm_of_16_bits_is_refused_as_pillow_would_reduce_it(channels, white):
    head = f"P{5 if channels == 1 else 6} 30 20 {white}\n".encode()
    if white == 100:
        assert decode(head + bytes([white] * 600 * channels), "x").unique().tolist() == [255]
        return
    with pytest.raises(UnreadableImage, match="PPM of more than 8 bits is not read; save it as TIFF or PNG"):
        decode(head + bytes(1200 * channels), "x")


@pytest.mark.parametrize("channels", [1, 3])
def test_jpeg_2000_of_12_bits_is_refused_as_pillow_would_reduce_it(channels):
    array = picture(20, 30, channels, dtype=np.uint16) >> 4
    with pytest.raises(UnreadableImage, match="JPEG 2000 of more than 8 bits is not read"):
        decode(imagecodecs.jpeg2k_encode(array.squeeze(), level=0, bitspersample=12), "x")


def test_heic_needs_a_plug_in(monkeypatch):
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    with pytest.raises(UnreadableImage, match="HEIC needs another library: pip install pillow-heif"):
        decode(b"\0\0\0\x18ftypheic" + bytes(12), "x")


@pytest.mark.parametrize("channels", [2, 3, 4])
def test_png_of_16_bits_keeps_them_in_colour(channels, monkeypatch):
    array = picture(20, 30, channels, dtype=np.uint16)
    image = decode(png16(array), "x")
    assert image.dtype == torch.uint16
    assert torch.equal(image.int(), tensor(array.astype(np.int32)))
    assert len(decode(png16(array), "x", alpha=False)) == {2: 1, 3: 3, 4: 3}[channels]
    with pytest.raises(UnreadableImage, match="it cannot be decoded: "):
        decode(png16(array)[:-100], "x")
    monkeypatch.setitem(sys.modules, "imagecodecs", None)
    with pytest.raises(UnreadableImage, match="needs another library: pip install imagecodecs"):
        decode(png16(array), "x")


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
def test_jpeg_has_the_pixels_of_pillow_at_every_scale(mode, progressive):
    data = saved(smooth(size=(301, 203)).convert(mode), "JPEG", quality=70, progressive=progressive)
    for factor in (1, 2, 4, 8):
        expected = Image.open(io.BytesIO(data))
        expected.draft(None, (301 // factor, 203 // factor))
        image = decode(data, "x", reduction=lambda height, width, factor=factor: factor)
        if mode == "CMYK":  # which is not reduced
            expected = Image.open(io.BytesIO(data)).convert("RGB")
        assert torch.equal(image, tensor(expected))


def test_a_jpeg_that_libjpeg_warns_of_is_read_as_far_as_it_goes():
    whole = saved(smooth(size=(64, 48)), "JPEG", restart_marker_blocks=1)
    marker = whole.rindex(b"\xff\xd5")
    with pytest.raises(ValueError, match="Corrupt JPEG data"):
        simplejpeg.decode_jpeg(damaged := whole[:marker] + b"\xff\xd7" + whole[marker + 2 :])
    assert torch.equal(decode(damaged, "x")[:, :8], decode(whole, "x")[:, :8])


def test_a_transparent_colour_of_deep_png_is_an_alpha_channel():
    array = picture(20, 30, 3, dtype=np.uint16)
    data, expected = png16(array, clear=array[3, 4].tolist()), tensor(array.astype(np.int32))
    image = decode(data, "x").int()
    assert torch.equal(image[:3], expected)
    assert image[3].argmin() == 3 * 30 + 4
    assert torch.equal(decode(data, "x", alpha=False).int(), expected)


def test_a_picture_that_is_given_stays_as_it_is():
    image = smooth()
    image.getexif()[274] = 6
    assert read_given(image).shape == (3, 30, 20)
    assert image.size == (30, 20)
