"""Pack a source into tar shards: few large files where there were many small ones, with a digest of each.

The images' bytes are those of the source, and their names and labels too, so that what is learned from the
shards is what is learned from the source. `sha256sum --check SHA256SUMS` verifies a copy.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import shutil
import tarfile
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
from einops import rearrange
from PIL import Image
from pydantic import Field
from torch import Tensor, uint8

from dino_vit.config.settings import Count, Settings, setting
from dino_vit.core.progress import progress
from dino_vit.core.storage import replacing, sync, write_bytes
from dino_vit.data.images.decode import UnreadableImage, decode
from dino_vit.data.sources.open import open_source
from dino_vit.data.sources.source import IMAGE_SUFFIXES, Source

log = logging.getLogger("dino_vit")

SUMS = "SHA256SUMS"
_AHEAD = 256  # items that are read before they are written
_STARTS = {b"\xff\xd8\xff": ".jpg", b"\x89PNG": ".png", b"RIFF": ".webp", b"GIF8": ".gif", b"BM": ".bmp"}
_STARTS |= {b"II": ".tiff", b"MM": ".tiff", b"\x93NUMPY": ".npy"}


class PackConfig(Settings):
    """Pack a source of images into tar shards."""

    source: str = Field(description="folder, list, archives, tables: see `dino-vit inspect-data --help`")
    output: str = Field(description="folder to write; it must not exist yet, or be empty")
    labels: str | None = setting(None, "file of labels by name, .csv or .json; null: the source's own")
    shard_size: Count = setting(512, "MiB of a shard, about")
    check: bool = setting(True, "decode every image, and leave out what cannot be read")

    positional: ClassVar = ("source", "output")
    also_known_as: ClassVar = {"output": "out output_dir", "shard_size": "maxsize shard_mb"}


class Packed(NamedTuple):
    """What was written."""

    shards: list[Path]
    images: int
    unreadable: list[UnreadableImage]


class _Item(NamedTuple):
    name: str
    data: bytes
    label: str | None


def run(config: PackConfig) -> int:
    """Pack the source, put the folder in place when it is whole, and say what is in it."""
    output = Path(config.output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} exists already; give another folder, or remove it")
    source = open_source(config.source, config.labels)
    partial = output.with_name(f".{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # what an earlier try left
    try:
        packed = pack(source, partial, shard_bytes=config.shard_size * 2**20, check=config.check)
        if output.exists():
            output.rmdir()
        partial.rename(output)
        sync(output.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    if packed.unreadable:
        said = "\n  ".join(map(str, packed.unreadable[:10]))
        log.warning("left out %d images that cannot be read:\n  %s", len(packed.unreadable), said)
    size = sum((output / shard.name).stat().st_size for shard in packed.shards)
    print(f"{output}: {packed.images:,} images in {len(packed.shards)} shards, {size / 2**20:,.1f} MiB")
    print(f"verify a copy with: cd {output} && sha256sum --check {SUMS}")
    return 0


def pack(source: Source, folder: Path, *, shard_bytes: int, check: bool = True) -> Packed:
    """Write a source into shards of about so many bytes, and then the digests of all."""
    shards: list[Path] = []
    unreadable: list[UnreadableImage] = []
    sums, images = "", 0
    with progress("Packing", len(source)) as advance:
        items = _readable(_items(source, check), unreadable, advance)
        item = next(items, None)
        while item is not None:
            path = folder / f"{len(shards):06}.tar"
            with replacing(path) as partial:
                with tarfile.open(partial, "w", format=tarfile.PAX_FORMAT) as shard:
                    while item is not None and shard.offset < shard_bytes:
                        _add(shard, item)
                        images += 1
                        item = next(items, None)
                sync(partial)
                with partial.open("rb") as written:
                    sums += f"{hashlib.file_digest(written, 'sha256').hexdigest()}  {path.name}\n"
            shards.append(path)
    if not images:
        raise ValueError(f"none of the {len(source):,} images can be read, the first is {unreadable[0]}")
    write_bytes(folder / SUMS, sums.encode())
    return Packed(shards, images, unreadable)


def _readable(
    items: Iterator[_Item | UnreadableImage],
    unreadable: list[UnreadableImage],
    advance: Callable[[int], None],
) -> Iterator[_Item]:
    """Yield what can be read, and note what cannot."""
    for item in items:
        advance(1)
        if isinstance(item, UnreadableImage):
            unreadable.append(item)
        else:
            yield item


def _items(source: Source, check: bool) -> Iterator[_Item | UnreadableImage]:
    """Yield the items in their order, read by threads ahead of the one who writes."""
    ahead: deque[Future[_Item | UnreadableImage]] = deque()
    classes = list(source.classes)
    with ThreadPoolExecutor(min(16, 2 * (os.cpu_count() or 1))) as pool:
        for index in range(len(source)):
            ahead.append(pool.submit(_read, source, index, classes, check))
            if len(ahead) > _AHEAD:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def _read(source: Source, index: int, classes: list[str], check: bool) -> _Item | UnreadableImage:
    name, label = source.name(index), source.label(index)
    try:
        item = source.read(index)
        data = _encoded(item) if isinstance(item, Tensor) else item
        if check:
            decode(data, name)
    except OSError as error:
        return UnreadableImage(name, error.strerror or str(error))
    except UnreadableImage as error:
        return error
    return _Item(_member_name(name, data, label is not None), data, None if label is None else classes[label])


def _encoded(image: Tensor) -> bytes:
    """Return the file of an array: PNG where that holds it, else npy."""
    buffer = io.BytesIO()
    if image.dtype == uint8 and len(image) in (1, 3):
        pixels = rearrange(image, "c y x -> y x c").contiguous().numpy()
        Image.fromarray(pixels.squeeze(-1) if len(image) == 1 else pixels).save(buffer, "PNG")
    else:
        np.save(buffer, image.numpy())
    return buffer.getvalue()


def _member_name(name: str, data: bytes, labelled: bool) -> str:
    """Return a name that stays below the folder where somebody unpacks the shard, and says what the file is.

    WebDataset joins an image and its label by what stands before the first dot, so that a labelled name has
    no other.
    """
    parts = [part for part in name.replace("://", "/").split("/") if part not in ("", ".", "..")]
    stem, suffix = os.path.splitext(parts[-1] if parts else "image")
    if suffix.lower() not in IMAGE_SUFFIXES:
        stem += suffix
        suffix = next((known for start, known in _STARTS.items() if data.startswith(start)), ".img")
    if labelled:
        stem = stem.replace(".", "-")
    return "/".join([*parts[:-1], stem + suffix])


def _add(shard: tarfile.TarFile, item: _Item) -> None:
    """Add an image and its label; owner and time are left out, so that the same images are the same shard."""
    key = item.name.rpartition(".")[0]
    members = [(item.name, item.data)]
    if item.label is not None:
        members.append((f"{key}.cls", item.label.encode(errors="surrogateescape")))
    for name, data in members:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        shard.addfile(info, io.BytesIO(data))
