import io
import pickle
import struct
import zipfile

import fsspec
import numpy as np
import pytest
import torch

from dino_vit.data.images.decode import read_image
from dino_vit.data.sources import archives, arrays
from dino_vit.data.sources.open import open_source

ARRAYS = {
    "grey": ((7, 12, 9), (1, 12, 9)),
    "last": ((7, 12, 9, 3), (3, 12, 9)),
    "first": ((7, 5, 12, 9), (5, 12, 9)),
    "flat": ((7, 12, 1, 3), None),
}


@pytest.mark.parametrize("dtype", ["uint8", ">u2", "float32"])
@pytest.mark.parametrize("name", ["grey", "last", "first"])
@pytest.mark.parametrize("kind", ["npy", "npz", "compressed", "fortran"])
def test_arrays_are_images_of_any_dtype(tmp_path, name, dtype, kind):
    shape, expected = ARRAYS[name]
    array = (np.random.default_rng(0).random(shape) * 250).astype(dtype)
    path = tmp_path / ("a.npy" if kind in ("npy", "fortran") else "a.npz")
    labels = [5, 5, 6, 5, 9, 9, 6]
    if path.suffix == ".npy":
        np.save(path, np.asfortranarray(array) if kind == "fortran" else array)
    else:
        (np.savez_compressed if kind == "compressed" else np.savez)(path, x=array, y=np.array(labels))
    source = open_source(str(path))
    for one in (source, pickle.loads(pickle.dumps(source))):
        image = one.read(3)
        assert (image.shape, len(one), one.name(3)) == (expected, 7, "000000003")
        planes = np.moveaxis(array[3], -1, 0) if name == "last" else array[3].reshape(expected)
        assert np.array_equal(image.numpy(), planes)
        assert image.is_contiguous()
        image.fill_(0)
        assert one.read(3).any()
    if path.suffix == ".npz":
        assert [source.classes[source.label(index)] for index in range(7)] == list(map(str, labels))
    other = array.copy()
    other[4] = 1
    np.save(tmp_path / "b.npy", other)
    assert open_source(str(tmp_path / "b.npy")).fingerprint != source.fingerprint


def test_arrays_of_uint8_are_read_by_everything(tmp_path):
    np.save(tmp_path / "a.npy", np.full((2, 8, 8, 3), 7, dtype=np.uint8))
    assert torch.equal(read_image(open_source(str(tmp_path / "a.npy")), 0), torch.full((3, 8, 8), 7).byte())


def test_arrays_that_do_not_say_what_they_are(tmp_path):
    images = np.zeros((4, 8, 8), dtype=np.uint8)
    path = tmp_path / "a.npz"
    np.savez(path, x_train=images, x_test=images[:2], y_train=np.arange(4), y_test=np.array(["a", "b"]))
    with pytest.raises(ValueError, match=r"Choose one of .*a\.npz:x_train, .*a\.npz:x_test"):
        open_source(str(path))
    source = open_source(f"{path}:x_test")
    assert (len(source), source.label(1), source.classes) == (2, 1, ["a", "b"])
    with pytest.raises(ValueError, match="must have one array of images"):
        open_source(f"{path}:z")
    np.save(tmp_path / "cube.npy", np.zeros((2, 8, 8, 8)))
    with pytest.raises(ValueError, match=r"which axis of \(2, 8, 8, 8\) has the channels"):
        open_source(str(tmp_path / "cube.npy"))
    for wrong in (np.zeros((2, 8, 8), dtype=complex), np.zeros((0, 8, 8)), np.zeros((2, 8, 8), dtype=bool)):
        np.save(tmp_path / "wrong.npy", wrong)
        with pytest.raises(ValueError, match="integers or floats"):
            open_source(str(tmp_path / "wrong.npy"))
    np.save(tmp_path / "object.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="must have one array of images"):
        open_source(str(tmp_path / "object.npy"))
    fsspec.filesystem("memory").pipe("/a.npy", b"")
    with pytest.raises(ValueError, match="copy it here first"):
        open_source("memory://a.npy")


def array(shape="(2, 8, 8)", dtype="|u1", *, length=None, content=bytes(128)):
    """Return an array with any claims in its header."""
    header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    length = len(header) if length is None else length
    return b"\x93NUMPY\2\0" + struct.pack("<I", length) + header + content


WRONG = {
    "unclosed": (array("(2, 8"), "its header is damaged"),
    "deep": (array("(" * 3000), "its header is damaged"),
    "long": (array(length=2**32 - 1), "header of 4,294,967,295 bytes is longer"),
    "negative": (array("(-1, -8, 8)"), "its header is damaged"),
    "truth": (array("(True, 8, 16)"), "its header is damaged"),
    "later": (b"\x93NUMPY\3\0" + array()[8:], r"unsupported npy format version \(3, 0\); save plain numbers"),
    "short": (array("(3, 8, 8)"), "128 of its 192 bytes"),
    "endless": (array("(99999999999, 9999999, 9)"), "128 of its"),
    "quadruple": (array("(1, 2, 4)", "<f16"), "it must have integers or floats"),
    "large": (array("(1, 99999, 99999)", "|u0"), "damaged|integers or floats"),
    "cut": (array()[:20], "its header is damaged"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("suffix", ["npy", "npz"])
def test_damaged_arrays_are_a_sentence_before_they_are_read(tmp_path, name, suffix):
    data, said = WRONG[name]
    path = tmp_path / f"a.{suffix}"
    if suffix == "npz":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x.npy", data)
    else:
        path.write_bytes(data)
    with pytest.raises(ValueError, match=rf"a\.{suffix}.*({said})"):
        open_source(str(path))


def test_any_damage_to_an_archive_of_arrays_is_a_sentence(tmp_path):
    path, buffer = tmp_path / "a.npz", io.BytesIO()
    np.savez_compressed(buffer, x=np.arange(7 * 64, dtype=np.uint8).reshape(7, 8, 8), y=np.arange(7))
    whole, failures = buffer.getvalue(), 0
    for position in range(0, len(whole), 3):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x41]) + whole[position + 1 :])
        try:
            open_source(str(path))
        except ValueError as error:
            assert "a.npz" in str(error)  # noqa: PT017 - not every damage is noticed
            failures += 1
    assert failures > len(whole) / 6


@pytest.mark.parametrize("name", ["images", "labels"])
def test_an_archive_of_arrays_that_would_fill_the_disk_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.setattr(archives, "MAX_UNPACKED", 2**20)
    count, shape = (300, (300, 100, 100)) if name == "images" else (2, (2, 8, 8))
    labels = array("(2,)", "<U400000", content=b"").ljust(3_200_200, b"\0") if name == "labels" else b""
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("images.npy", array(str(shape), content=bytes(np.prod(shape))))
        archive.writestr("labels.npy", labels or array(f"({count},)", content=bytes(count)))
    said = rf"a\.npz cannot be read: array {name} would unpack to \d+ MiB, over 200 times.*may be a zip bomb"
    with pytest.raises(ValueError, match=said):
        open_source(str(tmp_path / "a.npz"))


def test_arrays_that_are_not_read_may_be_anything(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(archives, "MAX_UNPACKED", 2**20)
    images, path = np.ones((4, 8, 8), np.uint8), tmp_path / "a.npz"
    others = {"names": np.array([None] * 1000, object), "mask": np.zeros((1,), "V3000000")}
    np.savez_compressed(path, images=images, **others)
    assert open_source(str(path)).read(3).sum() == 64
    np.savez(path, images=images, names=np.array(["a", None, 3, {}], object))
    source = open_source(str(path))
    assert (source.read(3).sum(), source.label(0)) == (64, None)
    assert f"{path}: no labels, as names holds Python objects or nothing" in caplog.text
    np.savez(path, images=images)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("names.npy", array("(4,)", "<U0", content=b""))
    assert open_source(str(path)).label(0) is None


@pytest.mark.parametrize("suffix", ["npy", "npz"])
def test_a_million_images_of_a_pixel_are_refused_before_they_fill_the_memory(tmp_path, suffix):
    path, images = tmp_path / f"a.{suffix}", np.zeros((16_000_000, 1, 1), np.uint8)
    np.save(path, images) if suffix == "npy" else np.savez_compressed(path, images)
    with pytest.raises(ValueError, match=r"16,000,000 images of 1 pixel.*more than 1,048,576 .* 64 pixels"):
        open_source(str(path))


@pytest.mark.parametrize("order", ["C", "F"])
def test_images_are_the_same_however_many_are_unpacked_together(tmp_path, monkeypatch, order):
    images = np.asarray(np.arange(7 * 8 * 9, dtype=np.uint16).reshape(7, 8, 9), order=order)
    np.savez(tmp_path / "a.npz", images)
    whole = open_source(str(tmp_path / "a.npz")).fingerprint
    monkeypatch.setattr(arrays, "BATCH_BYTES", 2 * 8 * 9 * 3)
    np.savez(tmp_path / "b.npz", images)
    source = open_source(str(tmp_path / "b.npz"))
    assert [source.read(index).numpy().tolist() for index in range(7)] == images[:, None].tolist()
    np.save(tmp_path / "c.npy", images)
    assert {source.fingerprint, open_source(str(tmp_path / "c.npy")).fingerprint} == {whole}
