import pickle

import fsspec
import numpy as np
import pytest

from dino_vit.data.open import open_source

ARRAYS = {
    "grey": ((7, 12, 9), (1, 12, 9)),
    "last": ((7, 12, 9, 3), (3, 12, 9)),
    "first": ((7, 5, 12, 9), (5, 12, 9)),
    "flat": ((7, 12, 1, 3), None),
}


@pytest.mark.parametrize("dtype", ["uint8", ">u2", "float32"])
@pytest.mark.parametrize("name", ["grey", "last", "first"])
@pytest.mark.parametrize("kind", ["c", "fortran"])
def test_arrays_are_images_of_any_dtype(tmp_path, name, dtype, kind):
    shape, expected = ARRAYS[name]
    array = (np.random.default_rng(0).random(shape) * 250).astype(dtype)
    path = tmp_path / "a.npy"
    np.save(path, np.asfortranarray(array) if kind == "fortran" else array)
    source = open_source(str(path))
    for one in (source, pickle.loads(pickle.dumps(source))):
        image = one.read(3)
        assert (image.shape, len(one), one.name(3)) == (expected, 7, "000000003")
        planes = np.moveaxis(array[3], -1, 0) if name == "last" else array[3].reshape(expected)
        assert np.array_equal(image.numpy(), planes)
        assert image.is_contiguous()
        image.fill_(0)
        assert one.read(3).any()
    other = array.copy()
    other[4] = 1
    np.save(tmp_path / "b.npy", other)
    assert open_source(str(tmp_path / "b.npy")).fingerprint != source.fingerprint


def test_arrays_that_do_not_say_what_they_are(tmp_path):
    np.save(tmp_path / "cube.npy", np.zeros((2, 8, 8, 8)))
    with pytest.raises(ValueError, match=r"which axis of \(2, 8, 8, 8\) has the channels"):
        open_source(str(tmp_path / "cube.npy"))
    for wrong in (np.zeros((2, 8, 8), dtype=complex), np.zeros((0, 8, 8)), np.zeros((2, 8, 8), dtype=bool)):
        np.save(tmp_path / "wrong.npy", wrong)
        with pytest.raises(ValueError, match="integers or floats"):
            open_source(str(tmp_path / "wrong.npy"))
    np.save(tmp_path / "object.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match=r"or not an array of numbers: .*Python objects"):
        open_source(str(tmp_path / "object.npy"))
    (tmp_path / "damaged.npy").write_bytes((tmp_path / "cube.npy").read_bytes().replace(b"}", b"{"))
    with pytest.raises(ValueError, match=r"damaged\.npy is damaged or not an array of numbers"):
        open_source(str(tmp_path / "damaged.npy"))
    fsspec.filesystem("memory").pipe("/a.npy", b"")
    with pytest.raises(ValueError, match="copy it here first"):
        open_source("memory://a.npy")
