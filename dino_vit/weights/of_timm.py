"""Models of timm that are no vision transformer of ours: load them, and write them for timm."""

from collections.abc import Mapping
from inspect import signature
from typing import Any

import torch

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
    arguments = [name for name in signature(TimmBackbone).parameters if name != "name"]
    if unknown := [name for name in overrides if name not in arguments]:
        advice = (
            "set loss.patch_weight=0" if unknown[0] == "mask_token" else f"there are {', '.join(arguments)}"
        )
        text = f"{raw.source} is a model of timm, which has no {unknown[0].replace('_', ' ')}"
        raise WeightsError(f"{text}; {advice}")
    floats = {name: tensor for name, tensor in raw.tensors.items() if tensor.is_floating_point()}
    check_finite(floats, raw.source)
    try:
        # A model that is built draws its weights, which the caller's random numbers must not notice.
        with torch.random.fork_rng(devices=[]):
            return _from_ours(raw, overrides) if raw.metadata or raw.export else _from_timm(raw, overrides)
    except (TypeError, RuntimeError) as error:  # of the arguments, and of load_state_dict
        faults = brief(" ".join(str(error).split()), 300)
        raise WeightsError(f"{raw.source} does not fit the model that it names: {faults}") from error


def _from_ours(raw: RawWeights, overrides: Mapping[str, Any]) -> LoadedTimmBackbone:
    """Load a file of ours, or an export."""
    tensors, architecture = dict(raw.tensors), raw.metadata.get("architecture")
    if architecture is None:
        architecture = {name: raw.export[name] for name in ("name", "image_size", "channels")}
        tensors = {f"model.{name}": tensor for name, tensor in tensors.items()}
    model = LoadedTimmBackbone(**{**architecture, "num_classes": 0, **overrides})
    if not model.architecture["num_classes"]:
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("head.")}
    model.load_state_dict(tensors)
    return model


def _from_timm(raw: RawWeights, overrides: Mapping[str, Any]) -> LoadedTimmBackbone:
    """Load a file of a folder of timm, without its classifier; other channels get timm's first kernels."""
    if arguments := raw.hub_config.get("model_args"):
        text = f"{raw.source}: config.json has model_args ({', '.join(arguments)})"
        raise WeightsError(f"{text}, which are not supported")
    stated = raw.hub_config.get("pretrained_cfg") or {}
    channels, *size = stated.get("input_size") or (3, 224, 224)
    model = LoadedTimmBackbone(
        **{"name": raw.hub_config["architecture"], "image_size": size, "channels": channels, **overrides}
    )
    pretrained = model.model.pretrained_cfg
    classifiers = tuple(f"{name}." for name in _names(pretrained.get("classifier")))
    tensors = {name: tensor for name, tensor in raw.tensors.items() if not name.startswith(classifiers)}
    if model.channels != channels:
        from timm.models import adapt_input_conv

        for name in (f"{conv}.weight" for conv in _names(pretrained.get("first_conv"))):
            tensors[name] = adapt_input_conv(model.channels, tensors[name].float())
    model.load_state_dict({f"model.{name}": tensor for name, tensor in tensors.items()})
    return model


def _names(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names or ())
