"""Image files with fewer pixels, and shards of them."""

import io

import numpy as np
import pytest
import torch
from PIL import Image, ImageCms
from torch.nn import functional as F

from dino_vit.cli import main
from dino_vit.data.images.decode import decode, format_of
from dino_vit.data.images.reduce import Irreducible, reduce_mask, reduce_photo
from dino_vit.data.sources.masks import open_masks
from dino_vit.data.sources.open import open_source
from tests.support.images import npy, picture, png16, saved, smooth


def test_a_photo_is_upright_and_looks_as_before():
    exif = Image.Exif()
    exif[274] = 6  # lies on its side
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    data = saved(smooth(size=(640, 480)), "JPEG", quality=95, exif=exif, icc_profile=profile)
    found = reduce_photo(data, "photo", 96)
    assert format_of(found) == "JPEG"
    image, whole = decode(found, "photo"), decode(data, "photo")
    assert image.shape == (3, 128, 96)
    expected = F.interpolate(whole[None], size=(128, 96), mode="bicubic", antialias=True)[0]
    assert (image.float() - expected.float()).abs().mean() < 2
    with Image.open(io.BytesIO(found)) as file:
        assert file.info["icc_profile"] == profile
        assert 274 not in file.getexif()


@pytest.mark.parametrize(
    ("mode", "kind", "options", "expected"),
    [
        ("RGB", "JPEG", {}, "JPEG"),
        ("L", "JPEG", {}, "JPEG"),
        ("CMYK", "JPEG", {}, "JPEG"),
        ("RGB", "WebP", {}, "JPEG"),
        ("RGB", "WebP", {"lossless": True}, "PNG"),
        ("RGBA", "WebP", {}, "PNG"),
        ("RGB", "PNG", {}, "PNG"),
        ("RGBA", "PNG", {}, "PNG"),
        ("LA", "PNG", {}, "PNG"),
        ("RGB", "BMP", {}, "PNG"),
        ("RGB", "TIFF", {}, "PNG"),
    ],
)
def test_what_was_lossy_stays_so_and_nothing_else_becomes_so(mode, kind, options, expected):
    data = saved(smooth(mode, (90, 60)), kind, **options)
    found = reduce_photo(data, "image", 20)
    assert format_of(found) == expected
    image, whole = decode(found, "image"), decode(data, "image")
    assert image.shape == (len(whole), 20, 30)
    small = F.interpolate(whole[None], size=(20, 30), mode="bicubic", antialias=True)[0]
    assert (image.float() - small.float()).abs().mean() < (8 if expected == "JPEG" else 1e-6)
    assert reduce_photo(data, "image", 60) is None


@pytest.mark.parametrize("data", [png16(picture(40, 30, 3, dtype=np.uint16)), npy(picture(40, 30, 7))])
def test_what_cannot_be_written_again_without_loss_is_refused(data):
    with pytest.raises(Irreducible):
        reduce_photo(data, "deep", 20)
    with pytest.raises(Irreducible):
        reduce_mask(data, 20)


@pytest.mark.parametrize("mode", ["P", "L"])
def test_the_values_of_a_mask_are_not_mixed(mode):
    values = np.kron(np.array([[3, 200], [255, 7]], np.uint8), np.ones((30, 45), np.uint8))
    mask = Image.fromarray(values, "L")
    if mode == "P":
        mask = Image.frombytes("P", mask.size, mask.tobytes())
        mask.putpalette([value % 256 for value in range(3 * 256)])
    found = Image.open(io.BytesIO(reduce_mask(saved(mask, "PNG"), 20)))
    assert found.mode == mode
    assert found.size == (30, 20)
    assert np.array_equal(np.asarray(found), values[1::3, 1::3])


def test_photos_and_masks_are_packed_small_and_say_so(tmp_path, capsys):
    sizes = {"a": (300, 200), "b": (120, 400), "c": (30, 20)}
    for name, size in sizes.items():
        for folder, kind in (("photos", "jpg"), ("masks", "png")):
            (tmp_path / folder).mkdir(exist_ok=True)
            picture = smooth("RGB" if folder == "photos" else "L", size)
            picture.save(tmp_path / folder / f"{name}.{kind}")
    (tmp_path / "photos" / "d.npy").write_bytes(npy(np.zeros((80, 90), np.uint16)))
    photos, small, masks = (str(tmp_path / name) for name in ("photos", "small", "small-masks"))
    assert main(["pack", photos, small, "size=64"]) == 0
    said = capsys.readouterr().out
    assert "reduced to 64 pixels: 2; no larger, and as they were: 1; deep" in said
    assert "and as they were: 1\n" in said
    source = open_source(small)
    assert source.read(2) == (tmp_path / "photos" / "c.jpg").read_bytes()
    assert main(["pack", str(tmp_path / "masks"), masks, "size=64", "masks=true"]) == 0
    assert main(["inspect-data", small]) == 0
    text = "images with more than 64 pixels on their shorter side were reduced to it"
    assert text in capsys.readouterr().out
    both = open_masks(small, masks)
    assert [both.mask(index).shape for index in range(3)] == [(64, 96), (213, 64), (20, 30)]
    whole = open_masks(str(tmp_path / "photos"))
    assert {*both.mask(0).unique().tolist()} <= {*whole.mask(0).unique().tolist()}
    assert torch.equal(both.mask(2), whole.mask(2))
