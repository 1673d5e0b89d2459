"""Images in remote Parquet files, which need not fit on the disk: their copies are unpacked one by one.

a copy: 0 and where each image ends, as int64 | the images
"""

import os
from collections import OrderedDict
from collections.abc import Sequence
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
from dino_vit.core.progress import progress
from dino_vit.core.text import brief
from dino_vit.data.shards import DamagedShard, ShardedSource
from dino_vit.data.sources.archives import check_ratio
from dino_vit.data.sources.files import (
    OPEN_FILES,
    Ranges,
    RemoteFile,
    in_threads,
    is_url,
    open_file,
    patiently,
    stamps,
)
from dino_vit.data.sources.index import Draft, WriteImages, open_index
from dino_vit.data.sources.source import Source
from dino_vit.data.sources.tables.columns import Rows, TableColumns, find_columns, image_bytes
from dino_vit.data.sources.tables.parquet import (
    ParquetSource,
    batch_rows,
    batches,
    check_same,
    leaves_of,
    no_images,
    parts_of,
    reading_parquet,
)

MOST_OF_GROUP = 2**27  # bytes of the images in a row group that is read for a single one
MOST_UNPACKED = 2**28  # the same, where many rows are one image
HELD_BYTES = 2**27  # of the row groups that were read last
FOOTER = 2**16  # bytes that are requested first


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


class Listed(NamedTuple):
    """What an index holds of a remote file."""

    columns: TableColumns
    rows: Rows
    length: int
    sizes: list[int]  # of the images in each row group, in all
    empty: bool  # whether the file says that it has no images


class ParquetShards(ShardedSource):
    """The images in remote Parquet files: from an unpacked copy, or otherwise from their row group."""

    def __init__(self, spec: str, files: Sequence[str]) -> None:
        self._spec, self._files = spec, list(files)
        index = open_index("parquet-shards", spec, self._build, self._files)
        sizes = np.array(index.metadata["unpacked"], dtype=np.int64)
        super().__init__(index, self._files, unpack=unpack_images, sizes=sizes)
        self._groups = RowGroups(self.ranges, index.metadata["leaf"])

    def read(self, index: int) -> bytes:
        file, row = (int(self.index.columns[name][index]) for name in ("file", "row"))
        copied = self._read_copy(file, row)
        return self._groups.read(file, row) if copied is None else copied

    def _read_copy(self, file: int, row: int) -> bytes | None:
        first = self.index.metadata["rows"][file] + 1
        limits = self.copies.read(file, 8 * row, 16)
        if limits is None:
            return None
        start, end = np.frombuffer(limits, dtype="<i8").tolist()
        return self.copies.read(file, 8 * first + start, end - start)

    def _build(self, _: WriteImages) -> Draft:
        with progress(f"Indexing {self._spec}") as advance:
            listed = in_threads(_list_rows, self._files, lambda found: advance(found.length))
        first = listed[0].columns
        for path, found in zip(self._files, listed, strict=True):
            check_same(path, found.columns, self._files[0], first)
            largest = max(found.sizes, default=0)
            if largest > MOST_OF_GROUP:
                raise LargeRowGroups(
                    f"{path} has row groups of up to {largest / 2**20:,.0f} MiB, which are too "
                    "large to read for an image, so all are unpacked into the index. If they do not fit "
                    "on the disk, write row groups of about 100 images"
                )
        if all(found.empty for found in listed):
            raise no_images(first, self._spec)
        counts = [found.length for found in listed]
        # The sizes of images are not known before they are read; those of their files tell sets apart.
        rows = Rows(sizes=np.repeat(stamps(self._files)[:, 0], counts).tolist())
        for found in listed:
            rows.names += found.rows.names
            rows.labels += found.rows.labels
        unpacked = [sum(found.sizes) + 8 * (found.length + 1) for found in listed]
        tables = [(os.path.basename(path), count) for path, count in zip(self._files, counts, strict=True)]
        columns = {
            "file": np.repeat(np.arange(len(listed), dtype=np.int32), counts),
            "row": np.concatenate([np.arange(count) for count in counts]),
        }
        metadata = {"leaf": first.leaf, "rows": counts, "unpacked": unpacked}
        return replace(rows.draft(first, tables), columns=columns, metadata=metadata)


def _list_rows(path: str) -> Listed:
    """List the rows of a remote file, without reading its images."""
    with open_file(path, FOOTER) as file:
        with reading_parquet(path):
            table = pq.ParquetFile(file)
        columns, rows, stored = find_columns(path, table.schema_arrow), Rows(), file.seek(0, os.SEEK_END)
        for batch in batches(path, table, columns.described, stored):
            rows.describe(batch, columns)
        parts = parts_of(table, [columns.leaf])
    sizes = [part.total_uncompressed_size for part in parts]
    check_ratio(stored, sum(sizes))
    empty = all(part.num_values == _nulls(part) for part in parts)
    return Listed(columns, rows, table.metadata.num_rows, sizes, empty)


def _nulls(part: pq.ColumnChunkMetaData) -> int:
    """Return how many values are missing, as far as is known."""
    known = part.statistics
    return int(known.null_count) if known is not None and known.has_null_count else 0


def unpack_images(path: str, file: BinaryIO, copy: BinaryIO) -> None:
    """Write the images of a Parquet file so that each can be found."""
    try:
        with reading_parquet(path):
            table = pq.ParquetFile(file)
        ends, row = np.zeros(table.metadata.num_rows + 1, dtype="<i8"), 0
        leaf, stored = find_columns(path, table.schema_arrow).leaf, file.seek(0, os.SEEK_END)
        copy.seek(ends.nbytes)
        for batch in batches(path, table, [leaf], stored):
            images = image_bytes(batch.column(0))
            lengths = np.array(pc.binary_length(images).fill_null(0).to_pylist(), dtype=np.int64)
            ends[row + 1 : row + 1 + len(lengths)] = ends[row] + np.cumsum(lengths)
            row += len(lengths)
            check_ratio(stored, int(ends[row]))
            copy.writelines(images.drop_null().to_pylist())
        copy.seek(0)
        copy.write(ends.tobytes())
        copy.flush()
    except ValueError as error:
        raise DamagedShard(str(error)) from error


class RowGroups:
    """Read images of remote Parquet files, each with its row group; those read last are kept in memory."""

    def __init__(self, ranges: Ranges, leaf: str) -> None:
        self.ranges, self.leaf = ranges, leaf
        self._footer = lru_cache(OPEN_FILES)(self._read_footer)
        self._held: OrderedDict[tuple[int, int], pa.ChunkedArray] = OrderedDict()
        self._lock, self._reading = Lock(), [Lock() for _ in range(8)]

    def __reduce__(self) -> tuple[Any, ...]:
        return RowGroups, (self.ranges, self.leaf)

    def read(self, file: int, row: int) -> bytes:
        footer, starts = self._footer(file)
        group = int(np.searchsorted(starts, row, side="right")) - 1
        with self._reading[(file + group) % len(self._reading)]:  # not from several threads at once
            images = self._images(file, group, footer)
        return images[row - int(starts[group])].as_py() or b""

    def _images(self, file: int, group: int, footer: pq.FileMetaData) -> pa.ChunkedArray:
        with self._lock:
            if (file, group) in self._held:
                self._held.move_to_end((file, group))
                return self._held[file, group]
        table, parts, size = pq.ParquetFile(self._file(file), metadata=footer), [], 0
        sizes = [footer.row_group(group).column(number) for number in leaves_of(table, [self.leaf])]
        try:
            for batch in table.iter_batches(batch_rows(sizes), row_groups=[group], columns=[self.leaf]):
                parts.append(image_bytes(batch.column(0)))
                size += parts[-1].nbytes
                if size > MOST_UNPACKED:
                    break
        except pa.ArrowMemoryError:
            raise
        except (pa.ArrowException, OSError) as error:
            raise OSError(f"its row group is damaged: {brief(error, 300)}") from error
        if size > MOST_UNPACKED:
            raise OSError(f"its row group unpacks to over {MOST_UNPACKED >> 20} MiB; write smaller ones")
        images = pa.chunked_array(parts, pa.large_binary())
        with self._lock:
            self._held[file, group] = images
            while len(self._held) > 1 and sum(held.nbytes for held in self._held.values()) > HELD_BYTES:
                self._held.popitem(last=False)
        return images

    def _file(self, file: int) -> RemoteFile:
        return RemoteFile(self.ranges.paths[file], int(self.ranges.stamps[file, 0]))

    def _read_footer(self, file: int) -> tuple[pq.FileMetaData, NDArray[np.int64]]:
        """Return what a file says of itself, and the first row of each row group."""
        path = self.ranges.paths[file]
        patiently(lambda: self.ranges.check_unchanged(file), path)
        with BufferedReader(self._file(file), FOOTER) as remote, reading_parquet(path):
            footer = pq.read_metadata(remote)
        counts = [footer.row_group(group).num_rows for group in range(footer.num_row_groups)]
        return footer, np.cumsum([0, *counts])[:-1]
