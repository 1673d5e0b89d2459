"""Images in datasets of the Hugging Face hub, from the Arrow files that the `datasets` library keeps."""

from typing import Any

from dino_vit.core.text import brief
from dino_vit.data.sources.files import read_file
from dino_vit.data.sources.index import IndexContents, IndexedSource, WriteImages, open_index
from dino_vit.data.sources.tables.columns import Rows, find_columns


class HubSource(IndexedSource):
    """One split of a dataset of the Hugging Face hub: `OWNER/NAME` or `OWNER/NAME:SPLIT`."""

    def __init__(self, name: str) -> None:
        self._spec = f"hf:{name}"
        self._dataset = _load_dataset(name)
        self._columns = find_columns(self._spec, self._dataset.features.arrow_schema)
        files = [str(file["filename"]) for file in self._dataset.cache_files]
        super().__init__(open_index("hub", self._spec, self._build, files))

    def read(self, index: int) -> bytes:
        row = int(self.index.columns["row"][index])
        image = self._dataset.data.column(self._columns.image)[row].as_py()
        if self._columns.nested:
            return read_file(image["path"]) if image["bytes"] is None else bytes(image["bytes"])
        return bytes(image)

    def _build(self, _: WriteImages) -> IndexContents:
        rows = Rows()
        for batch in self._dataset.data.table.to_batches():
            rows.add(batch, self._columns)
        return rows.index_contents(self._columns, [(self._spec.rpartition("/")[2], len(self._dataset))])


def _load_dataset(spec: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ValueError("hf: needs the datasets library: pip install 'dino-vit[hub]'.") from error
    name, _, split = spec.partition(":")
    try:
        splits = datasets.load_dataset(name)
    except Exception as error:  # of the library, the network or the files
        raise ValueError(
            f"hf:{spec} cannot be loaded: {brief(error, 300)}. "
            "Check the name (hf:OWNER/NAME) and the network."
        ) from error
    if not split and len(splits) == 1:
        (split,) = splits
    if split not in splits:
        ways = ", ".join(f"hf:{name}:{split_name}" for split_name in splits)
        raise ValueError(f"hf:{spec} names no split, or one that does not exist. Write one of {ways}.")
    return splits[split]
