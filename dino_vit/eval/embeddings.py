"""Embedding files: name, label, index and embedding of each image, and how they were made.

- `.parquet`: columns name, label, index, embedding; the metadata in the schema's metadata
- `.npy`: the array; name, label and index of each row in a `.csv` beside it, the metadata in a `.json`
- `.safetensors`: tensors embedding, index, label, and the names as UTF-8 bytes, joined, with the end of each

A label is the name of a class; an index is the image's index in the source. Parquet and npy are written block
by block, so that embeddings may be larger than memory; safetensors are held in memory while they are written.
npy and safetensors are memory-mapped when read; Parquet is read into memory.
"""

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, PositiveInt
from safetensors import safe_open

from dino_vit.config.settings import Few
from dino_vit.core import log
from dino_vit.core.storage import OWN_KEY, replacing, save_plain, utf8_path, write_bytes
from dino_vit.core.text import brief, printable
from dino_vit.data.images.pixels import Pixels
from dino_vit.data.npy import Header, read_header
from dino_vit.data.sources.open import Source, open_source
from dino_vit.eval.features.extraction import Tokens
from dino_vit.eval.maps.pictures import Panel, thumbnail
from dino_vit.views.preparation import Preparation
from dino_vit.weights.metadata import checked

Array = NDArray[Any]
Blocks = Iterator[tuple[slice, Array]]

_BLOCK_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True)
class Embeddings:
    """The contents of an embedding file, row by row."""

    values: Array  # (n, D); of patches (n, N, D)
    names: Sequence[str]
    labels: Sequence[str | None]
    indices: NDArray[np.int64]
    metadata: dict[str, Any]

    def __len__(self) -> int:
        return len(self.values)


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow")


class _Weights(_Part):
    path: str
    sha256: str
    network: Literal["teacher", "student"]
    step: int | None


class _Source(_Part):
    spec: str


class _Tokens(_Part):
    kind: Tokens
    blocks: Few


class _Metadata(_Part):
    """What is read of the metadata."""

    format: int
    weights: _Weights
    source: _Source
    preparation: Preparation
    tokens: _Tokens
    precision: Literal["float32", "bfloat16", "float16"]
    shape: list[PositiveInt]
    classes: list[str] = []  # of safetensors


def row_blocks(count: int, bytes_each: int) -> Iterator[slice]:
    """Yield the rows of a large array in blocks of bounded size."""
    rows = max(_BLOCK_BYTES // bytes_each, 1)
    return (slice(start, min(start + rows, count)) for start in range(0, count, rows))


def check_suffix(path: Path) -> None:
    """Check that a file name ends in the suffix of a format."""
    if path.suffix not in _FORMATS:
        raise ValueError(f"{path} is not a name for embeddings: it must end in {' or '.join(_FORMATS)}")


def write_embeddings(
    path: Path, embeddings: Embeddings, *, dtype: str, transform: Callable[[Array], Array]
) -> None:
    """Write embeddings in the format that the suffix names, each block of rows transformed on the way."""
    row_bytes = np.dtype(dtype).itemsize * int(np.prod(embeddings.values.shape[1:]))
    blocks = (
        (rows, transform(embeddings.values[rows]).astype(dtype))
        for rows in row_blocks(len(embeddings), row_bytes)
    )
    write, _ = _FORMATS[path.suffix]
    write(path, embeddings, np.dtype(dtype), blocks)


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
        _check(embeddings)
    except FileNotFoundError as error:
        raise ValueError(f"{error.filename} is missing; `dino-vit embed` writes it beside {path}") from error
    except Exception as error:  # each library has errors of its own
        # What Python itself says of odd values means nothing to a user.
        from_python = isinstance(error, LookupError | TypeError | AttributeError | UnicodeError)
        why = "" if from_python else f": {brief(error, 200)}"
        raise ValueError(f"{path} is damaged or not an embedding file of `dino-vit embed`{why}") from error
    labels = [label and printable(label) for label in embeddings.labels]
    return replace(embeddings, names=list(map(printable, embeddings.names)), labels=labels)


def _check(embeddings: Embeddings) -> None:
    values, indices = embeddings.values, embeddings.indices
    known = Header(values.shape, False, values.dtype).numeric and values.dtype.isnative
    if not known or values.ndim not in (2, 3):
        raise ValueError(f"its embeddings are {values.dtype.str} of shape {values.shape}")
    if indices.dtype != np.int64 or not len(values) == len(indices) == len(embeddings.names):
        raise ValueError(f"it has {len(values)} embeddings, but {len(embeddings.names)} names")


def read_image_embeddings(path: str) -> Embeddings:
    """Read an embedding file that has one embedding per image."""
    embeddings = read_embeddings(Path(path))
    if embeddings.values.ndim != 2:
        raise ValueError(f"{path} has patch tokens, but needs one embedding per image: embed with tokens=cls")
    return embeddings


class EmbeddedImages:
    """The images of an embedding file, as far as their source still has them."""

    def __init__(self, embeddings: Embeddings) -> None:
        self.embeddings = embeddings
        self.pixels = Pixels(**embeddings.metadata["preparation"]["pixels"])
        self.source: Source | None = None
        try:
            self.source = open_source(embeddings.metadata["source"]["spec"])
        except (ValueError, OSError) as error:
            log.warning("the sheet does not show the embedded images: %s", error)

    def panel(self, row: int, caption: str) -> Panel:
        """Return a panel of an image, empty if the source has another image by now."""
        source, index, name = self.source, int(self.embeddings.indices[row]), self.embeddings.names[row]
        if source and 0 <= index < len(source) and source.name(index) == name:
            return Panel(thumbnail(source, index, self.pixels), caption)
        return Panel(None, caption)


def _write_parquet(path: Path, embeddings: Embeddings, dtype: np.dtype[Any], blocks: Blocks) -> None:
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
        partial.open("wb") as file,
        parquet.ParquetWriter(file, schema, **options) as writer,
    ):
        for rows, block in blocks:
            values = pa.FixedSizeListArray.from_arrays(pa.array(block.ravel()), width)
            columns = embeddings.names[rows], embeddings.labels[rows], embeddings.indices[rows], values
            writer.write_table(pa.table(list(columns), schema=schema))


def _read_parquet(path: Path) -> Embeddings:
    from pyarrow import parquet

    with utf8_path(path) as name:
        table = parquet.read_table(name, memory_map=True)
    metadata = _parse_metadata((table.schema.metadata or {}).get(OWN_KEY.encode()))
    blocks = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in table["embedding"].chunks]
    return Embeddings(
        values=np.concatenate(blocks).reshape(-1, *metadata["shape"]),
        names=table["name"].to_pylist(),
        labels=table["label"].to_pylist(),
        indices=table["index"].to_numpy(),
        metadata=metadata,
    )


def _write_npy(path: Path, embeddings: Embeddings, dtype: np.dtype[Any], blocks: Blocks) -> None:
    header = {"descr": dtype.str, "fortran_order": False, "shape": embeddings.values.shape}
    # Not a memory map, which crashes when the disk is full.
    with replacing(path) as partial, partial.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for _, block in blocks:
            file.write(block.data)
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(("name", "label", "index"))
    writer.writerows(zip(embeddings.names, embeddings.labels, embeddings.indices.tolist(), strict=True))
    write_bytes(path.with_suffix(".csv"), text.getvalue().encode())
    write_bytes(path.with_suffix(".json"), json.dumps(embeddings.metadata, indent=1).encode())


def _read_npy(path: Path) -> Embeddings:
    with path.open("rb") as file:
        stored, held = read_header(file).nbytes, path.stat().st_size - file.tell()
        if stored > held:
            raise ValueError(f"it ends after {held:,} of {stored:,} bytes")
    with path.with_suffix(".csv").open(newline="", encoding="utf-8") as text:
        rows = list(csv.DictReader(text))
    return Embeddings(
        values=np.load(path, mmap_mode="c"),
        names=[row["name"] for row in rows],
        labels=[row["label"] or None for row in rows],
        indices=np.array([int(row["index"]) for row in rows], np.int64),
        metadata=_parse_metadata(path.with_suffix(".json").read_bytes()),
    )


def _write_safetensors(path: Path, embeddings: Embeddings, dtype: np.dtype[Any], blocks: Blocks) -> None:
    values = np.empty(embeddings.values.shape, dtype)
    for rows, block in blocks:
        values[rows] = block
    names = [name.encode() for name in embeddings.names]
    classes = sorted({label for label in embeddings.labels if label is not None})
    numbers = {label: number for number, label in enumerate(classes)}
    tensors = {
        "embedding": torch.from_numpy(values),
        "index": torch.tensor(embeddings.indices),
        "label": torch.tensor([-1 if label is None else numbers[label] for label in embeddings.labels]),
        "name_ends": torch.tensor([len(name) for name in names]).cumsum(0),
        "names": torch.frombuffer(bytearray(b"".join(names)), dtype=torch.uint8),
    }
    with replacing(path) as partial:
        save_plain(tensors, partial, {OWN_KEY: json.dumps({**embeddings.metadata, "classes": classes})})


def _read_safetensors(path: Path) -> Embeddings:
    # framework="pt" maps the tensors, where "np" would copy them.
    with utf8_path(path) as opened, safe_open(opened, framework="pt") as file:
        metadata = _parse_metadata((file.metadata() or {}).get(OWN_KEY))
        tensors = {name: file.get_tensor(name).numpy() for name in file.keys()}  # noqa: SIM118 - not a mapping
    classes = [*metadata.pop("classes"), None]  # label -1 is the last one
    names = np.split(tensors["names"], tensors["name_ends"][:-1])
    return Embeddings(
        values=tensors["embedding"],
        names=[name.tobytes().decode() for name in names],
        labels=[classes[label] for label in tensors["label"].tolist()],
        indices=tensors["index"],
        metadata=metadata,
    )


def _parse_metadata(text: str | bytes | None) -> dict[str, Any]:
    if text is None:
        raise ValueError("it has no metadata")
    metadata = checked(_Metadata, json.loads(text), "its metadata")
    if metadata["format"] != 1:
        raise ValueError(f"its format is {metadata['format']}, but this version of dino-vit reads format 1")
    return metadata


_FORMATS = {
    ".parquet": (_write_parquet, _read_parquet),
    ".npy": (_write_npy, _read_npy),
    ".safetensors": (_write_safetensors, _read_safetensors),
}
