from io import BytesIO

import numpy as np
import pytest

from dino_vit.data.npy import map_array, read_header

DTYPES = ("|u1", "<i2", ">u4", "<f2", "<f8", "|b1", "<c8", "<U7", "|O", "<M8[s]")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (0, 5)])
@pytest.mark.parametrize("order", ["C", "F"])
def test_headers_of_numpy_are_read(dtype, shape, order):
    array, file = np.zeros(shape, dtype, order), BytesIO()
    np.save(file, array, allow_pickle=True)
    file.seek(0)
    header = read_header(file)
    assert header.shape == shape
    assert header.fortran == (np.isfortran(array))
    plain = not dtype.startswith("<M8")
    assert header.dtype == (array.dtype if plain else np.dtype("V"))
    assert header.numeric == (array.dtype.kind in "uif")


@pytest.mark.parametrize(
    "text",
    [
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }",
        '{"shape":(2,3),"fortran_order":False,"descr":"<f4"}',
        "{'fortran_order' : False , 'shape' : ( 2 , 3 ) , 'descr' : '<f4'}   \n",
    ],
)
def test_headers_of_other_writers_are_read(tmp_path, text):
    values = np.arange(6, dtype="<f4").reshape(2, 3)
    path = tmp_path / "a.npy"
    path.write_bytes(
        b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode() + values.tobytes()
    )
    np.testing.assert_array_equal(map_array(path), values)


def test_records_are_no_numbers():
    file = BytesIO()
    np.save(file, np.zeros(3, [("a", "<f4"), ("b", "|u1", (2,))]))
    file.seek(0)
    header = read_header(file)
    assert (header.shape, header.numeric) == ((3,), False)
