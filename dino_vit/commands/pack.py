"""Pack a source into tar shards: few large files instead of many small ones, with their checksums.

Image bytes, names and labels are those of the source, so training on the shards is training on the source.
With `size`, larger images are reduced first.
`sha256sum --check SHA256SUMS` verifies a copy.
"""

import hashlib
import io
import json
import os
import shutil
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from einops import rearrange
from PIL import Image
from torch import Tensor

from dino_vit.config.commands import PackConfig
from dino_vit.core import log
from dino_vit.core.distributed import from_rank_0, in_all_processes, share_work
from dino_vit.core.process import in_batches, in_threads, read_ahead
from dino_vit.core.runtime import start_processes
from dino_vit.core.storage import replacing, sync, write_bytes
from dino_vit.core.text import Result, plural, printable, progress, public
from dino_vit.data.catalogue import Shard, index_shard, write_catalogue
from dino_vit.data.image_set import ImageSet
from dino_vit.data.images.decode import UnreadableImage, decode, listed, read_item
from dino_vit.data.images.formats import format_of
from dino_vit.data.open import archive_files, check_one_set, open_source
from dino_vit.data.paths import CATALOGUE, IMAGE_SUFFIXES
from dino_vit.data.remote import local_path
from dino_vit.data.stores.ranges import CLASS_NAMES
from dino_vit.views.pictures import resize_sides

_BLOCK = 256  # items that are read at a time
_QUALITY = 95
SUMS = "SHA256SUMS"
# Of other formats it is their name in lower case.
_SUFFIXES = {"JPEG": ".jpg", "JPEG 2000": ".jp2", "TIFF": ".tiff", "unknown": ".img"}


@dataclass(frozen=True, kw_only=True, repr=False)
class PackResult(Result):
    """The shards of a source."""

    text: str = ""
    shards: list[Path]
    images: int
    unreadable: list[UnreadableImage]  # which were left out
    reduced: int  # images that were larger than `size`


class _Item(NamedTuple):
    name: str
    data: bytes
    label: str | None  # what is written beside it
    reduced: bool


def run(config: PackConfig) -> PackResult:
    """Pack the source into a hidden folder, and rename it when it is complete."""
    if config.index_only:
        return _index(config)
    if config.output is None:
        raise ValueError("output is missing: give the folder to write, or index_only=true")
    output = Path(config.output)
    with _incomplete(output) as folder:
        source = open_source(config.source, config.labels, several=config.several)
        packed = pack(source, folder, shard_bytes=config.shard_size * 2**20, size=config.size)
    if packed.unreadable:
        count, text = len(packed.unreadable), "%d of %d images cannot be read and are left out:%s"
        log.warning(text, count, packed.images + count, listed(packed.unreadable))
    shards = [output / shard.name for shard in packed.shards]
    file_bytes = sum(shard.stat().st_size for shard in shards)
    counts = f"{plural(packed.images, 'image')} in {plural(len(shards), 'shard')}"
    lines = [f"{output}: {counts}, {file_bytes / 2**20:,.1f} MiB"]
    if config.size:
        shorter = f"a shorter side of {config.size} pixels"
        lines.append(f"{packed.reduced:,} reduced to {shorter}, the others unchanged")
    lines.append(f"verify a copy with: cd {output} && sha256sum --check {SUMS}")
    return replace(packed, shards=shards, text="\n".join(lines))


@contextmanager
def _incomplete(output: Path) -> Iterator[Path]:
    """Yield a hidden folder, which becomes the output at the end; in its place may be an empty folder."""
    is_empty = output.is_dir() and not output.is_symlink() and not any(output.iterdir())
    if os.path.lexists(output) and not is_empty:
        raise ValueError(f"{output} already exists; give another folder, or remove it")
    folder = output.with_name(f".{output.name}.partial")
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier attempt
    try:
        yield folder
        folder.rename(output)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    sync(output.parent)


def pack(source: ImageSet, folder: Path, *, shard_bytes: int, size: int | None = None) -> PackResult:
    """Write a source into shards of about this size, and then their checksums.

    Images are reduced to a shorter side of `size` pixels.
    """
    shards, unreadable, sums, images, reduced = list[Path](), list[UnreadableImage](), "", 0, 0
    indexed, labelled = list[Shard](), bool((source.codes() >= 0).any())
    names = source.labels.names if labelled and source.labels.sets is None else ()
    classes = "".join(f"{printable(name)}\n" for name in names).encode()
    write_bytes(folder / CLASS_NAMES, classes)
    items = _readable_items(source, unreadable, size, labelled)
    item = next(items, None)
    while item is not None:
        path, keys = folder / f"{len(shards):06}.tar", set[str]()
        with replacing(path) as temporary:
            with tarfile.open(temporary, "w", format=tarfile.PAX_FORMAT) as shard:
                while item is not None and shard.offset < shard_bytes:
                    _add(shard, item._replace(name=_set_apart(item.name, keys)) if labelled else item)
                    images, reduced = images + 1, reduced + item.reduced
                    item = next(items, None)
            with temporary.open("rb") as written:
                digest = hashlib.file_digest(written, "sha256").hexdigest()
        sums += f"{digest}  {path.name}\n"
        shards.append(path)
        indexed.append(index_shard(str(folder), path.name, digest=digest))
    if not shards:
        raise ValueError(f"none of {len(source):,} images can be read, the first is {unreadable[0]}")
    sums += f"{hashlib.sha256(classes).hexdigest()}  {CLASS_NAMES}\n"
    write_bytes(folder / SUMS, sums.encode())
    write_catalogue(str(folder), indexed)
    return PackResult(shards=shards, images=images, unreadable=unreadable, reduced=reduced)


def _index(config: PackConfig) -> PackResult:
    """Write the catalogue of archives that lie somewhere already, by all processes of a launch."""
    given = {"output": config.output, "labels": config.labels, "size": config.size}
    if extra := [f"{name}={value}" for name, value in given.items() if value is not None]:
        raise ValueError(f"index_only=true changes no archive; leave out {', '.join(extra)}")
    start_processes()
    with in_all_processes():
        folder, files = from_rank_0(lambda: _archives(config.source))
        with progress(f"Indexing {folder}", len(files)) as advance:
            index = partial(in_threads, partial(index_shard, folder), done=lambda _: advance(1))
            shards = share_work(index, files)
        metadata = from_rank_0(lambda: write_catalogue(folder, shards))
    images = sum(shard.images for shard in shards)
    counts = f"{plural(images, 'image')} in {plural(len(files), 'archive')}"
    titled = ", whose names begin with their archive as it has names of another" * metadata["titled"]
    text = f"{folder}/{CATALOGUE}: {counts}{titled}, {plural(len(metadata['labels']), 'label')}"
    paths = [Path(folder, file) for file in files]
    return PackResult(shards=paths, images=images, unreadable=[], reduced=0, text=text)


def _archives(source: str) -> tuple[str, list[str]]:
    """Return a folder and the archives in it, which are of one split unless a pattern chooses them."""
    folder, files = archive_files(source)
    if folder == local_path(source):
        check_one_set(folder, sorted(files))
    return folder, files


def _readable_items(
    source: ImageSet, unreadable: list[UnreadableImage], size: int | None, labelled: bool
) -> Iterator[_Item]:
    """Yield the readable items in order, prefetched by threads, and add the others to `unreadable`."""
    read = partial(_read, source, size=size, labelled=labelled)
    blocks = read_ahead(read, in_batches(range(len(source)), _BLOCK), 2 * (os.cpu_count() or 1))
    with progress("Packing", len(source)) as advance:
        for item in chain.from_iterable(blocks):
            advance(1)
            if isinstance(item, UnreadableImage):
                unreadable.append(item)
            else:
                yield item


def _read(source: ImageSet, index: int, *, size: int | None, labelled: bool) -> _Item | UnreadableImage:
    """Read an item, as it is or reduced, with its label."""
    try:
        item = read_item(source, index)
        image = decode(item, source.name(index))
    except UnreadableImage as error:
        return error
    # Values of more than 8 bits, alpha and further channels stay as they are: no lossy file holds them.
    is_plain = image.dtype == torch.uint8 and len(image) in (1, 3)
    reduced = size is not None and min(image.shape[1:]) > size and is_plain
    if reduced:
        image = resize_sides(image, size, None)
    data = _encode(image, item) if reduced or isinstance(item, Tensor) else item
    name = _member_name(public(source.full_name(index)), data, labelled)
    return _Item(name, data, _label(source, index), reduced)


def _label(source: ImageSet, index: int) -> str | None:
    """Return the number of the class of an image, or the names of its labels in JSON."""
    code, labels = source.label(index), source.labels
    if code is None or labels.sets is None:
        return None if code is None else str(code)
    return json.dumps({"labels": labels.names_of(code)}, ensure_ascii=False)


def _encode(image: Tensor, item: bytes | Tensor) -> bytes:
    """Encode the image of an item: of a lossy file as JPEG, otherwise as PNG, or as npy if it must be."""
    buffer = io.BytesIO()
    if image.dtype != torch.uint8 or len(image) not in (1, 3):
        np.save(buffer, image.numpy())
        return buffer.getvalue()
    options: dict[str, Any] = {"format": "PNG"}
    kind = "npy" if isinstance(item, Tensor) else format_of(item)
    if kind == "JPEG" or (kind == "WebP" and b"VP8L" not in item):
        options = {"format": "JPEG", "quality": _QUALITY, "subsampling": 0}
    pixels = rearrange(image, "c y x -> y x c").contiguous().numpy()
    Image.fromarray(pixels.squeeze(-1) if len(image) == 1 else pixels).save(buffer, **options)
    return buffer.getvalue()


def _member_name(name: str, data: bytes, labelled: bool) -> str:
    """Return a relative name with the suffix of its format, which is safe to unpack.

    WebDataset matches images and labels by what is before the first dot, so names with labels have no other.
    """
    parts = [part for part in name.replace("://", "/").split("/") if part not in ("", ".", "..")]
    stem, suffix = os.path.splitext(parts[-1] if parts else "image")
    if suffix.lower() not in IMAGE_SUFFIXES:
        stem, kind = stem + suffix, format_of(data)
        suffix = _SUFFIXES.get(kind, f".{kind.lower()}")
    if labelled:
        stem = stem.replace(".", "-")
    return "/".join([*parts[:-1], stem + suffix])


def _set_apart(name: str, keys: set[str]) -> str:
    """Return a name that differs before its suffix from those of other images of a shard."""
    stem, suffix = os.path.splitext(name)
    numbered = chain([stem], (f"{stem}-{number}" for number in count(2)))
    key = next(key for key in numbered if key not in keys)
    keys.add(key)
    return key + suffix


def _add(shard: tarfile.TarFile, item: _Item) -> None:
    """Add an image and its label, without owner and time, so that equal images make equal shards."""
    members = [(item.name, item.data)]
    if item.label is not None:
        suffix = "json" if item.label.startswith("{") else "cls"
        members.append((f"{os.path.splitext(item.name)[0]}.{suffix}", item.label.encode()))
    for name, data in members:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        shard.addfile(info, io.BytesIO(data))
