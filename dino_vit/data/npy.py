"""Headers of npy arrays, read and checked before their contents.

Not by NumPy, which evaluates them as Python: in several threads Python 3.11 then fails now and again.
"""

import re
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.lib import format
from numpy.typing import NDArray

MAX_HEADER = 10_000  # bytes, as in NumPy
_ORDER = re.compile(r"""['"]fortran_order['"]\s*:\s*(True|False)""")
_SHAPE = re.compile(r"""['"]shape['"]\s*:\s*\(([\d\s,]*)\)""")
_DTYPE = re.compile(r"""['"]descr['"]\s*:\s*(?:['"]([<>=|]?[a-zA-Z]\d*)['"]|['"\[])""")  # [: of records


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
    text = file.read(length).decode("latin-1")
    order, shape, dtype = (pattern.search(text) for pattern in (_ORDER, _SHAPE, _DTYPE))
    try:
        if order and shape and dtype:
            sizes = tuple(int(size) for size in shape[1].split(",") if size.strip())
            return Header(sizes, order[1] == "True", np.dtype(dtype[1] or "V"))
    except (ValueError, TypeError) as error:
        raise ValueError(f"its header is damaged: {error}") from error
    raise ValueError(f"its header is damaged: {text.strip()[:100]!r}")


def map_array(path: str | Path) -> NDArray[Any]:
    """Return the array in a file, which the system reads as it is needed."""
    with open(path, "rb") as file:
        header = read_header(file)
        order: Any = "F" if header.fortran else "C"
        return np.memmap(file, header.dtype, "r", file.tell(), header.shape, order)
