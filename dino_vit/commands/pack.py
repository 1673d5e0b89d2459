"""Pack a source into tar shards: few large files instead of many small ones, with their checksums.

Image bytes, names and labels are those of the source, so training on the shards is training on the source.
`sha256sum --check SHA256SUMS` verifies a copy.
"""

import hashlib
import io
import os
import shutil
import tarfile
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
from einops import rearrange
from PIL import Image
from pydantic import Field
from torch import Tensor, uint8

from dino_vit.commands import Result
from dino_vit.config.settings import Count, Settings, setting
from dino_vit.core import log
from dino_vit.core.progress import plural, progress
from dino_vit.core.storage import replacing, sync, write_bytes
from dino_vit.data.images.decode import UnreadableImage, decode, format_of, unreadable
from dino_vit.data.labels import LabelledSource
from dino_vit.data.sources.index import IndexedSource
from dino_vit.data.sources.open import open_source
from dino_vit.data.sources.source import IMAGE_SUFFIXES, Source

SUMS = "SHA256SUMS"
_PREFETCHED = 256  # items
_SUFFIXES = {"JPEG": ".jpg", "TIFF": ".tiff", "unknown": ".img"}  # of others, the format in lower case


class PackConfig(Settings):
    """Pack a source of images into tar shards."""

    source: str = Field(description="folder, list, archives, tables: see `dino-vit inspect-data --help`")
    output: str = Field(description="folder to write; it must not exist or be empty")
    labels: str | None = setting(None, "file of labels by name, .csv or .json; null: the source's own")
    shard_size: Count = setting(512, "approximate size of a shard in MiB")
    check: bool = setting(True, "decode every image, and leave out unreadable ones")

    positional: ClassVar = ("source", "output")


class Packed(NamedTuple):
    """What was written."""

    shards: list[Path]
    images: int
    unreadable: list[UnreadableImage]


@dataclass(frozen=True, kw_only=True)
class PackResult(Result):
    """The shards of a source."""

    shards: list[Path]
    images: int
    unreadable: list[UnreadableImage]  # which were left out


class _Item(NamedTuple):
    name: str
    data: bytes
    label: str | None


def run(config: PackConfig) -> PackResult:
    """Pack the source into a hidden folder, and rename it when it is complete."""
    output = Path(config.output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} already exists; give another folder, or remove it")
    source = open_source(config.source, config.labels)
    partial = output.with_name(f".{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of an earlier attempt
    try:
        packed = pack(source, partial, shard_bytes=config.shard_size * 2**20, check=config.check)
        if output.exists():
            output.rmdir()
        partial.rename(output)
        sync(output.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    if packed.unreadable:
        examples = "\n  ".join(map(str, packed.unreadable[:10]))
        log.warning("unreadable images left out: %d, such as\n  %s", len(packed.unreadable), examples)
    shards = [output / shard.name for shard in packed.shards]
    size = sum(shard.stat().st_size for shard in shards) / 2**20
    text = (
        f"{output}: {packed.images:,} images in {plural(len(shards), 'shard')}, {size:,.1f} MiB\n"
        f"verify a copy with: cd {output} && sha256sum --check {SUMS}"
    )
    return PackResult(shards=shards, images=packed.images, unreadable=packed.unreadable, text=text)


def pack(source: Source, folder: Path, *, shard_bytes: int, check: bool = True) -> Packed:
    """Write a source into shards of about this size, and then their checksums."""
    packed = Packed([], len(source), [])
    sums = ""
    items = _readable_items(source, check, packed.unreadable)
    item = next(items, None)
    while item is not None:
        path = folder / f"{len(packed.shards):06}.tar"
        with replacing(path) as partial:
            with tarfile.open(partial, "w", format=tarfile.PAX_FORMAT) as shard:
                while item is not None and shard.offset < shard_bytes:
                    _add(shard, item)
                    item = next(items, None)
            with partial.open("rb") as written:
                sums += f"{hashlib.file_digest(written, 'sha256').hexdigest()}  {path.name}\n"
        packed.shards.append(path)
    if not packed.shards:
        raise ValueError(f"none of {len(source):,} images can be read, the first is {packed.unreadable[0]}")
    write_bytes(folder / SUMS, sums.encode())
    return packed._replace(images=len(source) - len(packed.unreadable))


def _readable_items(source: Source, check: bool, left_out: list[UnreadableImage]) -> Iterator[_Item]:
    """Yield the readable items in order, prefetched by threads, and collect the others."""
    classes = list(source.classes)
    pending: deque[Future[_Item | UnreadableImage]] = deque()
    with progress("Packing", len(source)) as advance, ThreadPoolExecutor(2 * (os.cpu_count() or 1)) as pool:
        for index in range(len(source) + _PREFETCHED):
            if index < len(source):
                pending.append(pool.submit(_read, source, index, classes, check))
            if index >= _PREFETCHED and pending:
                item = pending.popleft().result()
                advance(1)
                if isinstance(item, UnreadableImage):
                    left_out.append(item)
                else:
                    yield item


def _read(source: Source, index: int, classes: list[str], check: bool) -> _Item | UnreadableImage:
    label, named = source.label(index), source.source if isinstance(source, LabelledSource) else source
    name = os.fsdecode(named.raw_name(index)) if isinstance(named, IndexedSource) else named.name(index)
    try:
        item = source.read(index)
        data = _encode(item) if isinstance(item, Tensor) else item
        if check:
            decode(data, name)
    except (OSError, ValueError) as error:
        return unreadable(name, error)
    except UnreadableImage as error:
        return error
    return _Item(_member_name(name, data, label is not None), data, None if label is None else classes[label])


def _encode(image: Tensor) -> bytes:
    """Encode an array without loss: as PNG if possible, else as npy."""
    buffer = io.BytesIO()
    if image.dtype == uint8 and len(image) in (1, 3):
        pixels = rearrange(image, "c y x -> y x c").contiguous().numpy()
        Image.fromarray(pixels.squeeze(-1) if len(image) == 1 else pixels).save(buffer, "PNG")
    else:
        np.save(buffer, image.numpy())
    return buffer.getvalue()


def _member_name(name: str, data: bytes, labelled: bool) -> str:
    """Return a relative name with the suffix of its format, which is safe to unpack.

    WebDataset matches images and labels by what comes before the first dot, so a labelled name has no other.
    """
    parts = [part for part in name.replace("://", "/").split("/") if part not in ("", ".", "..")]
    stem, suffix = os.path.splitext(parts[-1] if parts else "image")
    if suffix.lower() not in IMAGE_SUFFIXES:
        stem += suffix
        known = format_of(data)
        suffix = _SUFFIXES.get(known, f".{known.lower()}")
    if labelled:
        stem = stem.replace(".", "-")
    return "/".join([*parts[:-1], stem + suffix])


def _add(shard: tarfile.TarFile, item: _Item) -> None:
    """Add an image and its label, without owner and time, so that equal images make equal shards."""
    key = item.name.rpartition(".")[0]
    members = [(item.name, item.data)]
    if item.label is not None:
        members.append((f"{key}.cls", item.label.encode(errors="surrogateescape")))
    for name, data in members:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        shard.addfile(info, io.BytesIO(data))
