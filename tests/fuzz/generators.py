"""Generators of hostile inputs: each writes one into a folder, and returns what to do with it."""

import io
import json
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dino_vit.commands.inspect_data import as_text, describe_images
from dino_vit.data.images.decode import UnreadableImage, read_image
from dino_vit.data.open import open_source
from dino_vit.data.statistics import inspect_images
from tests.fuzz import damage
from tests.fuzz.commands import resumes, runs, settings, weights
from tests.fuzz.metadata import metadata
from tests.support.images import npy, picture, png16, saved, smooth, tiff

Action = Callable[[], object]
Generator = Callable[[Random, Path], Action]

IMAGES = {
    **{f"{mode}.png": saved(smooth(mode), "PNG") for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")},
    **{f"{mode}.jpg": saved(smooth(mode), "JPEG") for mode in ("L", "RGB", "CMYK")},
    **{f"{mode}.tif": saved(smooth(mode), "TIFF") for mode in ("1", "L", "P", "RGB", "CMYK", "LAB")},
    **{f"a.{name}": saved(smooth("RGB"), name.upper()) for name in ("webp", "gif", "bmp")},
    "deep.png": png16(np.zeros((20, 30, 3), np.uint16)),
    "five.tif": tiff(picture(20, 30, 5), photometric="minisblack", planarconfig="contig"),
    "deep.tif": tiff(np.zeros((20, 30, 3), np.uint16), photometric="rgb", compression="zlib"),
    "big.tif": tiff(picture(20, 30, 3), bigtiff=True),
    "float.npy": npy(np.zeros((20, 30), np.float32)),
    "byte.npy": npy(picture(20, 30, 3)),
}


def use(source: Path, labels: Path | None = None) -> None:
    """Open a source as commands do, and read and describe its first images."""
    opened = open_source(str(source), labels)
    some = range(min(len(opened), 8))
    summary = inspect_images(opened, some)
    facts = describe_images(str(source), opened, summary)
    json.dumps(facts, allow_nan=False).encode()
    "\n".join(as_text(facts)).encode()
    failures = []
    for index in some:
        try:
            read_image(opened, index)
        except UnreadableImage as error:
            failures.append(error)
    if failures:
        raise failures[0]


def images(rng: Random, folder: Path) -> Action:
    """A damaged image file among the names that a folder may have."""
    name = rng.choice(sorted(IMAGES))
    path = (
        folder
        / "photos"
        / rng.choice([name, f"b/{name}", f"{rng.choice(damage.TEXTS)[:40]}.png"]).replace("\0", "")
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(damage.damaged(rng, IMAGES[name]))
    return lambda: use(folder / "photos")


def archives(rng: Random, folder: Path) -> Action:
    """A damaged tar, zip or npy."""
    suffix, make = rng.choice([("tar", _tar), ("zip", _zip), ("npy", _npy)])
    path = folder / f"a.{suffix}"
    path.write_bytes(damage.damaged(rng, make(rng)))
    return lambda: use(path)


def _tar(rng: Random) -> bytes:
    buffer = io.BytesIO()
    formats = (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT)
    with tarfile.open(fileobj=buffer, mode="w", format=rng.choice(formats)) as tar:
        for number in range(rng.choice([1, 3, 50])):
            image = rng.choice(sorted(IMAGES))
            for name, data in ((f"{number}.{image}", IMAGES[image]), (f"{number}.json", b'{"label": 1}')):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def _zip(rng: Random) -> bytes:
    buffer = io.BytesIO()
    method = rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for number, (name, data) in enumerate(rng.sample(sorted(IMAGES.items()), 4)):
            archive.writestr(f"{number}/{name}", data)
    return buffer.getvalue()


def _npy(rng: Random) -> bytes:
    return npy(picture(*rng.choice([(7, 8, 9), (7, 8, 9, 3), (8, 9)])).astype(rng.choice(damage.DTYPES)))


def lists(rng: Random, folder: Path) -> Action:
    """A list of images, or labels of a folder, in any format."""
    (folder / "photos").mkdir()
    for name in ("a.png", "b.png"):
        (folder / "photos" / name).write_bytes(IMAGES["RGB.png"])
    path = folder / "photos" / f"list.{rng.choice(['txt', 'csv', 'tsv', 'json'])}"
    path.write_bytes(damage.text(rng, path.suffix))
    if path.suffix == ".json" or rng.random() < 0.5:
        return lambda: use(folder / "photos", path)
    return lambda: use(path)


def tables(rng: Random, folder: Path) -> Action:
    """A Parquet file of columns of any type, some with the names that are looked for, damaged or not."""
    rows = rng.choice([0, 1, 3, 300])
    names = rng.sample(["image", "img", "label", "labels", "path", "name", "bytes", "x", "a\nb\x1b"], 4)
    columns = {name: _column(rng, rows) for name in names}
    columns["image"] = rng.choice([pa.array([IMAGES["RGB.png"]] * rows, pa.binary()), _column(rng, rows)])
    features = rng.choice([None, damage.features(rng)])
    group = rng.choice([1, 100]) if rows else 1
    table = pa.table(columns)
    table = table.replace_schema_metadata(features and {"huggingface": features})
    buffer = io.BytesIO()
    typed = rng.random() < 0.5  # or a dictionary is read as its values
    pq.write_table(table, buffer, group, compression="zstd", store_schema=typed)
    path = folder / "a.parquet"
    path.write_bytes(buffer.getvalue() if rng.random() < 0.6 else damage.damaged(rng, buffer.getvalue()))
    return lambda: use(path)


def _column(rng: Random, rows: int) -> pa.Array:
    value, kind = rng.choice(damage.VALUES)
    return pa.array([rng.choice([value, None]) for _ in range(rows)], kind)


GENERATORS: dict[str, Generator] = {
    "images": images,
    "archives": archives,
    "lists": lists,
    "tables": tables,
    "weights": weights,
    "metadata": metadata,
    "settings": settings,
    "runs": runs,
    "resumes": resumes,
}
