"""Images in Parquet files, where one image is read only with its whole row group.

Local files are unpacked into the index. Remote ones need not fit on the disk: their local copies are unpacked
one by one, and an image without one is read with its row group.

a local copy: 0 and where each image ends, as int64 | the images
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from io import BufferedReader
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dino_vit.core.process import in_threads
from dino_vit.core.text import brief, printable, progress
from dino_vit.data.shards import IndexedShards
from dino_vit.data.sources.files import ByteRangeReader, RemoteFile, file_signatures, open_file, retry
from dino_vit.data.sources.index import IndexContents, IndexedSource, WriteImages, open_index
from dino_vit.data.sources.tables import Rows, find_columns, image_bytes

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
        rows, tables, _ = _list_tables(self._spec, self._files)
        sizes = []
        with progress(f"Unpacking {self._spec}") as advance:
            for path in self._files:
                with open_file(path) as file:
                    for image in read_images(path, file):
                        write_images(image)
                        sizes.append(len(image))
                        advance(1)
        if not any(sizes):
            raise ValueError(
                f"column {printable(rows.columns.image)} of {self._spec} contains no image bytes, perhaps "
                "only paths; write the images into the table, or give the folder that holds them"
            )
        size = np.array(sizes, dtype=np.int64)
        return rows.index_contents(tables, size, {"start": np.cumsum(size) - size, "size": size})


class ParquetShards(IndexedShards):
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
        rows, tables, groups = _list_tables(self._spec, self._files)
        counts = list(tables.values())
        return rows.index_contents(
            tables,
            # The sizes of images are not known before they are read; those of their files tell sets apart.
            np.repeat(file_signatures(self._files)[:, 0], counts),
            {
                "file": np.repeat(np.arange(len(tables), dtype=np.int32), counts),
                "row": np.concatenate([np.arange(count) for count in counts]),
            },
            leaf=rows.columns.leaf,
            rows=counts,
            unpacked=[sum(sizes) + 8 * (count + 1) for sizes, count in zip(groups, counts, strict=True)],
            largest_group=max(size for sizes in groups for size in (0, *sizes)),
        )


def _list_tables(spec: str, files: Sequence[str]) -> tuple[Rows, dict[str, int], list[list[int]]]:
    """List the rows of all files; return the rows of each file, and the bytes of images in its row groups."""
    with progress(f"Indexing {spec}") as advance:
        listed = in_threads(_list_rows, files, lambda table: advance(len(table[0].names)))
    columns = listed[0][0].columns
    for path, (rows, _) in zip(files, listed, strict=True):
        if rows.columns != columns:
            raise ValueError(f"{path} has different columns from {files[0]}. Open them one by one.")
    names = [name for rows, _ in listed for name in rows.names]
    labels = [label for rows, _ in listed for label in rows.labels]
    counts = [len(rows.names) for rows, _ in listed]
    return (
        Rows(columns, names, labels),
        dict(zip(files, counts, strict=True)),
        [groups for _, groups in listed],
    )


def _list_rows(path: str) -> tuple[Rows, list[int]]:
    """List the rows of a file without its images, and the bytes of the images in each row group."""
    with open_file(path, FOOTER) as file, reading_parquet(path):
        table = pq.ParquetFile(file)
        rows, footer = Rows(find_columns(path, table.schema_arrow)), table.metadata
        for batch in table.iter_batches(columns=rows.columns.described):
            rows.add(batch)
    leaf = [leaf.path for leaf in table.schema].index(rows.columns.leaf)
    groups = (footer.row_group(number) for number in range(footer.num_row_groups))
    return rows, [group.column(leaf).total_uncompressed_size for group in groups]


def read_images(path: str, file: BinaryIO) -> Iterator[bytes]:
    """Yield the bytes of each image of a Parquet file, none where a row has no image."""
    with reading_parquet(path):
        table = pq.ParquetFile(file)
        leaf = find_columns(path, table.schema_arrow).leaf
        for batch in table.iter_batches(BATCH, columns=[leaf]):
            for image in image_bytes(batch.column(0)).to_pylist():
                yield image or b""


def unpack_images(path: str, file: BinaryIO, copy: BinaryIO) -> None:
    """Write the images of a Parquet file so that each can be found."""
    with reading_parquet(path):
        rows = pq.read_metadata(file).num_rows
    copy.seek(8 * (rows + 1))
    sizes = [copy.write(image) for image in read_images(path, file)]
    copy.seek(0)
    copy.write(np.cumsum([0, *sizes]).astype("<i8").tobytes())
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
        raise ValueError(f"{path} is damaged or not a Parquet file: {brief(error, 300)}") from error
