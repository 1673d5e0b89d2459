"""Embeddings in a file: of each image name, label and features, and what they were made with.

- `.parquet`: columns name, label, index, embedding; the provenance is in the schema's metadata
- `.npy`: the array; beside it `.csv` with name, label and index of each row, and `.json` with the provenance
- `.safetensors`: tensors embedding, index, label, and the names in UTF-8, joined, with where each ends

A label is the text that the source has for it; an index is the image's place in the source. Written and read
block by block; only Parquet is read into memory, as its columns are compressed.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dino_vit.core.storage import OWN_KEY, replacing, sync, write_bytes

Array = NDArray[Any]
BLOCK_BYTES = 64 * 2**20
SUFFIXES = (".parquet", ".npy", ".safetensors")


@dataclass(frozen=True, kw_only=True)
class Embeddings:
    """What an embeddings file holds, row by row."""

    values: Array  # (n, D), of patches (n, N, D)
    names: Sequence[str]  # as `printable` makes them
    labels: Sequence[str | None]
    indices: NDArray[np.int64]
    metadata: dict[str, Any]

    def __len__(self) -> int:
        return len(self.values)


def blocks(count: int, bytes_each: int) -> Iterator[slice]:
    """Yield the rows of a large array in blocks of bounded size."""
    rows = max(BLOCK_BYTES // bytes_each, 1)
    return (slice(start, min(start + rows, count)) for start in range(0, count, rows))


def printable(name: str) -> str:
    """Return a name that can be written as UTF-8, as the names of files need not be."""
    return name.encode(errors="surrogateescape").decode(errors="backslashreplace")


def normalised(values: Array) -> NDArray[np.float32]:
    """Return rows of length 1, in float32; a row of zeros stays as it is."""
    rows = values.astype(np.float32)
    lengths = np.linalg.norm(rows, axis=-1, keepdims=True)
    unit: NDArray[np.float32] = rows / np.maximum(lengths, np.finfo(np.float32).tiny)
    return unit


def write_embeddings(
    path: Path, embeddings: Embeddings, *, dtype: str, transform: Callable[[Array], Array]
) -> None:
    """Write embeddings in the format that the suffix names, each block of rows transformed on the way."""
    shape, kind = embeddings.values.shape, np.dtype(dtype)
    parts = (
        transform(embeddings.values[rows]).astype(kind)
        for rows in blocks(len(embeddings), kind.itemsize * int(np.prod(shape[1:])))
    )
    write = {".parquet": _write_parquet, ".npy": _write_npy, ".safetensors": _write_safetensors}
    write[path.suffix](path, embeddings, kind, parts)


def check_suffix(path: Path) -> None:
    """Refuse a file whose suffix names no format of embeddings."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path} would hold embeddings, so its name must end in {' or '.join(SUFFIXES)}")


def read_embeddings(path: Path) -> Embeddings:
    """Read an embeddings file of any of the formats."""
    check_suffix(path)
    if not path.is_file():
        raise ValueError(
            f"{path} does not exist; `dino-vit embed SOURCE weights=... output={path}` writes it"
        )
    read = {".parquet": _read_parquet, ".npy": _read_npy, ".safetensors": _read_safetensors}
    try:
        found = read[path.suffix](path)
    except FileNotFoundError as error:
        raise ValueError(
            f"{error.filename} is missing: it belongs to {path}, as embed writes them"
        ) from error
    except Exception as error:  # each library has errors of its own
        raise ValueError(f"{path} is no whole file of embeddings that embed wrote: {error}") from error
    if not len(found) == len(found.names) == len(found.labels) == len(found.indices):
        raise ValueError(f"{path} has {len(found)} embeddings, but not as many names and labels")
    return found


def _write_parquet(path: Path, embeddings: Embeddings, kind: np.dtype[Any], parts: Iterator[Array]) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    width = int(np.prod(embeddings.values.shape[1:]))
    embedding = pa.list_(pa.from_numpy_dtype(kind), width)
    columns = {"name": pa.string(), "label": pa.string(), "index": pa.int64(), "embedding": embedding}
    schema = pa.schema(columns, metadata={OWN_KEY: json.dumps(embeddings.metadata)})
    start = 0
    with replacing(path) as partial:
        # Floating-point noise neither compresses nor repeats.
        with parquet.ParquetWriter(partial, schema, compression="none", use_dictionary=["label"]) as writer:
            for part in parts:
                rows = slice(start, start + len(part))
                values = pa.FixedSizeListArray.from_arrays(pa.array(part.ravel()), width)
                names, labels = embeddings.names[rows], embeddings.labels[rows]
                columns_here = [names, labels, embeddings.indices[rows], values]
                writer.write_table(pa.table(columns_here, schema=schema))
                start = rows.stop
        sync(partial)


def _read_parquet(path: Path) -> Embeddings:
    from pyarrow import parquet

    file = parquet.ParquetFile(path, memory_map=True)
    metadata = _about(file.schema_arrow.metadata[OWN_KEY.encode()].decode())
    dtype = file.schema_arrow.field("embedding").type.value_type.to_pandas_dtype()
    values, start = np.empty((file.metadata.num_rows, *metadata["shape"]), dtype), 0
    for batch in file.iter_batches(columns=["embedding"]):
        rows = values[start : start + len(batch)]
        rows[:] = batch.column(0).flatten().to_numpy(zero_copy_only=False).reshape(rows.shape)
        start += len(batch)
    table = file.read(columns=["name", "label", "index"])
    names, labels = (table.column(name).to_pylist() for name in ("name", "label"))
    indices = table.column("index").to_numpy()
    return Embeddings(values=values, names=names, labels=labels, indices=indices, metadata=metadata)


def _write_npy(path: Path, embeddings: Embeddings, kind: np.dtype[Any], parts: Iterator[Array]) -> None:
    header = {"descr": kind.str, "fortran_order": False, "shape": embeddings.values.shape}
    with replacing(path) as partial:
        with partial.open("wb") as file:
            np.lib.format.write_array_header_1_0(file, header)
            for part in parts:
                file.write(part.data)
        sync(partial)
    with replacing(path.with_suffix(".csv")) as partial:
        with partial.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(("name", "label", "index"))
            writer.writerows(
                zip(embeddings.names, embeddings.labels, embeddings.indices.tolist(), strict=True)
            )
        sync(partial)
    write_bytes(path.with_suffix(".json"), json.dumps(embeddings.metadata, indent=1).encode())


def _read_npy(path: Path) -> Embeddings:
    with path.with_suffix(".csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return Embeddings(
        values=np.load(path, mmap_mode="c"),
        names=[row["name"] for row in rows],
        labels=[row["label"] or None for row in rows],
        indices=np.array([int(row["index"]) for row in rows], np.int64),
        metadata=_about(path.with_suffix(".json").read_text()),
    )


def _write_safetensors(
    path: Path, embeddings: Embeddings, kind: np.dtype[Any], parts: Iterator[Array]
) -> None:
    """Write the format by hand, as the library wants all in memory: a header of lengths, then the bytes."""
    encoded = [name.encode() for name in embeddings.names]
    ends = np.cumsum([len(name) for name in encoded], dtype=np.int64)
    classes = sorted({label for label in embeddings.labels if label is not None})
    number: dict[str | None, int] = {None: -1, **{label: place for place, label in enumerate(classes)}}
    small: dict[str, tuple[str, Array]] = {
        "index": ("I64", embeddings.indices),
        "label": ("I64", np.array([number[label] for label in embeddings.labels], np.int64)),
        "name_ends": ("I64", ends),
        "names": ("U8", np.frombuffer(b"".join(encoded), np.uint8)),
    }
    metadata = {OWN_KEY: json.dumps({**embeddings.metadata, "classes": classes})}
    header: dict[str, Any] = {"__metadata__": metadata}
    shape, start = embeddings.values.shape, 0
    sizes = {"embedding": (f"F{8 * kind.itemsize}", shape, kind.itemsize * int(np.prod(shape)))}
    sizes |= {name: (type_, array.shape, array.nbytes) for name, (type_, array) in small.items()}
    for name, (type_, dimensions, length) in sizes.items():
        header[name] = {"dtype": type_, "shape": dimensions, "data_offsets": [start, start + length]}
        start += length
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path) as partial:
        with partial.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for part in parts:
                file.write(part.data)
            for _, array in small.values():
                file.write(array.data)
        sync(partial)


def _read_safetensors(path: Path) -> Embeddings:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))

    def mapped(name: str) -> Array:
        one, types = header[name], {"F16": "<f2", "F32": "<f4", "I64": "<i8", "U8": "u1"}
        offset = 8 + length + one["data_offsets"][0]
        shape = tuple(one["shape"])
        return np.memmap(path, types[one["dtype"]], mode="c", offset=offset, shape=shape)

    metadata = _about(header["__metadata__"][OWN_KEY])
    classes = metadata.pop("classes")
    joined, ends = mapped("names").tobytes(), mapped("name_ends").tolist()
    starts = [0, *ends[:-1]]
    return Embeddings(
        values=mapped("embedding"),
        names=[joined[start:end].decode() for start, end in zip(starts, ends, strict=True)],
        labels=[None if place < 0 else classes[place] for place in mapped("label").tolist()],
        indices=np.asarray(mapped("index")),
        metadata=metadata,
    )


def _about(text: str) -> dict[str, Any]:
    metadata: dict[str, Any] = json.loads(text)
    if metadata["format"] != 1:
        raise ValueError(f"it is of format {metadata['format']}; this dino-vit knows format 1")
    return metadata
