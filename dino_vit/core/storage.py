"""Tensors on disk that are whole or not there: safetensors, written atomically, verified when read."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, uint8

DIGEST = "sha256"
OWN_KEY = "dino_vit"  # the metadata that says what a file of ours is


class StorageError(ValueError):
    """A file is not what it claims to be, or could not be written."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], description: str) -> None:
    """Write a safetensors file with a digest of all it holds; an old one stays until the new one is whole."""
    metadata = {OWN_KEY: description}
    whole = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    stamped = {**metadata, DIGEST: digest(whole, metadata)}
    with replacing(path) as partial:
        save_plain(whole, partial, stamped)


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file, down to the disk; an old one stays until the new one is whole."""
    with replacing(path) as partial:
        partial.write_bytes(data)
        sync(partial)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write and sync, which takes the place of `path` if all goes well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        os.replace(partial, path)
        sync(path.parent)
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"{path} could not be written, and what stood there is untouched: {error}"
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def save_plain(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Write a safetensors file with the permissions of any new file, down to the disk."""
    path.touch()
    mode = path.stat().st_mode
    save_file(dict(tensors), path, metadata=dict(metadata))
    path.chmod(mode)  # the library makes its files readable to their owner alone
    sync(path)


def read_metadata(path: Path) -> dict[str, str]:
    """Return the metadata of a safetensors file without reading its tensors."""
    try:
        with safe_open(path, framework="pt") as file:
            return dict(file.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise StorageError(f"{path} is truncated or no safetensors file: {error}") from error


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and metadata of a safetensors file; one of ours is checked against its digest."""
    metadata = read_metadata(path)
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    expected = metadata.pop(DIGEST, None)
    ours = expected is not None or OWN_KEY in metadata
    if ours and digest(tensors, metadata) != expected:
        raise StorageError(
            f"{path} is damaged: its contents do not have the digest that was written with them"
        )
    return tensors, metadata


def digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Return the SHA-256 of names, types, shapes, bytes and metadata."""
    state = hashlib.sha256()
    for key in sorted(metadata):
        state.update(f"{key}\0{metadata[key]}\0".encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        state.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        state.update(tensor.flatten().view(uint8).numpy().data)
    return state.hexdigest()


def sync(path: Path) -> None:
    """Make what was written to a file, or renamed within a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
