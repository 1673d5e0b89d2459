"""Write files atomically: readers find the old file or the whole new one. Tensors are verified when read."""

import hashlib
import io
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, uint8

from dino_vit.core.text import brief

DIGEST = "sha256"
OWN_KEY = "dino_vit"  # the metadata key under which our files describe themselves
FORMAT_VERSION = 1  # of these descriptions


class StorageError(ValueError):
    """A file is damaged, or could not be written."""

    result: object = None  # of a function whose result could not be written


def write_tensors(path: Path, tensors: Mapping[str, Tensor], description: str) -> None:
    """Write a safetensors file with a digest of all its contents."""
    metadata = {OWN_KEY: description}
    plain = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    with replacing(path) as partial:
        save_plain(plain, partial, {**metadata, DIGEST: digest(plain, metadata)})


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file atomically."""
    with replacing(path) as partial:
        partial.write_bytes(data)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to; at the end it is flushed to disk and renamed to `path`."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        sync(partial)
        os.replace(partial, path)
        sync(path.parent)
    except (OSError, SafetensorError) as error:
        raise StorageError(f"{path} could not be written and was left as it was: {reason(error)}") from error
    finally:
        with suppress(OSError):
            partial.unlink()


def reason(error: OSError | SafetensorError) -> str:
    """Return why a file could not be written, without the name of a temporary one."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return re.sub(r".*I/O error: (.*) \(os error \d+\)", r"\1", text)


def pickled(content: object) -> bytes:
    """Return a PyTorch file. `torch.save` to a path hides why a write failed."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def save_plain(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Write a safetensors file with the permissions of any new file, and flush it to disk."""
    path.touch()
    mode = path.stat().st_mode
    save_file(dict(tensors), path, metadata=dict(metadata))
    path.chmod(mode)  # safetensors makes its files readable to their owner only
    sync(path)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and metadata of a safetensors file; one of ours is checked against its digest."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    # KeyError: of a type that torch lacks.
    except (OSError, SafetensorError, KeyError, RuntimeError) as error:
        text = "is not a safetensors file, is incomplete, or has tensors of unknown types"
        raise StorageError(f"{path} {text}: {error}") from error
    expected = metadata.pop(DIGEST, None)
    ours = expected is not None or OWN_KEY in metadata
    if ours and digest(tensors, metadata) != expected:
        raise StorageError(f"{path} is damaged: its contents do not match its digest")
    return tensors, metadata


def check_version(path: Path, description: Mapping[str, object]) -> None:
    """Raise for the description of a file that another version of the library wrote."""
    version = description.get("version")
    if version != FORMAT_VERSION:
        raise StorageError(
            f"{path} has format version {brief(repr(version))}, but this dino-vit reads {FORMAT_VERSION}"
        )


def read_texts(path: Path) -> dict[str, str]:
    """Return the metadata of a safetensors file alone, unchecked: its digest is of the tensors too."""
    try:
        with safe_open(path, framework="pt") as file:
            return dict(file.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise StorageError(f"{path} is not a safetensors file, or is incomplete: {error}") from error


def digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Return the SHA-256 of names, types, shapes, bytes and metadata."""
    state = hashlib.sha256()
    for key in sorted(metadata):
        state.update(f"{key}\0{metadata[key]}\0".encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        state.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        # One of no or one element may have a stride of 0, with which PyTorch cannot view it as bytes.
        state.update(tensor.as_strided((tensor.numel(),), (1,)).view(uint8).numpy().data)
    return state.hexdigest()


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk, so that they survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
