"""Pack a source into tar shards: few large files instead of many small ones, with their checksums.

Image bytes, names and labels are those of the source, so training on the shards is training on the source.
With `size`, larger images are reduced first, and the shards record it.
`sha256sum --check SHA256SUMS` verifies a copy.
"""

import hashlib
import io
import os
import shutil
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
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
from dino_vit.core.storage import replacing, sync, write_bytes
from dino_vit.core.text import plural, printable, progress
from dino_vit.data.images.decode import UnreadableImage, decode, format_of, unreadable
from dino_vit.data.images.reducing import NotReducible, reduce_image
from dino_vit.data.labels import LabelledSource
from dino_vit.data.shards import SUMS
from dino_vit.data.sources.archives import REDUCED_TO
from dino_vit.data.sources.index import IndexedSource
from dino_vit.data.sources.open import open_source
from dino_vit.data.sources.source import IMAGE_SUFFIXES, Source
from dino_vit.eval.features import in_batches

_BLOCK = 256  # items that are read at a time
_SUFFIXES = {"JPEG": ".jpg", "TIFF": ".tiff", "unknown": ".img"}  # of others, the format in lower case


class PackConfig(Settings):
    """Pack a source of images into tar shards."""

    source: str = Field(description="folder, list, archives, tables: see `dino-vit inspect-data --help`")
    output: str = Field(description="folder to write; it must not exist or be empty")
    labels: str | None = setting(None, "file of labels by name, .csv or .json; null: the source's own")
    shard_size: Count = setting(512, "approximate size of a shard in MiB")
    size: Count | None = setting(None, "reduce larger images to this shorter side in pixels; null: none")

    positional: ClassVar = ("source", "output")


@dataclass(frozen=True, kw_only=True)
class PackResult(Result):
    """The shards of a source."""

    text: str = field(repr=False, default="")
    shards: list[Path]
    images: int
    unreadable: list[UnreadableImage]  # which were left out
    reduced: int  # images that were larger than `size`
    not_reducible: list[str] = field(repr=False)  # names of larger images that were not reduced


class _Item(NamedTuple):
    name: str
    data: bytes
    label: str | None
    reduced: bool
    reducible: bool


def run(config: PackConfig) -> PackResult:
    """Pack the source into a hidden folder, and rename it when it is complete."""
    output = Path(config.output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} already exists; give another folder, or remove it")
    source = open_source(config.source, config.labels)
    incomplete = output.with_name(f".{output.name}.partial")
    shutil.rmtree(incomplete, ignore_errors=True)  # of an earlier attempt
    try:
        packed = pack(source, incomplete, shard_bytes=config.shard_size * 2**20, size=config.size)
        if output.exists():
            output.rmdir()
        incomplete.rename(output)
        sync(output.parent)
    finally:
        shutil.rmtree(incomplete, ignore_errors=True)
    if packed.unreadable:
        examples = "\n  ".join(map(str, packed.unreadable[:10]))
        log.warning("unreadable images left out: %d, such as\n  %s", len(packed.unreadable), examples)
    packed = replace(packed, shards=[output / shard.name for shard in packed.shards])
    return replace(packed, text="\n".join(_lines(config, packed)))


def _lines(config: PackConfig, packed: PackResult) -> Iterator[str]:
    shards = plural(len(packed.shards), "shard")
    file_bytes = sum(shard.stat().st_size for shard in packed.shards)
    yield f"{config.output}: {packed.images:,} images in {shards}, {file_bytes / 2**20:,.1f} MiB"
    if config.size:
        larger = f"{packed.reduced:,} were larger and now have a shorter side of {config.size} pixels"
        yield f"{larger}; {packed.images - packed.reduced:,} are as they were"
    if packed.not_reducible:
        examples = ", ".join(map(printable, packed.not_reducible[:3]))
        reason = "larger, but have more than 8 bits or other channels, so they were not reduced"
        yield f"{len(packed.not_reducible):,} of these are {reason}, such as {examples}"
    yield f"verify a copy with: cd {config.output} && sha256sum --check {SUMS}"


def pack(source: Source, folder: Path, *, shard_bytes: int, size: int | None = None) -> PackResult:
    """Write a source into shards of about this size, and then their checksums.

    Images are reduced to a shorter side of `size` pixels.
    """
    shards, unreadable, sums = list[Path](), list[UnreadableImage](), ""
    images, reduced, not_reducible = 0, 0, list[str]()
    items = _readable_items(source, unreadable, size)
    item = next(items, None)
    headers = {REDUCED_TO: str(size)} if size else {}
    while item is not None:
        path = folder / f"{len(shards):06}.tar"
        with replacing(path) as temporary:
            with tarfile.open(temporary, "w", format=tarfile.PAX_FORMAT, pax_headers=headers) as shard:
                while item is not None and shard.offset < shard_bytes:
                    _add(shard, item)
                    images, reduced = images + 1, reduced + item.reduced
                    not_reducible += [] if item.reducible else [item.name]
                    item = next(items, None)
            with temporary.open("rb") as written:
                sums += f"{hashlib.file_digest(written, 'sha256').hexdigest()}  {path.name}\n"
        shards.append(path)
    if not shards:
        raise ValueError(f"none of {len(source):,} images can be read, the first is {unreadable[0]}")
    write_bytes(folder / SUMS, sums.encode())
    return PackResult(
        shards=shards, images=images, unreadable=unreadable, reduced=reduced, not_reducible=not_reducible
    )


def _readable_items(source: Source, unreadable: list[UnreadableImage], size: int | None) -> Iterator[_Item]:
    """Yield the readable items in order, prefetched by threads, and add the others to `unreadable`."""
    read = partial(_read, source, size=size)
    with progress("Packing", len(source)) as advance, ThreadPoolExecutor(2 * (os.cpu_count() or 1)) as pool:
        blocks = in_batches(range(len(source)), _BLOCK)
        for item in chain.from_iterable(pool.map(read, block) for block in blocks):
            advance(1)
            if isinstance(item, UnreadableImage):
                unreadable.append(item)
            else:
                yield item


def _read(source: Source, index: int, *, size: int | None) -> _Item | UnreadableImage:
    """Read an item, as it is or reduced, with its label."""
    inner, label = source.source if isinstance(source, LabelledSource) else source, source.label(index)
    name = os.fsdecode(inner.raw_name(index)) if isinstance(inner, IndexedSource) else inner.name(index)
    item: bytes | Tensor = b""
    smaller, reducible = None, True
    try:
        item = source.read(index)
        if size:
            smaller = reduce_image(item, name, size)
        elif not isinstance(item, Tensor):
            decode(item, name)
    except NotReducible:
        reducible = False
    except (OSError, ValueError) as error:
        return unreadable(name, error)
    except UnreadableImage as error:
        return error
    written = item if smaller is None else smaller
    data = _encode(written) if isinstance(written, Tensor) else written
    member = _member_name(name, data, label is not None)
    class_name = None if label is None else source.classes[label]
    return _Item(member, data, class_name, smaller is not None, reducible)


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
        stem, kind = stem + suffix, format_of(data)
        suffix = _SUFFIXES.get(kind, f".{kind.lower()}")
    if labelled:
        stem = stem.replace(".", "-")
    return "/".join([*parts[:-1], stem + suffix])


def _add(shard: tarfile.TarFile, item: _Item) -> None:
    """Add an image and its label, without owner and time, so that equal images make equal shards."""
    members = [(item.name, item.data)]
    if item.label is not None:
        members.append((f"{os.path.splitext(item.name)[0]}.cls", item.label.encode(errors="surrogateescape")))
    for name, data in members:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        shard.addfile(info, io.BytesIO(data))
