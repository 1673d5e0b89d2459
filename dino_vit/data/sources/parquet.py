"""Images in Parquet files, where one image is read only with its whole row group: they are unpacked once."""

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dino_vit.core.text import brief, progress
from dino_vit.data.sources.files import open_file
from dino_vit.data.sources.index import IndexContents, IndexedSource, WriteImages, open_index
from dino_vit.data.sources.tables import Rows, TableColumns, find_columns, image_bytes

BATCH = 32  # rows that are read together


class ParquetSource(IndexedSource):
    """The images in Parquet files, unpacked into the index."""

    def __init__(self, spec: str, files: Sequence[str]) -> None:
        self._spec, self._files = spec, list(files)
        super().__init__(open_index("parquet", spec, self._build, self._files))

    def read(self, index: int) -> bytes:
        start, size = (int(self.index.columns[name][index]) for name in ("start", "size"))
        return bytes(self.index.images[start : start + size])

    def _build(self, write_images: WriteImages) -> IndexContents:
        rows: Rows | None = None
        sizes, tables = list[int](), dict.fromkeys(self._files, 0)
        with progress(f"Unpacking {self._spec}") as advance:
            for path in self._files:
                for columns, batch in read_batches(path):
                    rows = rows or Rows(columns)
                    if columns != rows.columns:
                        raise ValueError(f"{path} has different columns from {self._files[0]}")
                    rows.add(batch)
                    images = [image or b"" for image in image_bytes(batch.column(columns.image)).to_pylist()]
                    write_images(b"".join(images))
                    sizes += map(len, images)
                    tables[path] += len(images)
                    advance(len(images))
        if not rows or not any(sizes):
            raise ValueError(
                f"{self._spec} has no image bytes, perhaps only paths; give the folder of the images"
            )
        size = np.array(sizes, dtype=np.int64)
        return rows.index_contents(tables, size, {"start": np.cumsum(size) - size, "size": size})


def read_batches(path: str) -> Iterator[tuple[TableColumns, pa.RecordBatch]]:
    """Yield the rows of a file, some at a time: their images, names and labels."""
    try:
        with open_file(path) as file:
            table = pq.ParquetFile(file)
            columns = find_columns(path, table.schema_arrow)
            for batch in table.iter_batches(BATCH, columns=columns.leaves):
                yield columns, batch
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} is damaged or not a Parquet file: {brief(error, 300)}") from error
