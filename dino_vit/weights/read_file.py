"""Read the tensors of one backbone from a folder, a file, a dict or a hub, without running anything in it.

`save_backbone` writes our own files, which say all that loading needs.
"""

import argparse
import hashlib
import json
import re
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from dino_vit.config.commands import side_by_side
from dino_vit.config.sections import BASELINES
from dino_vit.config.settings import as_tuples
from dino_vit.core import Size, height_width, log
from dino_vit.core.checkpoint import Checkpoints
from dino_vit.core.storage import (
    FORMAT_VERSION,
    OWN_KEY,
    StorageError,
    check_version,
    digest,
    read_tensors,
    write_tensors,
)
from dino_vit.core.text import brief, did_you_mean, plural, public_values
from dino_vit.models.backbone import Backbone
from dino_vit.weights.hub import CONFIG, HUB_FILES, INDEX, PROCESSOR, fetch, is_name, parts
from dino_vit.weights.metadata import Edges, Facts, HubFacts, PretrainedCfg, WeightsError, check, parse

EXPORT_KEY = "dino_vit_export"  # of an export, under which it says what its tensors do not show
PROVENANCE_FACTS = ("mean", "std", "bits", "range", "size", "preparation", "network", "step")
WEIGHT_FILES = ("backbone.safetensors", *HUB_FILES)
INTERPOLATIONS = {2: "bilinear", 3: "bicubic"}  # of Pillow, which processors of Hugging Face name by number
WRAPPERS = ("state_dict", "model")  # keys under which timm and others store a state dict
NETWORKS = ("teacher", "student")
CLASSIFIER = "classifier"  # kind of a file of ours with one beside the backbone, and prefix of its tensors
WRAPPER_PREFIX = re.compile(r"^((module|_orig_mod)\.)+")  # of DistributedDataParallel and torch.compile


@dataclass(frozen=True)
class RawWeights:
    """The tensors of one backbone under their original names, and what is known about their origin."""

    tensors: Mapping[str, Tensor]
    source: str  # as it was given, or the file in the folder that was given
    sha256: str
    facts: Mapping[str, Any] = field(default_factory=dict)  # `Facts` that the file or its folder states
    network: str | None = None
    trained_with_dino: bool = False  # a training checkpoint of DINO, or extracted from one

    @property
    def architecture(self) -> dict[str, Any] | None:
        """The arguments that build it, which our own files alone state."""
        return self.facts.get("architecture")


def read_weights(source: str | Path | Mapping[str, Any], network: str) -> RawWeights:
    """Read a run folder, a hub folder, a file or a dict; a baseline is all in its name."""
    if network not in NETWORKS:
        raise WeightsError(f"network={network!r} is not supported; choose from {', '.join(NETWORKS)}")
    if source in BASELINES:
        return RawWeights({}, str(source), sha256="", facts={"architecture": {"name": source}})
    name, sha256, content, facts = "a dict", "", source, dict[str, Any]()
    if not isinstance(source, Mapping):
        try:
            path, content, facts = _read_path(fetch(str(source)) if is_name(source) else Path(source))
        except StorageError as error:
            raise WeightsError(str(error)) from error
        name, sha256 = str(source if is_name(source) else path), _sha256(path)
    tensors, chosen = _state_dict(content, name, network)
    sha256 = sha256 or digest(tensors, {})
    if facts.get("kind") == "checkpoint":
        chosen, prefix = network, f"{network}.backbone."
        tensors = {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}
    if facts.get("kind") == CLASSIFIER:
        tensors = {key: t for key, t in tensors.items() if not key.startswith(f"{CLASSIFIER}.")}
    # Strip the prefixes that training adds; only DINO's own checkpoints have `backbone.`.
    bare = {WRAPPER_PREFIX.sub("", key): tensor for key, tensor in tensors.items()}
    from_dino = chosen is not None or any(key.startswith("backbone.") for key in bare)
    bare = {key.removeprefix("backbone."): tensor for key, tensor in bare.items()}
    if len(bare) != len(tensors):
        raise WeightsError(f"{name} holds more than one network: some names differ only by a prefix")
    return RawWeights(bare, name, sha256, facts, chosen, from_dino)


def find_weights(source: str | Path) -> Path:
    """Return the file of weights, or the folder with checkpoints, that a path leads to; nothing is read."""
    path = Path(source)
    if path.is_dir() and Checkpoints(path).paths():
        return path
    for file in (path, *(path / name for name in WEIGHT_FILES)):
        if file.is_file():
            return file
    wrong = "holds no weights" if path.exists() else "does not exist"
    advice = "; train a network first (`dino-vit pretrain IMAGES FOLDER`), or give a weights file"
    raise WeightsError(f"{path} {wrong}{did_you_mean(str(path), advice)}")


def check_weights(source: str) -> None:
    """Raise WeightsError for a path without weights: what cannot work is said before labels are read."""
    for part in side_by_side(source):
        if not is_name(part):
            find_weights(part)


def _sha256(path: Path) -> str:
    """Return the SHA-256 of a file; of weights in several files that of all of them, one after the other."""
    checksum = hashlib.sha256()
    for part in parts(path) if path.name == INDEX else [path]:
        with part.open("rb") as file:
            hashlib.file_digest(file, lambda: checksum)
    return checksum.hexdigest()


def _read_path(path: Path) -> tuple[Path, Any, dict[str, Any]]:
    """Return the file that was read, its content, and what it or its folder states."""
    path = find_weights(path)
    if path.is_dir() and (checkpoint := Checkpoints(path).newest()):
        return checkpoint.path, checkpoint.tensors, _own_facts(checkpoint.path, checkpoint.metadata)
    if path.suffix == ".onnx":
        raise WeightsError(f"{path} is an ONNX graph, which has no weights to load; give the original")
    texts, where = dict[str, Any](), f"the metadata of {path}"
    if path.name == INDEX:
        content: Any = {
            name: tensor for part in parts(path) for name, tensor in read_tensors(part)[0].items()
        }
    elif path.suffix == ".safetensors":
        content, texts = read_tensors(path)
    else:
        content = _read_pickle(path)
        texts = vars(content) if isinstance(content, OrderedDict) else {}  # attributes, which are pickled too
    if OWN_KEY in texts:
        return path, content, _own_facts(path, parse(where, texts[OWN_KEY]))
    facts = _read_hub_facts(path)
    if EXPORT_KEY in texts:
        exported = check(Facts, parse(where, texts[EXPORT_KEY]), where).stated()
        by_timm = {"timm_name", "model_args"}  # of a folder of timm; the facts of ours say it
        facts = {key: value for key, value in facts.items() if key not in by_timm} | exported
        facts.pop("architecture", None)  # which the tensors show
    return path, content, facts


def _own_facts(path: Path, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return what one of our own files states, its lists as the tuples that they were."""
    check_version(path, metadata)
    if metadata.get("architecture") is None:  # such as the classifier and optimiser of a fine-tuning
        raise WeightsError(f"{path} holds no backbone: architecture is missing from its metadata")
    facts = check(Facts, metadata, f"the metadata of {path}").stated()
    facts["architecture"] = {name: as_tuples(value) for name, value in facts["architecture"].items()}
    return facts


def _read_hub_facts(weights: Path) -> dict[str, Any]:
    """Return what the config.json of a hub folder and its processor state, as our exports name it."""
    stated: dict[str, Any] = {}
    for path in map(weights.with_name, (PROCESSOR, CONFIG)):
        if weights.name in HUB_FILES and path.is_file():
            stated |= parse(str(path), path.read_bytes())
    if "model_type" not in stated and "architecture" not in stated:
        return {}
    where = str(weights.with_name(CONFIG))
    config = check(HubFacts, stated, where)
    if not config.architecture and not weights.with_name(PROCESSOR).is_file():
        text = "%s has no %s: images are normalised by ImageNet's mean and std, and sized by config.json"
        log.warning(text, weights.parent, PROCESSOR)
    timm, arguments = config.pretrained_cfg or PretrainedCfg(), config.model_args or {}
    channels, *size = timm.input_size or (None,)
    facts = {
        "format": "timm" if config.architecture else None,
        "timm_name": config.architecture,
        "model_args": arguments or None,
        "heads": config.num_attention_heads or arguments.get("num_heads"),
        "image_size": config.image_size or size or None,
        "channels": channels,
        "mean": config.image_mean or timm.mean,
        "std": config.image_std or timm.std,
        "norm_eps": config.layer_norm_eps,
        "activation": config.hidden_act,
        "rotary_base": (config.rope_parameters or config).rope_theta,
        # Of DINOv3 alone; null there means that nothing is rescaled.
        "rotary_rescale": (config.pos_embed_rescale or 0) if "pos_embed_rescale" in stated else None,
    }
    if timm.crop_pct and len({*size}) == 1:
        preparation: dict[str, Any] = {"shorter_side": int(size[0] / timm.crop_pct)}
        if timm.crop_mode == "squash":
            preparation = {"resize_mode": "whole"}
        if timm.interpolation in INTERPOLATIONS.values():
            preparation["interpolation"] = timm.interpolation
        facts["preparation"] = preparation
    return check(Facts, facts | _processor_facts(config), where).stated()


def _processor_facts(config: HubFacts) -> dict[str, Any]:
    """Return how a Hugging Face processor prepares images; DINOv2's give another size than its positions."""
    resized, crop = _sides(config.size), None
    if config.do_center_crop is not False:
        crop = _sides(config.crop_size)
    preparation: dict[str, Any] = {}
    edge = isinstance(config.size, Edges) and config.size.shortest_edge
    if crop and crop[0] == crop[1] and resized:
        preparation["shorter_side"] = max(min(resized), *crop)
    elif resized and not crop and not edge:
        preparation["resize_mode"] = "whole"
    if config.resample in INTERPOLATIONS:
        preparation["interpolation"] = INTERPOLATIONS[config.resample]
    elif config.resample is not None:
        text = "images are resized by bicubic interpolation, not by resample=%s of the processor"
        log.warning(text, config.resample)
    size = crop or (resized if "resize_mode" in preparation else None)
    return ({"size": size} if size else {}) | ({"preparation": preparation} if preparation else {})


def _sides(size: int | Size | Edges | None) -> Size | None:
    """Return a size of a Hugging Face processor as height and width."""
    if isinstance(size, Edges):
        height, width = size.height or size.shortest_edge, size.width or size.shortest_edge
        return (height, width) if height and width else None
    return None if size is None else height_width(size)


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
                f"{path} is not safe to load: it would run {unsafe[1] or unsafe[2]}. Nothing in it was "
                "executed. If you trust the file, save its state dict alone and load that."
            ) from error
        raise WeightsError(
            f"{path} ({path.stat().st_size:,} bytes) is not a PyTorch checkpoint or safetensors file, or is "
            "truncated: is the download complete? Nothing in it was executed."
        ) from error


def _state_dict(content: Any, source: str, network: str) -> tuple[dict[str, Tensor], str | None]:
    """Return the state dict in training checkpoints and wrappers, and of which network, if they say it."""
    chosen = None
    while True:
        if not isinstance(content, Mapping):
            kind = type(content).__name__
            raise WeightsError(f"{source} holds a {kind}, not a dict of tensors; save model.state_dict()")
        if any(isinstance(content.get(name), Mapping) for name in NETWORKS):
            if network not in content:
                held = brief(", ".join(map(str, content)), 200)
                raise WeightsError(f"{source} has no {network}; it holds {held}")
            content, chosen = content[network], network
        elif wrapped := [content[key] for key in WRAPPERS if isinstance(content.get(key), Mapping)]:
            content = wrapped[0]
        else:
            break
    others = [str(name) for name, value in content.items() if not isinstance(value, Tensor)]
    if others or not content:
        named = brief(", ".join(others[:8]), 200)
        held = f"has {plural(len(others), 'entry', 'entries')} without a tensor ({named})"
        raise WeightsError(f"{source} is not a state dict: it {held if others else 'is empty'}")
    return {str(name): tensor for name, tensor in content.items()}, chosen


def check_finite(tensors: Mapping[str, Tensor], source: str) -> None:
    """Refuse NaN and infinity, which would spread to every feature."""
    for name, tensor in tensors.items():
        if broken := int((~tensor.isfinite()).sum()):
            raise WeightsError(
                f"{source}: {name} has NaN or infinite values ({broken:,} of {tensor.numel():,}); "
                "weights must be finite: use an earlier checkpoint, or fetch the file again"
            )


def save_backbone(
    model: Backbone,
    path: str | Path,
    *,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    bits: Literal[8, 16] | None = None,
    range: tuple[float, float] | None = None,
    network: str | None = None,
    step: int | None = None,
    config: Mapping[str, Any] | None = None,
) -> None:
    """Write a safetensors file with all that loading needs; arguments default to the model's provenance."""
    path = Path(path)
    if path.suffix != ".safetensors":
        raise WeightsError(f"{path} must end in .safetensors")
    pixels = {"mean": mean, "std": std, "bits": bits, "range": range}
    given = {**pixels, "network": network, "step": step, "config": config}
    metadata = about_backbone(model, {name: value for name, value in given.items() if value is not None})
    write_tensors(path, model.state_dict(), json.dumps(metadata, sort_keys=True))


def about_backbone(model: Backbone, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of a file of ours: what is given, else what is known of the model."""
    known = {**asdict(model.provenance), **given}
    metadata = {name: known[name] for name in (*PROVENANCE_FACTS, "config")}
    for name in ("mean", "std"):
        if (values := metadata[name]) is not None and len(values) != model.channels:
            raise WeightsError(f"{name} needs one value per channel ({model.channels}), not {len(values)}")
    metadata |= {"kind": "backbone", "version": FORMAT_VERSION, "architecture": model.architecture}
    stated: dict[str, Any] = public_values(metadata)
    return stated
