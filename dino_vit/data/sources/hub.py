"""Datasets of the Hugging Face hub, through the `datasets` library, which keeps them on disk."""

from __future__ import annotations

from typing import Any

import numpy as np

from dino_vit.data.sources.files import read_file, stamps
from dino_vit.data.sources.index import Draft, open_index
from dino_vit.data.sources.indexed import IndexedSource
from dino_vit.data.sources.tables import Rows, draft_rows, find_layout


class HubSource(IndexedSource):
    """One split of a dataset, `OWNER/NAME` or `OWNER/NAME:SPLIT`; names, order and labels as in Parquet."""

    def __init__(self, name: str) -> None:
        self._spec = f"hf:{name}"
        self._dataset = _load(name)
        self._layout = find_layout(self._spec, self._dataset.features.arrow_schema)
        files = [str(file["filename"]) for file in self._dataset.cache_files]
        super().__init__(open_index("hub", self._spec, lambda sink: self._build(files), files))

    def read(self, index: int) -> bytes:
        row = int(self.index["row"][self._row(index)])
        item = self._dataset.data.column(self._layout.image)[row].as_py()
        if self._layout.nested:
            return read_file(item["path"]) if item["bytes"] is None else bytes(item["bytes"])
        return bytes(item)

    def _build(self, files: list[str]) -> Draft:
        rows = Rows()
        for batch in self._dataset.data.table.to_batches():
            rows.take(batch, self._layout, _nowhere)
        numbers = np.arange(len(self._dataset), dtype=np.int64)
        return draft_rows(
            rows,
            self._layout,
            tables=[(self._spec.rpartition("/")[2], len(numbers))],
            columns={"row": numbers},
            watched=files,
            stamps=stamps(files),
        )


def _nowhere(_: object) -> None:
    """Leave the bytes where `datasets` has them."""


def _load(spec: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ValueError("hf: needs the datasets library: pip install 'dino-vit[hub]'.") from error
    name, _, split = spec.partition(":")
    loaded = datasets.load_dataset(name)
    if not split and len(loaded) == 1:
        (split,) = loaded
    if split not in loaded:
        ways = ", ".join(f"hf:{name}:{known}" for known in loaded)
        raise ValueError(f"hf:{spec} does not say which split, or one that is not there. Write {ways}.")
    return loaded[split]
