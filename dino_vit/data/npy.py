"""Headers of npy arrays, read and checked before their contents."""

from io import BytesIO
from math import prod
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.lib import format

MAX_HEADER = 10_000  # bytes, as in NumPy, which reads a longer one before it refuses it


class Header(NamedTuple):
    """What an array is, by its header."""

    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def numeric(self) -> bool:
        """Tell whether the values are numbers that torch has a type for."""
        return self.dtype.kind in "uif" and self.dtype.itemsize <= 8


def read_header(file: IO[bytes]) -> Header:
    """Read the header at the start of a file; raise ValueError if it is invalid."""
    version = format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"unsupported npy format version {version}; save plain numbers")
    prefix = file.read(2 if version == (1, 0) else 4)
    if (length := int.from_bytes(prefix, "little")) > MAX_HEADER:
        raise ValueError(f"its header of {length:,} bytes is longer than {MAX_HEADER:,}")
    read = format.read_array_header_1_0 if version == (1, 0) else format.read_array_header_2_0
    try:
        header = Header(*read(BytesIO(prefix + file.read(length))))
    except Exception as error:  # NumPy evaluates it as Python, which raises nearly anything
        raise ValueError(f"its header is damaged: {str(error) or type(error).__name__:.200}") from error
    if any(type(size) is not int or size < 0 for size in header.shape):
        raise ValueError(f"its shape {header.shape} is not valid")
    return header
