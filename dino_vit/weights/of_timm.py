"""Models of timm that are no vision transformer of ours: load them, and write them for timm."""

from collections.abc import Callable, Mapping
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dino_vit.core.text import brief
from dino_vit.models.timm_backbone import TimmBackbone
from dino_vit.weights.backbone import LoadedTimmBackbone
from dino_vit.weights.metadata import WeightsError
from dino_vit.weights.reading import RawWeights, check_finite


def is_timm(raw: RawWeights) -> bool:
    """Tell whether weights are of a model that timm builds and we do not."""
    if raw.metadata:
        return "name" in raw.metadata["architecture"]
    from_hub = "architecture" in raw.hub_config and "cls_token" not in raw.tensors
    return from_hub or bool(raw.export.get("name"))


def load_timm(raw: RawWeights, overrides: Mapping[str, Any]) -> LoadedTimmBackbone:
    """Return a model of timm with its weights; overrides are arguments of `TimmBackbone`."""
    known = [name for name in signature(TimmBackbone).parameters if name not in ("name", "file")]
    if unknown := [name for name in overrides if name not in known]:
        text = f"{raw.source} is a model of timm, for which load_backbone() has no argument {unknown[0]!r}"
        raise TypeError(f"{text}; there are {', '.join(known)}")
    floats = {name: tensor for name, tensor in raw.tensors.items() if tensor.is_floating_point()}
    check_finite(floats, raw.source)
    try:
        # A model that is built draws its weights, which the caller's random numbers must not notice.
        with torch.random.fork_rng(devices=[]):
            return _from_ours(raw, overrides) if raw.metadata or raw.export else _from_timm(raw, overrides)
    except RuntimeError as error:  # of load_state_dict, ours and timm's
        faults = brief(" ".join(str(error).split()), 300)
        raise WeightsError(f"{raw.source} does not fit the model that it names: {faults}") from error


def _from_ours(raw: RawWeights, overrides: Mapping[str, Any]) -> LoadedTimmBackbone:
    """Load a file of ours, or an export."""
    tensors, known = dict(raw.tensors), raw.metadata.get("architecture")
    if known is None:
        known = {name: raw.export[name] for name in ("name", "image_size", "channels")}
        tensors = {f"model.{name}": tensor for name, tensor in tensors.items()}
    model = LoadedTimmBackbone(**{**known, "num_classes": 0, **overrides})
    if not model.architecture["num_classes"]:
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("head.")}
    model.load_state_dict(tensors)
    return model


def _from_timm(raw: RawWeights, overrides: Mapping[str, Any]) -> LoadedTimmBackbone:
    """Let timm read its own file: it knows older names, other channels and other sizes."""
    stated = raw.hub_config.get("pretrained_cfg") or {}
    arguments = {"image_size": tuple((stated.get("input_size") or (3, 224, 224))[1:]), **overrides}
    return LoadedTimmBackbone(name=raw.hub_config["architecture"], file=raw.path, **arguments)


def timm_tensors(model: TimmBackbone) -> dict[str, Tensor]:
    """Return the tensors under timm's names."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in model.model.state_dict().items()}


def open_in_timm(model: TimmBackbone, written: Path) -> Callable[[Tensor], Tensor]:
    """Return the model of a written file as timm opens it."""
    import timm

    opened = timm.create_model(**model.arguments, checkpoint_path=str(written))
    return opened.eval()
