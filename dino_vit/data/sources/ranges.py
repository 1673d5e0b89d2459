"""Read ranges of bytes of files that were indexed, as long as they are still the same files."""

import os
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dino_vit.data.limits import open_regular
from dino_vit.data.sources.files import (
    UNKNOWN,
    changed,
    check_length,
    is_url,
    remote_info,
    remote_signature,
    request,
    retry,
)

OPEN_FILES = 128  # per process, well below the system's usual limit of 1024


class ByteRangeReader:
    """Read ranges of bytes of files, from several threads and processes at once."""

    def __init__(self, paths: Sequence[str], file_signatures: NDArray[np.int64]) -> None:
        self.paths, self.file_signatures = paths, file_signatures
        self.is_remote = is_url(paths[0])
        self._unchanged: set[int] = set()  # remote files that were checked

    def read(self, file: int, start: int, size: int) -> bytes:
        path = self.paths[file]
        if is_url(path):
            return retry(lambda: self.request(file, start, size), path)
        opened = _opened(self, file)  # kept until the read is done: another thread may push it out
        status = os.fstat(opened.number)
        # Programs that purge disks change its times; whoever reads an archive looks at its checksums.
        if status.st_size != self.file_signatures[file, 0]:
            raise changed(path)
        # Without moving a position, so that processes can share the open file.
        within = min(size, max(0, status.st_size - start))  # a damaged archive may state any size
        return check_length(os.pread(opened.number, within, start), size, path)

    def request(self, file: int, start: int, size: int) -> bytes:
        """Read a range of a remote file by one request, after a look whether it is still the same."""
        if file not in self._unchanged:
            self.check_unchanged(file)
        return request(self.paths[file], start, size)

    def check_unchanged(self, file: int) -> None:
        """Raise if a remote file is not the one in the index."""
        info = remote_info(self.paths[file], fresh=True)
        size, version, _ = self.file_signatures[file].tolist()
        now = remote_signature(info)
        if now[0] != size or version not in (UNKNOWN, now[1]):
            raise changed(self.paths[file])
        self._unchanged.add(file)


@lru_cache(OPEN_FILES)
def _opened(reader: ByteRangeReader, file: int) -> "_Descriptor":
    return _Descriptor(reader.paths[file])


class _Descriptor:
    """An open file, closed when it is no longer used: opening one takes a request to a file server."""

    def __init__(self, path: str) -> None:
        with open_regular(path) as file:
            self.number = os.dup(file.fileno())

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)
