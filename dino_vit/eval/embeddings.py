"""Embedding files: name, label, index and embedding of each image, and how they were made.

- `.parquet`: columns name, label, index, embedding; the metadata in the schema's metadata
- `.npy`: the array; name, label and index of each row in a `.csv` beside it, the metadata in a `.json`

A label is the name of a class; an index is the image's index in the source. Files are written block by
block, so that embeddings may be larger than memory; npy is memory-mapped when read.
"""

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import TypeAdapter

from dino_vit.core import log
from dino_vit.core.storage import OWN_KEY, replacing, write_bytes
from dino_vit.core.text import brief
from dino_vit.data.sources.open import open_source
from dino_vit.eval.maps.pictures import EMPTY, Panel, thumbnail
from dino_vit.views.eval_transform import EvalTransform

Array = NDArray[Any]
_BLOCK_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True)
class Embeddings:
    """The contents of an embedding file, row by row."""

    values: Array  # (n, D); of patches (n, N, D)
    names: Sequence[str]
    labels: Sequence[str | None]
    indices: NDArray[np.int64]
    metadata: dict[str, Any]

    @property
    def transform(self) -> EvalTransform:
        """The transform of the images."""
        name = "transform" if "transform" in self.metadata else "preparation"  # of earlier versions
        return TypeAdapter(EvalTransform).validate_python(self.metadata[name])


def check_suffix(path: Path) -> None:
    """Check that a file name ends in the suffix of a format."""
    if path.suffix not in _FORMATS:
        raise ValueError(f"{path} is not a name for embeddings: it must end in {' or '.join(_FORMATS)}")


def write_embeddings(path: Path, embeddings: Embeddings, *, dtype: str, normalise: bool = False) -> None:
    """Write embeddings in the format that the suffix names."""
    write, _ = _FORMATS[path.suffix]
    write(path, embeddings, np.dtype(dtype), normalise)


def read_embeddings(path: Path) -> Embeddings:
    """Read an embedding file of any of the formats."""
    check_suffix(path)
    if not path.is_file():
        raise ValueError(
            f"{path} does not exist; write it with `dino-vit embed SOURCE weights=... output={path}`"
        )
    _, read = _FORMATS[path.suffix]
    try:
        embeddings = read(path)
        rows, names, version = len(embeddings.values), len(embeddings.names), embeddings.metadata["format"]
        if version != 1:
            raise ValueError(f"its format is {version}, but this version of dino-vit reads format 1")
        if rows != names:
            raise ValueError(f"it has {rows} embeddings, but {names} names")
        if not all(isinstance(name, str) for name in embeddings.names):
            raise ValueError("it has embeddings without a name")
        embeddings.metadata["source"]["spec"], embeddings.transform  # must be there
    except Exception as error:  # each library has errors of its own
        # "'NoneType' object is not subscriptable" means nothing to a user.
        why = "" if isinstance(error, LookupError | TypeError) else f": {brief(error, 200)}"
        raise ValueError(f"{path} is damaged or not an embedding file of `dino-vit embed`{why}") from error
    return embeddings


def read_image_embeddings(path: str) -> Embeddings:
    """Read an embedding file that has one embedding per image."""
    embeddings = read_embeddings(Path(path))
    if embeddings.values.ndim != 2:
        raise ValueError(f"{path} has patch tokens, but needs one embedding per image: embed with tokens=cls")
    return embeddings


def _blocks(values: Array, dtype: np.dtype[Any], normalise: bool) -> Iterator[tuple[slice, Array]]:
    """Yield rows of a large array, and their values, in blocks of bounded size."""
    size = max(_BLOCK_BYTES // (4 * int(np.prod(values.shape[1:]))), 1)
    for start in range(0, len(values), size):
        rows = slice(start, start + size)
        block = torch.as_tensor(values[rows])
        yield rows, (F.normalize(block.float(), dim=-1) if normalise else block).numpy().astype(dtype)


def embedded_panels(embeddings: Embeddings, captions: Iterable[tuple[int, str]]) -> list[Panel]:
    """Return embedded images by their rows as small pictures with captions; empty ones if they are gone."""
    try:
        source = open_source(embeddings.metadata["source"]["spec"])
    except (ValueError, OSError) as error:
        log.warning("the sheet does not show the embedded images: %s", error)
        return [(EMPTY, caption) for _, caption in captions]
    panels = []
    for row, caption in captions:
        index = int(embeddings.indices[row])
        # The folder may have other images by now.
        same = 0 <= index < len(source) and source.name(index) == embeddings.names[row]
        pixels = embeddings.transform.pixels
        panels.append((thumbnail(source, index, pixels) if same else EMPTY, caption))
    return panels


def _write_parquet(path: Path, embeddings: Embeddings, dtype: np.dtype[Any], normalise: bool) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    width = int(np.prod(embeddings.values.shape[1:]))
    embedding = pa.list_(pa.from_numpy_dtype(dtype), width)
    fields = {"name": pa.string(), "label": pa.string(), "index": pa.int64(), "embedding": embedding}
    schema = pa.schema(fields, metadata={OWN_KEY: json.dumps(embeddings.metadata)})
    # Floating-point noise neither compresses nor repeats.
    options: dict[str, Any] = {"compression": "none", "use_dictionary": ["label"]}
    with (
        replacing(path) as partial,
        partial.open("wb") as file,  # Arrow itself opens UTF-8 names only
        parquet.ParquetWriter(file, schema, **options) as writer,
    ):
        for rows, block in _blocks(embeddings.values, dtype, normalise):
            values = pa.FixedSizeListArray.from_arrays(pa.array(block.ravel()), width)
            columns = [embeddings.names[rows], embeddings.labels[rows], embeddings.indices[rows], values]
            writer.write_table(pa.table(columns, schema=schema))


def _read_parquet(path: Path) -> Embeddings:
    from pyarrow import parquet

    table = parquet.read_table(path, memory_map=True)
    metadata = json.loads(table.schema.metadata[OWN_KEY.encode()])
    blocks = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in table["embedding"].chunks]
    return Embeddings(
        values=np.concatenate(blocks).reshape(-1, *metadata["shape"]),
        names=table["name"].to_pylist(),
        labels=table["label"].to_pylist(),
        indices=table["index"].to_numpy(),
        metadata=metadata,
    )


def _write_npy(path: Path, embeddings: Embeddings, dtype: np.dtype[Any], normalise: bool) -> None:
    header = {"descr": dtype.str, "fortran_order": False, "shape": embeddings.values.shape}
    # Not a memory map, which crashes when the disk is full.
    with replacing(path) as partial, partial.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for _, block in _blocks(embeddings.values, dtype, normalise):
            file.write(block.data)
    with (
        replacing(path.with_suffix(".csv")) as partial,
        partial.open("w", newline="", encoding="utf-8") as file,
    ):
        writer = csv.writer(file)
        writer.writerow(("name", "label", "index"))
        writer.writerows(zip(embeddings.names, embeddings.labels, embeddings.indices.tolist(), strict=True))
    write_bytes(path.with_suffix(".json"), json.dumps(embeddings.metadata, indent=1).encode())


def _read_npy(path: Path) -> Embeddings:
    with path.with_suffix(".csv").open(newline="", encoding="utf-8") as text:
        rows = list(csv.DictReader(text))
    return Embeddings(
        values=np.load(path, mmap_mode="c"),
        names=[row["name"] for row in rows],
        labels=[row["label"] or None for row in rows],
        indices=np.array([int(row["index"]) for row in rows], np.int64),
        metadata=json.loads(path.with_suffix(".json").read_bytes()),
    )


_FORMATS = {
    ".parquet": (_write_parquet, _read_parquet),
    ".npy": (_write_npy, _read_npy),
}
