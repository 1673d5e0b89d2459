"""Generators of hostile inputs: each writes one into a folder, and returns what to do with it."""

import io
import json
import os
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dino_vit.commands.inspect_data import as_text, describe
from dino_vit.data.images.decode import UnreadableImage, read_image
from dino_vit.data.sources.open import open_source
from dino_vit.data.statistics import inspect_images
from tests.fuzz import damage
from tests.fuzz.commands import runs, settings, weights
from tests.fuzz.described import described, embeddings, hubs, pickles, resumes
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
    summary = inspect_images(opened, some, allow_none=True)
    facts = describe(str(source), opened, summary)
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
    """A tar, a zip, a npz or a npy, damaged or well-formed but hostile."""
    suffix, make = rng.choice(
        [("tar", _tar), ("zip", _zip), ("npz", _npz), ("npy", _npy), ("zip", _bomb), ("npz", _bomb)]
    )
    path = folder / f"a.{suffix}"
    data = make(rng)
    path.write_bytes(data if rng.random() < 0.3 else damage.damaged(rng, data))
    return lambda: use(path)


def _tar(rng: Random) -> bytes:
    buffer = io.BytesIO()
    formats = (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT)
    records = {f"k{n}": "v" for n in range(rng.choice([0, 0, 0, 10, 20_000]))}
    if rng.random() < 0.1:
        records = {"path": "x" * rng.choice([10, 10**5, 10**7])}
    with tarfile.open(fileobj=buffer, mode="w", format=rng.choice(formats), pax_headers=records) as tar:
        for number in range(rng.choice([1, 3, 50])):
            image = rng.choice(sorted(IMAGES))
            for name, data in ((f"{number}.{image}", IMAGES[image]), (f"{number}.json", _json(rng))):
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


def _bomb(rng: Random) -> bytes:
    """Zeros, as many as the head of an image or of an array asks for, in a small archive."""
    buffer, zeros = io.BytesIO(), bytes(2**20)
    shape = rng.choice([(400, 1000, 1000), (3, 10**4, 10**4), (1, 20_000, 20_000), (10**9, 1, 1)])
    head = rng.choice([npy(np.zeros((0, 4), np.uint8)), b"\xff\xd8\xff", b"BM", _header(str(shape))])
    name = rng.choice(["a.npy", "a.png", "x.jpg"])
    with (
        zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open(name, "w", force_zip64=True) as member,
    ):
        member.write(head)
        for _ in range(rng.choice([20, 400])):
            member.write(zeros)
    return buffer.getvalue()


def _npz(rng: Random) -> bytes:
    buffer = io.BytesIO()
    count = rng.choice([1, 7, 300])
    order = rng.choice("CF")
    pictures = np.asarray(
        np.zeros(rng.choice([(count, 8, 9), (count, 8, 9, 3), (count, 3, 8, 9)])), order=order
    )
    labels = rng.choice([np.arange(count), np.array(["é"] * count), np.array([{}] * count, object)])
    save = rng.choice([np.savez, np.savez_compressed])
    save(buffer, x=pictures.astype(rng.choice(damage.DTYPES)), y=labels)
    return buffer.getvalue()


def _npy(rng: Random) -> bytes:
    return _header(rng.choice(damage.SHAPES), rng.choice(damage.DTYPES)) + bytes(rng.choice([0, 10, 10**5]))


def _header(shape: str, dtype: str = "|u1") -> bytes:
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".encode() + b"\n"
    return b"\x93NUMPY\x02\x00" + struct.pack("<I", len(text)) + text


def _json(rng: Random) -> bytes:
    return rng.choice(damage.TEXTS).encode(errors="replace")


def lists(rng: Random, folder: Path) -> Action:
    """A list of images, or labels of a folder, in any format."""
    (folder / "photos").mkdir()
    for name in ("a.png", "b.png"):
        (folder / "photos" / name).write_bytes(IMAGES["RGB.png"])
    path = folder / "photos" / f"list.{rng.choice(['txt', 'csv', 'tsv', 'json'])}"
    special = rng.random()
    if special < 0.02:
        path.symlink_to(rng.choice(["/dev/zero", "/dev/null", "/proc/self/mem", folder, path]))
    elif special < 0.03:
        os.mkfifo(path)
    else:
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
    if rng.random() < 0.1:
        table, group = _unusual_table(rng), 1000
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


def _unusual_table(rng: Random) -> pa.Table:
    """Columns or fields of one name, or a value that is long, or that many rows share."""
    short, value = pa.array([IMAGES["RGB.png"]]), bytes(rng.choice([10, 2**20, 2**25]))
    names = rng.choices(["bytes", "path", "image"], k=3)
    match rng.randrange(4):
        case 0:
            return pa.Table.from_arrays([short] * 3, names)
        case 1:
            fields = [short, pa.array([b"a"]), pa.array(["b"])]
            return pa.table({"image": pa.StructArray.from_arrays(fields, names)})
        case 2:
            return pa.table({"image": pa.array([value])})
        case _:
            return pa.table({"image": pa.DictionaryArray.from_arrays([0] * rng.choice([40, 1000]), [value])})


def paths(rng: Random, folder: Path) -> Action:
    """A pipe where a file should be, or a pattern of any braces."""
    if rng.random() < 0.3:
        path = folder / f"a.{rng.choice(['parquet', 'tar', 'zip', 'npz', 'npy', 'csv', 'png', 'json'])}"
        os.mkfifo(path)
        return lambda: use(path)
    pieces = ["{", "}", "{a,b}", "{0..9}", "{0..99999999999}", "{,}", ",", "..", "a", "é", "?", "\0", "~"]
    pattern = "".join(rng.choices(pieces, k=rng.choice([1, 3, 10, 2000])))
    return lambda: use(folder / pattern)


GENERATORS: dict[str, Generator] = {
    "images": images,
    "archives": archives,
    "lists": lists,
    "tables": tables,
    "paths": paths,
    "weights": weights,
    "settings": settings,
    "runs": runs,
    "described": described,
    "pickles": pickles,
    "hubs": hubs,
    "embeddings": embeddings,
    "resumes": resumes,
}
