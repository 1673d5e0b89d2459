"""Read the tensors of one backbone from a folder, a file, a dict or a hub, without running anything in it."""

import argparse
import hashlib
import re
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dino_vit.core.checkpoint import Checkpoints
from dino_vit.core.storage import OWN_KEY, StorageError, digest, read_tensors
from dino_vit.core.text import brief, plural
from dino_vit.weights.metadata import (
    EXPORT_KEY,
    HUB_FILES,
    WeightsError,
    check_metadata,
    parse_export,
    parse_metadata,
    read_hub_config,
)

WEIGHT_FILES = ("backbone.safetensors", *HUB_FILES)
PREFIXES = ("hf:", "timm:")  # of weights by name
CONFIG_FILES = ("config.json", "preprocessor_config.json")
WRAPPERS = ("state_dict", "model")  # keys under which timm and others store a state dict
NETWORKS = ("teacher", "student")
WRAPPER_PREFIX = re.compile(r"^((module|_orig_mod)\.)+")  # of DistributedDataParallel and torch.compile


@dataclass(frozen=True)
class RawWeights:
    """The tensors of one backbone under their original names, and what is known about their origin."""

    tensors: dict[str, Tensor]
    source: str  # as it was given, or the file in the folder that was given
    sha256: str
    metadata: Mapping[str, Any] = field(default_factory=dict)  # of our own files
    export: Mapping[str, Any] = field(default_factory=dict)  # what an export of ours says about itself
    hub_config: Mapping[str, Any] = field(default_factory=dict)  # config.json of a hub folder
    network: str | None = None
    trained_with_dino: bool = False  # a training checkpoint of DINO, or extracted from one


def read_weights(source: str | Path | Mapping[str, Any], network: str) -> RawWeights:
    """Read a run folder, a hub folder, a file or a dict."""
    if network not in NETWORKS:
        raise WeightsError(f"network={network!r} is not supported; choose from {', '.join(NETWORKS)}")
    if isinstance(source, Mapping):
        return _unwrap(source, RawWeights({}, source="a dict", sha256=""), network)
    named = is_name(source)
    try:
        path, content, about = _read_path(_fetch(str(source)) if named else Path(source))
    except StorageError as error:
        raise WeightsError(str(error)) from error
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    raw = RawWeights({}, str(source if named else path), sha256, **about)
    return _unwrap(content, raw, network)


def is_name(source: object) -> bool:
    """Tell whether weights are given by name, not by path."""
    return isinstance(source, str) and source.startswith(PREFIXES)


def _fetch(name: str) -> Path:
    """Return the folder with the weights of a name, downloaded unless the hub's cache has them."""
    from huggingface_hub import hf_hub_download  # takes a second to import
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    repository = name.removeprefix("hf:") if name.startswith("hf:") else _of_timm(name)
    try:
        for file in HUB_FILES:
            try:
                path = Path(hf_hub_download(repository, file))
                break
            except LocalEntryNotFoundError:
                raise
            except EntryNotFoundError:
                continue
        else:
            raise WeightsError(f"{name}: {repository} on the hub has none of {', '.join(HUB_FILES)}")
        for other in CONFIG_FILES:
            with suppress(EntryNotFoundError):
                hf_hub_download(repository, other)
    except WeightsError:
        raise
    except (OSError, ValueError) as error:  # all that the hub's library raises
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise WeightsError(
            f"{name} could not be fetched, and the hub's cache does not have it ({reason}). Where there is a "
            f"network, run `hf download {repository}`, and give the folder that it prints"
        ) from error
    return path.parent


def _of_timm(name: str) -> str:
    """Return the repository of a model of timm."""
    try:
        import timm
    except ImportError as error:
        raise WeightsError(f"{name} is found by timm: pip install 'dino-vit[timm]'") from error
    try:
        pretrained = timm.get_pretrained_cfg(name.removeprefix("timm:"))
    except RuntimeError:  # a tag that there is not
        pretrained = None
    if pretrained is None or not pretrained.hf_hub_id:
        wrong = "knows no weights of this name" if pretrained is None else "has no file of it on the hub"
        advice = "timm.list_pretrained() names those that there are"
        raise WeightsError(f"{name}: timm {timm.__version__} {wrong}; {advice}")
    return str(pretrained.hf_hub_id)


def _read_path(path: Path) -> tuple[Path, Any, dict[str, Any]]:
    """Return the file that was read, its content, and the fields of `RawWeights` that say more about it."""
    if path.is_dir():
        if checkpoint := Checkpoints(path).newest():
            metadata = check_metadata(checkpoint.path, checkpoint.metadata)
            return checkpoint.path, checkpoint.tensors, {"metadata": metadata}
        files = [path / name for name in WEIGHT_FILES if (path / name).is_file()]
        if not files:
            raise WeightsError(
                f"{path} holds no weights: neither checkpoints/step-*.safetensors nor any of "
                f"{', '.join(WEIGHT_FILES)}"
            )
        path = files[0]
    elif not path.is_file():
        wrong = "is not a file" if path.exists() else "does not exist"
        raise WeightsError(f"{path} {wrong}; give a weights file or a run folder")
    about = {"hub_config": read_hub_config(path)}
    if path.suffix == ".safetensors":
        content, texts = read_tensors(path)
        if OWN_KEY in texts:
            about["metadata"] = parse_metadata(path, texts[OWN_KEY])
    else:
        content = _read_pickle(path)
        texts = vars(content) if isinstance(content, OrderedDict) else {}  # attributes, which are pickled too
    if EXPORT_KEY in texts:
        about["export"] = parse_export(path, texts[EXPORT_KEY])
    return path, content, about


def _read_pickle(path: Path) -> Any:
    """Read a PyTorch file as plain data; one that would run code is refused before any of it runs."""
    try:
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about old pickle formats, which only their author can change
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load has no error class of its own: a bad file raises nearly anything
        unsafe = re.search(r"GLOBAL (\S+)|[Uu]nsupported (?:global|class)[: ]+(?!GLOBAL)(\S+)", str(error))
        if unsafe:
            raise WeightsError(
                f"{path} is not safe to load: it would run {unsafe[1] or unsafe[2]}, which weights do not "
                "need. Nothing in it was executed. If you trust the file, save its state dict alone and load "
                "that."
            ) from error
        raise WeightsError(
            f"{path} ({path.stat().st_size:,} bytes) is not a PyTorch checkpoint, or is truncated. Check "
            "that the download is complete. Supported files are .pth, .pt, .bin, .ckpt and .safetensors. "
            "Nothing in it was executed."
        ) from error


def _unwrap(content: Any, raw: RawWeights, network: str) -> RawWeights:
    """Extract the backbone's tensors from training checkpoints and wrappers, and strip their prefixes."""
    content, raw = _innermost(content, raw, network)
    tensors = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
    others = [str(name) for name, value in content.items() if not isinstance(value, Tensor)]
    if others or not tensors:
        named = brief(", ".join(others[:8]), 200)
        held = f"has {plural(len(others), 'entry', 'entries')} without a tensor ({named})"
        raise WeightsError(f"{raw.source} is not a state dict: it {held if others else 'is empty'}")
    raw = replace(raw, sha256=raw.sha256 or digest(tensors, {}))
    if raw.metadata.get("kind") == "checkpoint":
        prefix = f"{network}.backbone."
        chosen = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        return replace(raw, tensors=chosen, network=network)
    return _strip_prefixes(replace(raw, tensors=tensors))


def _innermost(content: Any, raw: RawWeights, network: str) -> tuple[Mapping[Any, Any], RawWeights]:
    """Return the state dict of a network in a training checkpoint, or the one in a wrapper."""
    while True:
        if not isinstance(content, Mapping):
            kind = type(content).__name__
            raise WeightsError(f"{raw.source} holds a {kind}, not a dict of tensors; save model.state_dict()")
        if any(isinstance(content.get(name), Mapping) for name in NETWORKS):
            if network not in content:
                held = brief(", ".join(map(str, content)), 200)
                raise WeightsError(f"{raw.source} has no {network}; it holds {held}")
            content, raw = content[network], replace(raw, network=network, trained_with_dino=True)
        elif wrapped := [content[key] for key in WRAPPERS if isinstance(content.get(key), Mapping)]:
            content = wrapped[0]
        else:
            return content, raw


def check_finite(tensors: Mapping[str, Tensor], source: str) -> None:
    """Refuse NaN and infinity, which would spread to every feature."""
    for name, tensor in tensors.items():
        if broken := int((~tensor.isfinite()).sum()):
            raise WeightsError(
                f"{source}: {name} has NaN or infinite values ({broken:,} of {tensor.numel():,}); "
                "weights must be finite: use an earlier checkpoint, or fetch the file again"
            )


def _strip_prefixes(raw: RawWeights) -> RawWeights:
    """Strip the prefixes that training adds; only DINO's own checkpoints have `backbone.`."""
    bare = {WRAPPER_PREFIX.sub("", name): tensor for name, tensor in raw.tensors.items()}
    from_dino = any(name.startswith("backbone.") for name in bare)
    bare = {name.removeprefix("backbone."): tensor for name, tensor in bare.items()}
    if len(bare) != len(raw.tensors):
        raise WeightsError(f"{raw.source} holds more than one network: some names differ only by a prefix")
    return replace(raw, tensors=bare, trained_with_dino=raw.trained_with_dino or from_dino)
