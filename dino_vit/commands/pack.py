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
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

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
from dino_vit.core.text import printable
from dino_vit.data.images.decode import UnreadableImage, decode, format_of, unreadable
from dino_vit.data.images.reducing import NotReducible, reduce_image
from dino_vit.data.labels import LabelledSource
from dino_vit.data.shards import SUMS
from dino_vit.data.sources.archives import REDUCED_TO
from dino_vit.data.sources.index import IndexedSource
from dino_vit.data.sources.masks import reduce_mask
from dino_vit.data.sources.open import open_source
from dino_vit.data.sources.source import IMAGE_SUFFIXES, Source

_PREFETCHED = 256  # items
_SUFFIXES = {"JPEG": ".jpg", "TIFF": ".tiff", "unknown": ".img"}  # of others, the format in lower case


class PackConfig(Settings):
    """Pack a source of images into tar shards."""

    source: str = Field(description="folder, list, archives, tables: see `dino-vit inspect-data --help`")
    output: str = Field(description="folder to write; it must not exist or be empty")
    labels: str | None = setting(None, "file of labels by name, .csv or .json; null: the source's own")
    shard_size: Count = setting(512, "approximate size of a shard in MiB")
    size: Count | None = setting(None, "reduce larger images to this shorter side in pixels; null: none")
    masks: str | None = setting(None, "folder of masks, which goes with the images; null: none")
    check: bool = setting(True, "decode every image, and leave out unreadable ones")

    positional: ClassVar = ("source", "output")


class Packed(NamedTuple):
    """What was written."""

    shards: list[Path]
    images: int
    unreadable: list[UnreadableImage]
    reduced: list[str]  # names without suffix
    not_reduced: list[str]  # of larger images that cannot be reduced


@dataclass(frozen=True, kw_only=True)
class PackResult(Result):
    """The shards of a source."""

    shards: list[Path]
    images: int
    unreadable: list[UnreadableImage]  # which were left out
    reduced: int = 0  # images that were larger than `size`


class _Item(NamedTuple):
    name: str
    data: bytes
    label: str | None
    size: Literal["as it was", "reduced", "not reducible"] = "as it was"


class _Reading(NamedTuple):
    """How items are read."""

    classes: list[str]
    check: bool
    side: int | None  # pixels
    masks_of: frozenset[str] | None  # None: images; else they are the masks of these reduced images


def run(config: PackConfig) -> PackResult:
    """Pack the source into a hidden folder, and rename it when it is complete."""
    output = Path(config.output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} already exists; give another folder, or remove it")
    source = open_source(config.source, config.labels)
    masks = open_source(config.masks) if config.masks else None
    partial = output.with_name(f".{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of an earlier attempt
    shard_bytes, size, check = config.shard_size * 2**20, config.size, config.check
    folder = "images" if masks else ""
    try:
        packed = pack(source, partial / folder, shard_bytes=shard_bytes, check=check, size=size)
        if masks:
            reduced = frozenset(packed.reduced)
            of_masks = pack(
                masks, partial / "masks", shard_bytes=shard_bytes, check=check, size=size, masks_of=reduced
            )
            packed.unreadable.extend(of_masks.unreadable)
        if output.exists():
            output.rmdir()
        partial.rename(output)
        sync(output.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    if packed.unreadable:
        examples = "\n  ".join(map(str, packed.unreadable[:10]))
        log.warning("unreadable images left out: %d, such as\n  %s", len(packed.unreadable), examples)
    shards = [output / folder / shard.name for shard in packed.shards]
    return PackResult(
        shards=shards,
        images=packed.images,
        unreadable=packed.unreadable,
        reduced=len(packed.reduced),
        text="\n".join(_lines(config, packed, shards)),
    )


def _lines(config: PackConfig, packed: Packed, shards: list[Path]) -> Iterator[str]:
    """Yield what was written, for a person."""
    folder, size = shards[0].parent, sum(shard.stat().st_size for shard in shards) / 2**20
    yield f"{folder}: {packed.images:,} images in {plural(len(shards), 'shard')}, {size:,.1f} MiB"
    if config.size:
        larger = f"{len(packed.reduced):,} were larger and now have a shorter side of {config.size} pixels"
        yield f"{larger}; {packed.images - len(packed.reduced):,} are as they were"
    if packed.not_reduced:
        examples = ", ".join(map(printable, packed.not_reduced[:3]))
        reason = "larger, but have more than 8 bits or other channels, so they were not reduced"
        yield f"{len(packed.not_reduced):,} of these are {reason}, such as {examples}"
    if config.masks:
        yield f"{folder.parent / 'masks'}: their masks, which `dino-vit dense {folder}` finds"
    yield f"verify a copy with: cd {folder} && sha256sum --check {SUMS}"


def pack(
    source: Source,
    folder: Path,
    *,
    shard_bytes: int,
    check: bool = True,
    size: int | None = None,
    masks_of: frozenset[str] | None = None,
) -> Packed:
    """Write a source into shards of about this size, and then their checksums.

    Images are reduced to a shorter side of `size` pixels; masks if the images of these names were.
    """
    packed = Packed([], len(source), [], [], [])
    sums = ""
    items = _readable_items(source, _Reading(list(source.classes), check, size, masks_of), packed)
    item = next(items, None)
    recorded = {REDUCED_TO: str(size)} if size else {}
    while item is not None:
        path = folder / f"{len(packed.shards):06}.tar"
        with replacing(path) as partial:
            with tarfile.open(partial, "w", format=tarfile.PAX_FORMAT, pax_headers=recorded) as shard:
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


def _readable_items(source: Source, reading: _Reading, packed: Packed) -> Iterator[_Item]:
    """Yield the readable items in order, prefetched by threads, and collect the others."""
    pending: deque[Future[_Item | UnreadableImage]] = deque()
    with progress("Packing", len(source)) as advance, ThreadPoolExecutor(2 * (os.cpu_count() or 1)) as pool:
        for index in range(len(source) + _PREFETCHED):
            if index < len(source):
                pending.append(pool.submit(_read, source, index, reading))
            if index >= _PREFETCHED and pending:
                item = pending.popleft().result()
                advance(1)
                if isinstance(item, UnreadableImage):
                    packed.unreadable.append(item)
                    continue
                if item.size != "as it was":
                    names = packed.reduced if item.size == "reduced" else packed.not_reduced
                    names.append(_stem(item.name))
                yield item


def _read(source: Source, index: int, reading: _Reading) -> _Item | UnreadableImage:
    label, named = source.label(index), source.source if isinstance(source, LabelledSource) else source
    name = os.fsdecode(named.raw_name(index)) if isinstance(named, IndexedSource) else named.name(index)
    size: Literal["as it was", "reduced", "not reducible"] = "as it was"
    try:
        item = source.read(index)
        if reading.check and not isinstance(item, Tensor) and not (reading.side and reading.masks_of is None):
            decode(item, name)
        if reading.side:
            smaller = _reduce(item, name, label is not None, reading)
            item, size = (item, size) if smaller is None else (smaller, "reduced")
    except NotReducible:
        size = "not reducible"
    except (OSError, ValueError) as error:
        return unreadable(name, error)
    except UnreadableImage as error:
        if reading.check:
            return error
    data = _encode(item) if isinstance(item, Tensor) else item
    member = _member_name(name, data, label is not None)
    return _Item(member, data, None if label is None else reading.classes[label], size)


def _reduce(item: bytes | Tensor, name: str, labelled: bool, reading: _Reading) -> bytes | Tensor | None:
    """Return a smaller image, or a smaller mask of a reduced image; None where it stays as it is."""
    assert reading.side
    if reading.masks_of is None:
        return reduce_image(item, name, reading.side)
    if isinstance(item, Tensor) or _stem(_member_name(name, item, labelled)) not in reading.masks_of:
        return None
    return reduce_mask(item, reading.side)


def _stem(name: str) -> str:
    return os.path.splitext(name)[0]


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
