"""Images in Parquet files, unpacked into the index: one image is read only with its whole row group."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.parquet as pq

from dino_vit.core.progress import progress
from dino_vit.core.text import brief, printable
from dino_vit.data.sources.archives import check_ratio
from dino_vit.data.sources.files import (
    open_file,
    stamps,
)
from dino_vit.data.sources.index import Draft, IndexedSource, WriteImages, open_index
from dino_vit.data.sources.tables.columns import Rows, TableColumns, find_columns

BATCH, BATCH_BYTES = 32, 2**25  # rows that are read together, and about how long they may be


class ParquetSource(IndexedSource):
    """The images in Parquet files, unpacked into the index."""

    def __init__(self, spec: str, files: Sequence[str]) -> None:
        self._spec, self._files = spec, list(files)
        super().__init__(open_index("parquet", spec, self._build, self._files))

    def read(self, index: int) -> bytes:
        return self.index.images[int(self.index.columns["row"][index])].as_py() or b""

    def _build(self, write_images: WriteImages) -> Draft:
        columns, rows, tables = None, Rows(), []
        stored, unpacked = int(stamps(self._files)[:, 0].sum()), 0
        with progress(f"Unpacking {self._spec}") as advance:
            for path in self._files:
                with open_file(path) as file:
                    with reading_parquet(path):
                        table = pq.ParquetFile(file)
                    found = find_columns(path, table.schema_arrow)
                    check_same(path, found, self._files[0], columns)
                    columns = found
                    tables.append((os.path.basename(path), table.metadata.num_rows))
                    names = [columns.image, columns.name, columns.label]
                    read = [name for name in names if name is not None]
                    for batch in batches(path, table, read, stored):
                        unpacked += batch.nbytes
                        check_ratio(stored, unpacked)
                        write_images(rows.add(batch, columns))
                        advance(batch.num_rows)
        assert columns is not None
        if not any(rows.sizes):
            raise no_images(columns, self._spec)
        return rows.draft(columns, tables)


def check_same(path: str, found: TableColumns, first: str, columns: TableColumns | None) -> None:
    if columns is not None and found != columns:
        raise ValueError(f"{path} has other columns than {first}. Open them one by one.")


def no_images(columns: TableColumns, spec: str) -> ValueError:
    return ValueError(
        f"Column {printable(columns.image)} of {spec} contains no image bytes, perhaps "
        "only paths. Write the images into the table, or give the folder that holds them."
    )


@contextmanager
def reading_parquet(path: str) -> Iterator[None]:
    try:
        yield
    except pa.ArrowMemoryError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"{path} is damaged or not a Parquet file: {brief(error, 300)}. "
            "Copy it again, or remove it from the source."
        ) from error


def parts_of(table: pq.ParquetFile, names: Sequence[str]) -> list[pq.ColumnChunkMetaData]:
    """Return what the footer says of columns in each row group."""
    leaves, groups = leaves_of(table, names), range(table.metadata.num_row_groups)
    return [table.metadata.row_group(group).column(leaf) for group in groups for leaf in leaves]


def leaves_of(table: pq.ParquetFile, names: Sequence[str]) -> list[int]:
    starts = tuple(f"{name}." for name in names)
    return [index for index, leaf in enumerate(table.schema) if f"{leaf.path}.".startswith(starts)]


def batches(path: str, table: pq.ParquetFile, names: Sequence[str], stored: int) -> Iterator[pa.RecordBatch]:
    """Yield some columns; what the footer says bounds how many rows are in memory at once."""
    parts = parts_of(table, names)
    check_ratio(stored, sum(part.total_uncompressed_size for part in parts))
    held: list[pa.RecordBatch] = []
    with reading_parquet(path):
        for batch in table.iter_batches(batch_rows(parts), columns=list(names)):
            held.append(batch)
            if sum(map(len, held)) >= BATCH or sum(part.nbytes for part in held) >= BATCH_BYTES:
                yield from pa.Table.from_batches(held).combine_chunks().to_batches()
                held = []
    if held:
        yield from pa.Table.from_batches(held).combine_chunks().to_batches()


def batch_rows(parts: Sequence[pq.ColumnChunkMetaData]) -> int:
    """Return how many rows to read together: each may be as long as the dictionary of its column."""
    longest = 1.0
    for part in parts:
        size = part.total_uncompressed_size
        dictionary = part.data_page_offset - (part.dictionary_page_offset or part.data_page_offset)
        unpacked = dictionary * size / max(part.total_compressed_size, 1)
        longest = max(longest, unpacked, size / max(part.num_values, 1))
    return max(1, min(BATCH, int(BATCH_BYTES / longest)))
