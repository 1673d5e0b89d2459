import pickle

import fsspec
import numpy as np
import pytest

from dino_vit.data.open import open_source

ARRAYS = {
    "grey": ((7, 12, 9), (1, 12, 9)),
    "last": ((7, 12, 9, 3), (3, 12, 9)),
    "first": ((7, 5, 12, 9), (5, 12, 9)),
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


def test_what_is_no_array_of_images_is_refused(tmp_path):
    np.save(tmp_path / "cube.npy", np.zeros((2, 8, 8, 8)))
    np.save(tmp_path / "complex.npy", np.zeros((2, 8, 8), dtype=complex))
    np.save(tmp_path / "none.npy", np.zeros((0, 8, 8)))
    np.save(tmp_path / "object.npy", np.array([{}], dtype=object), allow_pickle=True)
    (tmp_path / "damaged.npy").write_bytes((tmp_path / "cube.npy").read_bytes().replace(b"}", b"{"))
    for path in tmp_path.glob("*.npy"):
        with pytest.raises(ValueError, match=f"{path.name} is damaged or not an array of images: "):
            open_source(str(path))
    fsspec.filesystem("memory").pipe("/a.npy", b"")
    with pytest.raises(ValueError, match="copy it here first"):
        open_source("memory://a.npy")
