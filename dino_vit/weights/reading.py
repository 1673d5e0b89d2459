"""Bytes to tensors: open whatever holds weights, run nothing that is in it, and say what wrapped them."""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dino_vit.core.storage import OWN_KEY, StorageError, digest, read_tensors

HUB_FILES = ("model.safetensors", "pytorch_model.bin", "model.bin")  # config.json beside these is theirs
WEIGHT_FILES = ("backbone.safetensors", *HUB_FILES)
SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".ckpt")
WRAPPERS = ("state_dict", "model")  # what timm and its relatives put around a state dict
NETWORKS = ("teacher", "student")
_WRAPPER_PREFIX = re.compile(r"^((module|_orig_mod)\.)+")  # of DistributedDataParallel, of torch.compile
FORMAT_VERSION = 1  # of what our own files say of themselves


class WeightsError(ValueError):
    """What was given holds no weights that can be used as asked."""


@dataclass(frozen=True)
class RawWeights:
    """The tensors of one backbone under their original names, and what is known of where they come from."""

    tensors: dict[str, Tensor]
    source: str
    sha256: str
    metadata: Mapping[str, Any] = field(default_factory=dict)  # what our own files say of themselves
    hub_config: Mapping[str, Any] = field(
        default_factory=dict
    )  # config.json of a Hugging Face or timm folder
    network: str | None = None
    trained_with_dino: bool = False  # the file is a training checkpoint, or was cut out of one


def read_weights(source: str | Path | Mapping[str, Any], network: str) -> RawWeights:
    """Read a run folder, a hub folder, a file or a dict."""
    if isinstance(source, Mapping):
        return _unwrap(dict(source), RawWeights({}, source="a dict", sha256=""), network)
    path = find_weights(Path(source))
    hub_config = _read_hub_config(path.parent) if path.name in HUB_FILES else {}
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    raw = RawWeights({}, source=str(path), sha256=sha256, hub_config=hub_config)
    if path.suffix == ".safetensors":
        try:
            tensors, metadata = read_tensors(path)
        except StorageError as error:
            raise WeightsError(str(error)) from error
        described = _parse_description(path, metadata[OWN_KEY]) if OWN_KEY in metadata else {}
        return _unwrap(dict(tensors), replace(raw, metadata=described), network)
    return _unwrap(_read_pickle(path), raw, network)


def _parse_description(path: Path, text: str) -> dict[str, Any]:
    """Return what one of our own files says of itself, or say why it cannot be ours."""
    try:
        described = json.loads(text)
    except ValueError:
        described = None
    whole = isinstance(described, dict) and {"kind", "mean", "std"} <= described.keys()
    if not whole or not isinstance(described.get("architecture"), dict):
        raise WeightsError(f"{path} is marked as a file of dino-vit, but does not say what it holds")
    if described.get("version", FORMAT_VERSION) != FORMAT_VERSION:
        raise WeightsError(
            f"{path} was written by another dino-vit (format {described['version']}; known here is "
            f"{FORMAT_VERSION}); upgrade dino-vit to read it"
        )
    return described


def find_weights(path: Path) -> Path:
    """Return the file that a path stands for: itself, or the weights in a run or hub folder."""
    if path.is_file():
        return path
    if not path.exists():
        raise WeightsError(f"{path} does not exist; give a weights file or the folder of a run")
    checkpoints = sorted((path / "checkpoints").glob("*.safetensors"))
    for found in (*checkpoints[-1:], *(path / name for name in WEIGHT_FILES)):
        if found.is_file():
            return found
    raise WeightsError(
        f"{path} holds no weights: neither checkpoints/*.safetensors nor any of {', '.join(WEIGHT_FILES)}"
    )


def _read_hub_config(folder: Path) -> dict[str, Any]:
    """Return config.json of a hub folder, with the image statistics of its preprocessor, or nothing."""
    found: dict[str, Any] = {}
    for name in ("preprocessor_config.json", "config.json"):
        path = folder / name
        if path.is_file():
            try:
                found |= json.loads(path.read_text())
            except (ValueError, TypeError) as error:
                raise WeightsError(f"{path} is not valid JSON: {error}") from error
    return found if "model_type" in found or "architecture" in found else {}


def _read_pickle(path: Path) -> Any:
    """Read a PyTorch file as data: whatever would need code to be run is refused before any of it runs."""
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load has no error of its own: a bad file raises nearly anything
        asked = re.search(r"GLOBAL (\S+)|[Uu]nsupported (?:global|class)[: ]+(?!GLOBAL)(\S+)", str(error))
        if asked:
            raise WeightsError(
                f"{path} refused: to be read it would have to run {asked[1] or asked[2]}, which weights "
                "never need. Nothing in it was executed. If you trust its origin, save its state dict alone "
                "and load that."
            ) from error
        size = path.stat().st_size
        raise WeightsError(
            f"{path} ({size:,} bytes) is no PyTorch checkpoint, or only a part of one. Check that the "
            f"download is complete and that it is a {', '.join(SUFFIXES)} file. Nothing in it was executed."
        ) from error


def _unwrap(content: Any, raw: RawWeights, network: str) -> RawWeights:
    """Peel off what wraps the backbone's tensors: training checkpoints, `state_dict`, prefixes."""
    if network not in NETWORKS:
        raise WeightsError(f"network={network!r} is neither of {' and '.join(NETWORKS)}")
    if not isinstance(content, Mapping):
        raise WeightsError(
            f"{raw.source} holds a {type(content).__name__}, not a dict of tensors; save model.state_dict()"
        )
    if any(isinstance(content.get(name), Mapping) for name in NETWORKS):
        if network not in content:
            raise WeightsError(f"{raw.source} has no {network}; it holds {', '.join(map(str, content))}")
        return _unwrap(content[network], replace(raw, network=network, trained_with_dino=True), network)
    for wrapper in WRAPPERS:
        if isinstance(content.get(wrapper), Mapping):
            return _unwrap(content[wrapper], raw, network)
    tensors = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
    others = [str(name) for name, value in content.items() if not isinstance(value, Tensor)]
    if others or not tensors:
        raise WeightsError(
            f"{raw.source} is no state dict: {len(tensors)} tensors beside {len(others)} other entries "
            f"({', '.join(others[:8]) or 'it is empty'})"
        )
    hollow = [name for name, value in tensors.items() if value.is_meta or value.layout != torch.strided]
    if hollow:
        raise WeightsError(
            f"{raw.source}: {hollow[0]} is a meta or sparse tensor, but weights are dense ones"
        )
    raw = replace(raw, sha256=raw.sha256 or digest(tensors, {}))
    if raw.metadata.get("kind") == "checkpoint":
        prefix = f"{network}.backbone."
        chosen = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        return replace(raw, tensors=chosen, network=network)
    return _strip_prefixes(replace(raw, tensors=tensors))


def _strip_prefixes(raw: RawWeights) -> RawWeights:
    """Remove what training puts before the names of a backbone; `backbone.` is of DINO's own files."""
    bare = {_WRAPPER_PREFIX.sub("", name): tensor for name, tensor in raw.tensors.items()}
    from_dino = any(name.startswith("backbone.") for name in bare)
    bare = {name.removeprefix("backbone."): tensor for name, tensor in bare.items()}
    if len(bare) != len(raw.tensors):
        raise WeightsError(f"{raw.source} holds more than one network: some names differ only by a prefix")
    return replace(raw, tensors=bare, trained_with_dino=raw.trained_with_dino or from_dino)
