"""Features of a source on disk: computed once by all processes, kept shard by shard, memory-mapped.

The file is a function of weights, images, preparation, kind, precision and batch size, byte for byte, however
many processes made it and wherever they were stopped: a shard is a run of whole batches, which only the
number of images and the batch size decide. Another device may round the last bits otherwise.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import chain, islice
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dino_vit.core.distributed import all_or_none, any_process, rank, world_size
from dino_vit.core.progress import Advance, progress
from dino_vit.core.storage import (
    OWN_KEY,
    StorageError,
    digest,
    read_tensors,
    replacing,
    sync,
    write_bytes,
    write_tensors,
)
from dino_vit.data.images.decode import UnreadableImage
from dino_vit.data.sources.open import Source
from dino_vit.eval.features.extraction import CLS, Extraction, Features, FeatureSpec, in_batches
from dino_vit.models.vit import VisionTransformer
from dino_vit.views.preparation import Preparation

log = logging.getLogger("dino_vit")

Dtype = Literal["float32", "float16"]
VERSION = 1  # of the files
# A shard is what a kill can cost, and what is in memory at a time.
_SHARD_IMAGES, _SHARD_BYTES, _SHARDS = 4096, 64 * 2**20, 64
_NAMES_SHOWN, _TRIED_AGAIN = 3, 20


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Features of the readable images of a source, in its order."""

    values: NDArray[Any]  # memory-mapped, read-only: (n, D), of patches (n, N, D)
    indices: NDArray[np.int64]  # (n,), in the source
    unreadable: tuple[UnreadableImage, ...]
    source: Source
    metadata: dict[str, Any]  # what the features are a function of

    def __len__(self) -> int:
        return len(self.indices)

    @cached_property
    def labels(self) -> NDArray[np.int64]:
        """The label of each image, -1 where it has none."""
        found = (self.source.label(index) for index in self.indices.tolist())
        return np.fromiter((-1 if one is None else one for one in found), np.int64, len(self))

    def name(self, row: int) -> str:
        return self.source.name(int(self.indices[row]))


def stored_features(
    model: VisionTransformer,
    source: Source,
    *,
    folder: Path,
    preparation: Preparation,
    batch_size: int,
    kind: FeatureSpec = CLS,
    indices: Sequence[int] | None = None,
    autocast: torch.dtype | None = None,
    dtype: Dtype = "float32",
    threads: int | None = None,
    title: str = "features",
) -> Stored:
    """Return the features of a source, or of some indices, from a cache folder or else computed into it.

    All processes call it, share the work and get the same. Images that cannot be read are left out, and said.
    """
    wanted = range(len(source)) if indices is None else indices
    if not len(wanted):
        raise ValueError("there are no images to compute features of")
    extraction = Extraction(
        model, source, preparation=preparation, kind=kind, autocast=autocast, threads=threads
    )
    metadata = {
        "version": VERSION,
        "weights": weights_digest(model),
        "source": source.fingerprint,
        "images": len(wanted),
        "probe": _probe(source, wanted),
        "indices": None if indices is None else _of_bytes(np.asarray(indices, np.int64).tobytes()),
        "preparation": json.loads(json.dumps(asdict(preparation))),
        "kind": asdict(kind),
        "precision": str(autocast or torch.float32).removeprefix("torch."),
        "dtype": dtype,
        "batch_size": batch_size,
    }
    key = _of_bytes(json.dumps(metadata, sort_keys=True).encode())[:20]
    made = _Making(folder / key, metadata, extraction, wanted)
    stored = made.open()
    if any_process(stored is None):
        made.make(title)
        stored = made.open()
    if stored is None:
        raise ValueError(
            f"the features just written are not in {made.folder}: it must be one folder that all "
            "processes see, and that nobody clears meanwhile"
        )
    if stored.unreadable:
        log.warning("%s", _left_out(stored))
    return stored


class _Making:
    """One set of features in its folder of the cache: files that are whole, and before them shards."""

    def __init__(
        self, folder: Path, metadata: dict[str, Any], extraction: Extraction, indices: Sequence[int]
    ) -> None:
        self.folder, self.metadata, self.extraction, self.indices = folder, metadata, extraction, indices
        self.batch_size: int = metadata["batch_size"]
        self.dtype: torch.dtype = getattr(torch, metadata["dtype"])
        self.shape = extraction.kind.shape(extraction.model, extraction.preparation.size)
        length = shard_length(len(indices), self.batch_size, prod(self.shape) * self.dtype.itemsize)
        self.shards = [
            range(start, min(start + length, len(indices))) for start in range(0, len(indices), length)
        ]

    def open(self) -> Stored | None:
        """Return what is there if it is whole and what was asked for."""
        values, indices = self.folder / "values.npy", self.folder / "indices.npy"
        try:
            described = json.loads((self.folder / "about.json").read_bytes())
            if described["about"] != self.metadata or described["sha256"] != [
                _of_file(values),
                _of_file(indices),
            ]:
                raise ValueError("the files are not what is written of them")
            rows = np.load(indices)
            if self._readable_by_now(rows):
                raise ValueError("an image that could not be read can be by now")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("the features in %s are computed again: %s", self.folder, error)
            return None
        return Stored(
            values=np.load(values, mmap_mode="c"),  # read-only for the file, yet writable for torch
            indices=rows,
            unreadable=tuple(UnreadableImage(*one) for one in described["unreadable"]),
            source=self.extraction.source,
            metadata=self.metadata,
        )

    def _readable_by_now(self, kept: NDArray[np.int64]) -> bool:
        """Tell whether an image that was left out can be read: its disk may have been away for a while."""
        left_out = np.setdiff1d(np.asarray(self.indices, np.int64), kept)[:_TRIED_AGAIN]
        extraction = self.extraction
        for index in left_out.tolist():
            with suppress(UnreadableImage):
                extraction.preparation.read(extraction.source, index)
                return True
        return False

    def make(self, title: str) -> None:
        """Compute the shards that are missing, each process a share of them, and join them."""
        missing = [shard for shard in self.shards if not self._path(shard).exists()]
        any_process(False)  # nobody writes before all have looked
        first, last = (len(missing) * part // world_size() for part in (rank(), rank() + 1))
        processes = f" (of {world_size()} processes, the first)" if world_size() > 1 else ""
        with all_or_none(), progress(title + processes, sum(map(len, missing[first:last]))) as advance:
            self._compute(missing[first:last], advance)
        with all_or_none():
            if rank() == 0:
                self._join()

    def _path(self, shard: range) -> Path:
        # The batches are in the name: they must not mix with those of another batch size.
        return self.folder / "shards" / f"{shard.start:010}-{shard.stop:010}.safetensors"

    def _compute(self, shards: Sequence[range], advance: Advance | None = None) -> None:
        """Write shards one by one, reading ahead across their borders."""
        batches = {
            shard: list(in_batches(self.indices[shard.start : shard.stop], self.batch_size))
            for shard in shards
        }
        start = time.monotonic()
        with closing(self.extraction(chain.from_iterable(batches.values()))) as features:
            for shard in shards:
                parts: list[Features] = []
                for batch in islice(features, len(batches[shard])):
                    parts.append(replace(batch, values=batch.values.to(self.dtype)))
                    if advance:
                        waited = self.extraction.idle / max(time.monotonic() - start, 1e-9)
                        seen = len(batch.indices) + len(batch.unreadable)
                        advance(seen, f"{waited:.0%} of the time waiting for images")
                self._write(shard, parts)

    def _write(self, shard: range, parts: Sequence[Features]) -> None:
        unreadable = [(image.name, image.reason) for part in parts for image in part.unreadable]
        tensors = {
            "values": torch.cat([part.values for part in parts]).cpu(),
            "indices": torch.cat([part.indices for part in parts]).cpu(),
        }
        write_tensors(self._path(shard), tensors, json.dumps({"unreadable": unreadable}))

    def _read(self, shard: range) -> tuple[dict[str, Tensor], list[list[str]]]:
        """Return a shard's tensors and what could not be read; a damaged one is computed again."""
        try:
            tensors, metadata = read_tensors(self._path(shard))
        except StorageError as error:
            log.warning("a part of the features is computed again: %s", error)
            self._compute([shard])
            tensors, metadata = read_tensors(self._path(shard))
        return tensors, json.loads(metadata[OWN_KEY])["unreadable"]

    def _join(self) -> None:
        """Write the shards behind each other into one file, then what it is, then remove them."""
        indices: list[Tensor] = []
        unreadable: list[list[str]] = []
        for shard in self.shards:
            tensors, left_out = self._read(shard)
            indices.append(tensors["indices"])
            unreadable += left_out
        rows = torch.cat(indices).numpy()
        if not len(rows):
            name, reason = unreadable[0]
            raise ValueError(
                f"none of the {len(self.indices):,} images can be read, the first is {name}: {reason}"
            )
        values, complete = self.folder / "values.npy", self.folder / "shards" / "values.npy"
        self._write_values(complete, len(rows))  # there, so that nothing is left over after a kill
        os.replace(complete, values)
        saved = io.BytesIO()
        np.save(saved, rows)
        write_bytes(self.folder / "indices.npy", saved.getvalue())
        described = {
            "about": self.metadata,
            "sha256": [_of_file(values), _of_bytes(saved.getvalue())],
            "unreadable": unreadable,
        }
        write_bytes(self.folder / "about.json", json.dumps(described, indent=1).encode())
        shutil.rmtree(self.folder / "shards", ignore_errors=True)

    def _write_values(self, path: Path, count: int) -> None:
        dtype = np.dtype(self.metadata["dtype"])
        header = {"descr": dtype.str, "fortran_order": False, "shape": (count, *self.shape)}
        with replacing(path) as partial:
            with partial.open("wb") as file:  # no memory map, in which a full disk would be a crash
                np.lib.format.write_array_header_1_0(file, header)
                for shard in self.shards:
                    file.write(self._read(shard)[0]["values"].numpy().data)
            sync(partial)


def weights_digest(model: VisionTransformer) -> str:
    """Return a digest of a backbone's tensors and architecture, whatever file they came from."""
    return digest(model.state_dict(), {"architecture": json.dumps(model.architecture, sort_keys=True)})


def shard_length(images: int, batch_size: int, bytes_each: int) -> int:
    """Return the images of a shard: whole batches, bounded in bytes, and enough shards for many processes."""
    bound = min(_SHARD_IMAGES, _SHARD_BYTES // bytes_each, images // _SHARDS)
    return max(bound // batch_size, 1) * batch_size


def _probe(source: Source, indices: Sequence[int]) -> str:
    """Return a digest of a few images themselves, as a fingerprint may know no more than names and sizes."""
    state = hashlib.sha256()
    for place in (0, len(indices) // 2, len(indices) - 1):
        try:
            item = source.read(indices[place])
        except OSError as error:
            item = str(error).encode()
        state.update(item.contiguous().numpy().tobytes() if isinstance(item, Tensor) else item)
    return state.hexdigest()


def _left_out(stored: Stored) -> str:
    names = ", ".join(str(image) for image in stored.unreadable[:_NAMES_SHOWN])
    more = (
        f" and {len(stored.unreadable) - _NAMES_SHOWN:,} more"
        if len(stored.unreadable) > _NAMES_SHOWN
        else ""
    )
    count = f"{len(stored.unreadable):,} of {len(stored) + len(stored.unreadable):,}"
    return f"{count} images cannot be read and are left out: {names}{more}"


def _of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _of_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
