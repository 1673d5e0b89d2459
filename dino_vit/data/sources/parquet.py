"""Images in Parquet files, where one image is read only with its whole row group.

Local files are unpacked into the index. Remote ones need not fit on the disk: their local copies are unpacked
one by one, and an image without one is read with its row group.

a local copy: 0 and where each image ends, as int64 | the images
"""

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from io import BufferedReader
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dino_vit.core.text import brief, printable, progress
from dino_vit.data.shards import ShardedSource
from dino_vit.data.sources.files import (
    ByteRangeReader,
    RemoteFile,
    file_signatures,
    in_threads,
    open_file,
    retry,
)
from dino_vit.data.sources.index import IndexContents, IndexedSource, WriteImages, open_index
from dino_vit.data.sources.tables import Rows, TableColumns, find_columns, image_bytes

BATCH = 32  # rows that are read together
FOOTER = 2**16  # bytes of a remote file that are requested first
MOST_OF_GROUP = 2**27  # bytes of the images in a row group that is read for a single one
HELD_GROUPS = 2  # row groups that are kept in memory; images are mostly read in order
HELD_FOOTERS = 128


class ParquetSource(IndexedSource):
    """The images in Parquet files, unpacked into the index."""

    def __init__(self, spec: str, files: Sequence[str]) -> None:
        self._spec, self._files = spec, list(files)
        super().__init__(open_index("parquet", spec, self._build, self._files))

    def read(self, index: int) -> bytes:
        start, size = (int(self.index.columns[name][index]) for name in ("start", "size"))
        return bytes(self.index.images[start : start + size])

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
                        for image in rows.add(batch, columns[0]).drop_null():
                            write_images(image.as_buffer())
                        advance(batch.num_rows)
        if not any(rows.sizes):
            raise ValueError(
                f"column {printable(columns[0].image)} of {self._spec} contains no image bytes, perhaps only "
                "paths; write the images into the table, or give the folder that holds them"
            )
        size = np.array(rows.sizes, dtype=np.int64)
        contents = rows.index_contents(columns[0], tables)
        return replace(contents, columns={"start": np.cumsum(size) - size, "size": size})


class ParquetShards(ShardedSource):
    """The images in remote Parquet files: from an unpacked local copy, or otherwise from their row group."""

    def __init__(self, spec: str, files: Sequence[str]) -> None:
        self._spec, self._files = spec, list(files)
        index = open_index("parquet-shards", spec, self._build, self._files)
        if (largest := index.metadata["largest_group"]) > MOST_OF_GROUP:
            raise ValueError(
                f"{spec} has row groups of up to {largest / 2**20:.0f} MiB, too much for one image: "
                "download the files, or write row groups of about 100 images"
            )
        sizes = np.array(index.metadata["unpacked"], dtype=np.int64)
        super().__init__(index, self._files, unpack=unpack_images, sizes=sizes)

    def read(self, index: int) -> bytes:
        file, row = (int(self.index.columns[name][index]) for name in ("file", "row"))
        image = self._read_local_copy(file, row)
        return self._read_with_group(file, row) if image is None else image

    def _read_local_copy(self, file: int, row: int) -> bytes | None:
        first = self.index.metadata["rows"][file] + 1
        limits = self.local_copies.read(file, 8 * row, 16)
        if limits is None:
            return None
        start, end = np.frombuffer(limits, dtype="<i8").tolist()
        return self.local_copies.read(file, 8 * first + start, end - start)

    def _read_with_group(self, file: int, row: int) -> bytes:
        footer, group = _footer(self.ranges, file), 0
        while row >= footer.row_group(group).num_rows:
            row -= footer.row_group(group).num_rows
            group += 1
        return _row_group(self.ranges, file, group, self.index.metadata["leaf"])[row].as_py() or b""

    def _build(self, _: WriteImages) -> IndexContents:
        with progress(f"Indexing {self._spec}") as advance:
            listed = in_threads(_list_rows, self._files, lambda table: advance(len(table[1].names)))
        columns, counts = listed[0][0], [len(rows.names) for _, rows, _ in listed]
        _check_same(self._files, [columns for columns, _, _ in listed])
        rows = Rows(
            names=[name for _, rows, _ in listed for name in rows.names],
            labels=[label for _, rows, _ in listed for label in rows.labels],
            # The sizes of images are not known before they are read; those of their files tell sets apart.
            sizes=np.repeat(file_signatures(self._files)[:, 0], counts).tolist(),
        )
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
                "unpacked": [
                    sum(sizes) + 8 * (count + 1) for (*_, sizes), count in zip(listed, counts, strict=True)
                ],
                "largest_group": max(size for *_, sizes in listed for size in (0, *sizes)),
            },
        )


def _list_rows(path: str) -> tuple[TableColumns, Rows, list[int]]:
    """List the rows of a remote file without its images, and the bytes of the images in each row group."""
    with open_file(path, FOOTER) as file, reading_parquet(path):
        table = pq.ParquetFile(file)
        columns, rows, footer = find_columns(path, table.schema_arrow), Rows(), table.metadata
        for batch in table.iter_batches(columns=columns.described):
            rows.describe(batch, columns)
    leaf = [leaf.path for leaf in table.schema].index(columns.leaf)
    groups = (footer.row_group(number) for number in range(footer.num_row_groups))
    return columns, rows, [group.column(leaf).total_uncompressed_size for group in groups]


def unpack_images(path: str, file: BinaryIO, copy: BinaryIO) -> None:
    """Write the images of a Parquet file so that each can be found."""
    with reading_parquet(path):
        table = pq.ParquetFile(file)
        leaf = find_columns(path, table.schema_arrow).leaf
        ends = [0]
        copy.seek(8 * (table.metadata.num_rows + 1))
        for batch in table.iter_batches(BATCH, columns=[leaf]):
            for image in image_bytes(batch.column(0)).to_pylist():
                ends.append(ends[-1] + copy.write(image or b""))
    copy.seek(0)
    copy.write(np.array(ends, dtype="<i8").tobytes())
    copy.flush()


@lru_cache(HELD_GROUPS)
def _row_group(ranges: ByteRangeReader, file: int, group: int, leaf: str) -> pa.ChunkedArray:
    """Return the images of a row group of a remote file."""
    try:
        table = pq.ParquetFile(_remote(ranges, file), metadata=_footer(ranges, file))
        return image_bytes(table.read_row_group(group, columns=[leaf]).column(0))
    except (pa.ArrowException, OSError) as error:
        raise OSError(f"its row group is damaged: {brief(error, 300)}") from error


@lru_cache(HELD_FOOTERS)
def _footer(ranges: ByteRangeReader, file: int) -> pq.FileMetaData:
    path = ranges.paths[file]
    retry(lambda: ranges.check_unchanged(file), path)
    with BufferedReader(_remote(ranges, file), FOOTER) as remote, reading_parquet(path):
        return pq.read_metadata(remote)


def _remote(ranges: ByteRangeReader, file: int) -> RemoteFile:
    return RemoteFile(ranges.paths[file], int(ranges.file_signatures[file, 0]))


@contextmanager
def reading_parquet(path: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):  # where images are unpacked to
            raise
        raise ValueError(f"{path} is damaged or not a Parquet file: {brief(error, 300)}") from error


def _check_same(files: Sequence[str], columns: Sequence[TableColumns]) -> None:
    for path, others in zip(files, columns, strict=False):
        if others != columns[0]:
            raise ValueError(f"{path} has other columns than {files[0]}. Open them one by one.")
