"""Images in Parquet files, where one image is read only with its whole row group.

Local files are unpacked into the index. Remote ones need not fit on the disk: their local copies are unpacked
one by one, and an image without one is read with its row group.

a local copy: 0 and where each image ends, as int64 | the images
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from io import BufferedReader
from threading import Lock
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dino_vit.core import log
from dino_vit.core.text import brief, printable, progress
from dino_vit.data.shards import DamagedShard, ShardedSource
from dino_vit.data.sources.files import (
    OPEN_FILES,
    ByteRangeReader,
    RemoteFile,
    file_signatures,
    in_threads,
    is_url,
    open_file,
    retry,
)
from dino_vit.data.sources.index import IndexContents, IndexedSource, WriteImages, open_index
from dino_vit.data.sources.source import Source
from dino_vit.data.sources.tables.columns import Rows, TableColumns, find_columns, image_bytes

BATCH = 32  # rows that are read together
FOOTER = 2**16  # bytes of a remote file that are requested first
MOST_OF_GROUP = 2**27  # bytes of the images in a row group that is read for a single one
HELD_BYTES = 2**27  # of the row groups that were read last


class LargeRowGroups(ValueError):
    """A file has row groups that are too large to read for a single image."""


def open_parquet(spec: str, files: Sequence[str]) -> Source:
    """Open Parquet files: local ones unpacked, remote ones as shards, if their row groups allow it."""
    if all(map(is_url, files)):
        try:
            return ParquetShards(spec, files)
        except LargeRowGroups as error:
            log.warning(str(error))
    return ParquetSource(spec, files)


class ParquetSource(IndexedSource):
    """The images in Parquet files, unpacked into the index."""

    def __init__(self, spec: str, files: Sequence[str]) -> None:
        self._spec, self._files = spec, list(files)
        super().__init__(open_index("parquet", spec, self._build, self._files))

    def read(self, index: int) -> bytes:
        return self.index.images[int(self.index.columns["row"][index])].as_py() or b""

    def _build(self, write_images: WriteImages) -> IndexContents:
        columns, rows, tables = [], Rows(), []
        with progress(f"Unpacking {self._spec}") as advance:
            for path in self._files:
                with open_file(path) as file, reading_parquet(path):
                    table = pq.ParquetFile(file)
                    columns.append(find_columns(path, table.schema_arrow))
                    _check_same(self._files, columns)
                    tables.append((os.path.basename(path), table.metadata.num_rows))
                    names = [columns[0].image, columns[0].name, columns[0].label]
                    for batch in table.iter_batches(BATCH, columns=[name for name in names if name]):
                        write_images(rows.add(batch, columns[0]))
                        advance(batch.num_rows)
        if not any(rows.sizes):
            raise ValueError(
                f"column {printable(columns[0].image)} of {self._spec} contains no image bytes, perhaps only "
                "paths; write the images into the table, or give the folder that holds them"
            )
        return rows.index_contents(columns[0], tables)


class ParquetShards(ShardedSource):
    """The images in remote Parquet files: from an unpacked local copy, or otherwise from their row group."""

    def __init__(self, spec: str, files: Sequence[str]) -> None:
        self._spec, self._files = spec, list(files)
        index = open_index("parquet-shards", spec, self._build, self._files)
        sizes = np.array(index.metadata["unpacked"], dtype=np.int64)
        super().__init__(index, self._files, unpack=unpack_images, sizes=sizes)
        self._groups = RowGroups(self.ranges, index.metadata["leaf"])

    def read(self, index: int) -> bytes:
        file, row = (int(self.index.columns[name][index]) for name in ("file", "row"))
        image = self._read_local_copy(file, row)
        return self._groups.read(file, row) if image is None else image

    def _read_local_copy(self, file: int, row: int) -> bytes | None:
        first = self.index.metadata["rows"][file] + 1
        limits = self.local_copies.read(file, 8 * row, 16)
        if limits is None:
            return None
        start, end = np.frombuffer(limits, dtype="<i8").tolist()
        return self.local_copies.read(file, 8 * first + start, end - start)

    def _build(self, _: WriteImages) -> IndexContents:
        with progress(f"Indexing {self._spec}") as advance:
            listed = in_threads(_list_rows, self._files, lambda table: advance(table.length))
        columns = listed[0].columns
        _check_same(self._files, [table.columns for table in listed])
        for path, table in zip(self._files, listed, strict=True):
            largest = max(table.group_sizes, default=0)
            if largest > MOST_OF_GROUP:
                raise LargeRowGroups(
                    f"{path} has row groups of up to {largest / 2**20:,.0f} MiB, too large for one image: "
                    "all are unpacked into the index, unless you write row groups of about 100 images"
                )
        counts = [table.length for table in listed]
        # The sizes of images are not known before they are read; those of their files tell sets apart.
        rows = Rows(sizes=np.repeat(file_signatures(self._files)[:, 0], counts).tolist())
        for table in listed:
            rows.names += table.rows.names
            rows.labels += table.rows.labels
        tables = [(os.path.basename(path), count) for path, count in zip(self._files, counts, strict=True)]
        return replace(
            rows.index_contents(columns, tables),
            columns={
                "file": np.repeat(np.arange(len(listed), dtype=np.int32), counts),
                "row": np.concatenate([np.arange(count) for count in counts]),
            },
            metadata={
                "leaf": columns.leaf,
                "rows": counts,
                "unpacked": [sum(table.group_sizes) + 8 * (table.length + 1) for table in listed],
            },
        )


class _Listed(NamedTuple):
    """What an index holds of a remote file."""

    columns: TableColumns
    rows: Rows
    length: int
    group_sizes: list[int]  # of the images in each row group, in all


def _list_rows(path: str) -> _Listed:
    """List the rows of a remote file, without reading its images."""
    with open_file(path, FOOTER) as file, reading_parquet(path):
        table = pq.ParquetFile(file)
        columns, rows, footer = find_columns(path, table.schema_arrow), Rows(), table.metadata
        for batch in table.iter_batches(BATCH, columns=columns.described):
            rows.describe(batch, columns)
    leaf = [leaf.path for leaf in table.schema].index(columns.leaf)
    groups = (footer.row_group(number) for number in range(footer.num_row_groups))
    sizes = [group.column(leaf).total_uncompressed_size for group in groups]
    return _Listed(columns, rows, footer.num_rows, sizes)


def unpack_images(path: str, file: BinaryIO, copy: BinaryIO) -> None:
    """Write the images of a Parquet file so that each can be found."""
    try:
        with reading_parquet(path):
            table = pq.ParquetFile(file)
            ends, row = np.zeros(table.metadata.num_rows + 1, dtype="<i8"), 0
            leaf = find_columns(path, table.schema_arrow).leaf
            copy.seek(ends.nbytes)
            for batch in table.iter_batches(BATCH, columns=[leaf]):
                images = image_bytes(batch.column(0))
                lengths = np.array(pc.binary_length(images).fill_null(0).to_pylist(), dtype=np.int64)
                ends[row + 1 : row + 1 + len(lengths)] = ends[row] + np.cumsum(lengths)
                row += len(lengths)
                copy.writelines(images.drop_null().to_pylist())
    except ValueError as error:
        raise DamagedShard(str(error)) from error
    copy.seek(0)
    copy.write(ends.tobytes())
    copy.flush()


class RowGroups:
    """Read images of remote Parquet files, each with its row group; those read last are kept in memory."""

    def __init__(self, ranges: ByteRangeReader, leaf: str) -> None:
        self.ranges, self.leaf = ranges, leaf
        self._footer = lru_cache(OPEN_FILES)(self._read_footer)
        self._held: dict[tuple[int, int], pa.ChunkedArray] = {}  # the last used last
        self._lock = Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return RowGroups, (self.ranges, self.leaf)

    def read(self, file: int, row: int) -> bytes:
        footer, starts = self._footer(file)
        group = int(np.searchsorted(starts, row, side="right")) - 1
        with self._lock:
            images = self._held.pop((file, group), None)
        if images is None:
            images = self._read_group(file, group, footer)
        with self._lock:
            self._held[file, group] = images
            while len(self._held) > 1 and sum(held.nbytes for held in self._held.values()) > HELD_BYTES:
                del self._held[next(iter(self._held))]
        return images[row - int(starts[group])].as_py() or b""

    def _read_group(self, file: int, group: int, footer: pq.FileMetaData) -> pa.ChunkedArray:
        table = pq.ParquetFile(self._file(file), metadata=footer)
        try:
            batches = table.iter_batches(BATCH, row_groups=[group], columns=[self.leaf])
            return pa.chunked_array([image_bytes(batch.column(0)) for batch in batches], pa.large_binary())
        except (pa.ArrowException, OSError) as error:
            raise OSError(f"its row group is damaged: {brief(error, 300)}") from error

    def _file(self, file: int) -> RemoteFile:
        return RemoteFile(self.ranges.paths[file], int(self.ranges.file_signatures[file, 0]))

    def _read_footer(self, file: int) -> tuple[pq.FileMetaData, NDArray[np.int64]]:
        """Return what a file says of itself, and the first row of each row group."""
        path = self.ranges.paths[file]
        retry(lambda: self.ranges.check_unchanged(file), path)
        with BufferedReader(self._file(file), FOOTER) as remote, reading_parquet(path):
            footer = pq.read_metadata(remote)
        counts = [footer.row_group(group).num_rows for group in range(footer.num_row_groups)]
        return footer, np.cumsum([0, *counts])[:-1]


@contextmanager
def reading_parquet(path: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} is damaged or not a Parquet file: {brief(error, 300)}") from error


def _check_same(files: Sequence[str], columns: Sequence[TableColumns]) -> None:
    for path, others in zip(files, columns, strict=False):
        if others != columns[0]:
            raise ValueError(f"{path} has other columns than {files[0]}. Open them one by one.")
