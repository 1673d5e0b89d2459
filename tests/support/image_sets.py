"""The same small images as every kind of source, written by other libraries than those that read them."""

import io
import json
import tarfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from dino_vit.data.image_set import ImageSet
from dino_vit.data.stores.calls import Calls

NAMES = ["cat/a.b.png", "cat/é.jpg", "dog/deep/1.webp", "dog-2/x.bmp", "dog/new\nline.tiff"]
CLASSES = ("cat", "dog", "dog-2")


def image_file(seed: int, name: str) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (9 + seed, 12, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    kind = Path(name).suffix[1:].replace("jpg", "jpeg")
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


FILES = {name: image_file(seed, name) for seed, name in enumerate(NAMES)}
ORDER = sorted(NAMES, key=str.encode)


def write_folder(root: Path, files: Mapping[str, bytes] = FILES) -> Path:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def write_tar(path: Path, files: Mapping[str, bytes] = FILES, *, format: int = tarfile.PAX_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=format) as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def write_zip(path: Path, files: Mapping[str, bytes] = FILES, *, method: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def write_parquet(
    path: Path,
    files: Mapping[str, bytes] = FILES,
    *,
    names: bool = True,
    rows: int = 2,
    classes: Sequence[str] = CLASSES,
) -> Path:
    """Write a table as Hugging Face does."""
    images = [{"bytes": data, "path": name if names else None} for name, data in files.items()]
    labels = [classes.index(name.split("/")[0]) for name in files]
    noted = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": classes}}
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    metadata = {"huggingface": json.dumps({"info": {"features": noted}})}
    schema = pa.schema([("image", image), ("label", pa.int64())], metadata=metadata)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"image": images, "label": labels}, schema=schema), path, row_group_size=rows)
    return path


def with_read(source: ImageSet, read: Callable[[int], Any]) -> ImageSet:
    """Return a set whose images are read by a function of their index."""
    return replace(source, store=Calls(read, ""))


def items(source: Any) -> list[tuple[str, bytes, str | None]]:
    """Return the name as it was written, the bytes and the label in words of each item."""
    classes = source.labels.names
    labels = [source.label(index) for index in range(len(source))]
    return [
        (source.full_name(index), source.read(index), None if label is None else classes[label])
        for index, label in enumerate(labels)
    ]
