"""Load a backbone: strictly, and logging in one line what was loaded and converted."""

import logging
import math
import re
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor

from dino_vit.config.sections import BASELINES
from dino_vit.config.settings import ConfigError
from dino_vit.core import height_width, log
from dino_vit.core.text import brief, log_shown, plural
from dino_vit.models.backbone import Provenance
from dino_vit.models.positions import interpolate_pos_embs
from dino_vit.models.stems import FIRST_KERNEL, inflate
from dino_vit.models.timm_backbone import TimmConfig
from dino_vit.models.vit import ViTConfig
from dino_vit.weights.backbones import (
    LoadedBackbone,
    LoadedBaseline,
    LoadedTimmBackbone,
    LoadedTransformer,
)
from dino_vit.weights.formats.layouts import OURS, REFERENCE, TIMM, Layout, merge
from dino_vit.weights.metadata import OtherArchitecture, WeightsError
from dino_vit.weights.read_file import PROVENANCE_FACTS, RawWeights, check_finite, read_weights
from dino_vit.weights.recognition import infer_architecture, patch_grid, recognise

LOOKS_LIKE_TIMM = "taken for DINO's, with a guess at mean and std: files of timm look the same (format=timm)"
LARGER, UNSAVED = 2, 10**7  # a model of timm may hold some numbers that its files do not


def load_backbone(
    source: str | Path | Mapping[str, Any],
    *,
    network: str = "teacher",
    format: str | None = None,
    verbose: bool = True,
    **overrides: Any,
) -> LoadedBackbone:
    """Return the backbone of a run folder, a hub folder, a file or a dict, in evaluation mode.

    Names work too: `hf:OWNER/NAME` of the Hugging Face Hub, `timm:NAME` of timm's models there, and the
    baselines `pixels` and `edges`, which have no weights.
    `network` selects the teacher or the student of a training checkpoint; `format` decides where files of
    DINO and of timm look alike; `verbose` shows what was loaded and converted. Any keyword of
    `VisionTransformer` overrides what the tensors show: another `image_size` resamples the positions, other
    `channels` inflate the patch embedding, `num_classes` keeps the classifier.
    """
    parameters = [field.name for field in fields(ViTConfig)]
    if unknown := [name for name in overrides if name not in parameters]:
        raise TypeError(f"load_backbone() has no argument {unknown[0]!r}, but {', '.join(parameters)}")
    raw = read_weights(source, network)
    try:
        layout, model, notes = _load(raw, format, overrides)
    except WeightsError:
        raise
    except (TypeError, ValueError, RuntimeError, ArithmeticError, IndexError) as error:
        problems = brief("; ".join(error.problems) if isinstance(error, ConfigError) else error, 500)
        raise WeightsError(f"{raw.source} describes a network that cannot be built: {problems}") from error
    origin = _provenance(raw, layout, model)
    if "image_size" in overrides:
        stated = {key: value for key, value in origin.preparation.items() if key != "shorter_side"}
        origin = replace(origin, size=None, preparation=stated)
    crop, side = origin.size or model.image_size, origin.preparation.get("shorter_side")
    if side is not None and side < max(crop):
        text = f"{raw.source} states a shorter_side of {side} pixels, less than its crop"
        raise WeightsError(f"{text} of {crop[0]} × {crop[1]}")
    model.provenance = origin
    if verbose and raw.tensors:
        loaded = f"loaded {len(model.state_dict())} tensors"
        facts = f"{origin.format}, {origin.network or 'backbone'}, sha256 {origin.sha256[:12]}"
        # Python hides the line in a program that has set no level.
        with log_shown() if log.level == logging.NOTSET else nullcontext():
            log.info("%s: %s", raw.source, "; ".join([f"{loaded} ({facts})", *notes]))
    return model.eval()


def _load(
    raw: RawWeights, format: str | None, overrides: Mapping[str, Any]
) -> tuple[Layout, LoadedBackbone, list[str]]:
    """Return the layout, the backbone, as our transformer or else as timm builds it, and notes on it."""
    stated = raw.facts if raw.architecture is None else raw.architecture
    if "name" not in stated:
        try:
            layout = recognise(raw, format)
            model, notes = _load_transformer(raw, layout, overrides)
            if layout is REFERENCE and not (raw.trained_with_dino or format or "format" in raw.facts):
                notes.append(LOOKS_LIKE_TIMM)
            return layout, model, notes
        except OtherArchitecture:
            if "timm_name" not in raw.facts:
                raise
    if stated.get("name") in BASELINES:
        return OURS, LoadedBaseline(**{**stated, **overrides}), []
    backbone, notes = _load_timm(raw, overrides)
    return TIMM if raw.architecture is None else OURS, backbone, notes


def _load_transformer(
    raw: RawWeights, layout: Layout, overrides: Mapping[str, Any]
) -> tuple[LoadedTransformer, list[str]]:
    """Return a vision transformer with its weights, and notes on what was converted."""
    asked = {"num_classes": "classifier", "mask_token": "mask token"}
    tensors, notes = _translate(raw, layout, {part for key, part in asked.items() if overrides.get(key)})
    try:
        stored = infer_architecture(tensors, layout, raw, overrides)
        wanted = {**stored, "num_classes": 0, **overrides}  # no classifier unless it is asked for
        with torch.device("meta"):
            model = LoadedTransformer(**wanted)
    except KeyError as error:
        raise OtherArchitecture(f"{raw.source} lacks {error}, which every vision transformer has") from error
    _load_strictly(model, _adapt(tensors, stored, wanted, raw.source, notes), raw.source)
    return model, notes


def _load_strictly(model: LoadedBackbone, tensors: Mapping[str, Tensor], source: str) -> None:
    try:
        model.load_state_dict(tensors, assign=model.device.type == "meta")
    except RuntimeError as error:
        # torch has a line for all that is missing, one for all that is unexpected, one for each other shape.
        facts = " ".join(shorten(line, 200, placeholder=" ...") for line in str(error).splitlines()[1:5])
        raise OtherArchitecture(f"{source} does not fit its architecture: {facts}") from error


def _adapt(
    tensors: Mapping[str, Tensor],
    stored: Mapping[str, Any],
    wanted: Mapping[str, Any],
    source: str,
    notes: list[str],
) -> dict[str, Tensor]:
    """Return the tensors in float32, resampled and inflated to the wanted size and channels; add notes."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            text = f"{source}: {name} is {tensor.dtype}; weights must be floating-point numbers"
            raise OtherArchitecture(text)
    if converted := {str(tensor.dtype) for tensor in tensors.values()} - {"torch.float32"}:
        notes.append(f"converted {', '.join(sorted(converted))} to float32")
    adapted = {name: tensor.to(torch.float32, copy=True).contiguous() for name, tensor in tensors.items()}
    check_finite(adapted, source)
    patch = height_width(stored["patch_size"])
    old, new = (patch_grid(architecture["image_size"], patch) for architecture in (stored, wanted))
    positions = adapted.get("pos_embed")
    if positions is not None and positions.shape[1] == math.prod(old):
        adapted["pos_embed"] = torch.cat([torch.zeros_like(positions[:, :1]), positions], dim=1)
        notes.append("added a zero position for the CLS token, which already includes its own")
    if positions is not None and old != new:
        mode = wanted["position_mode"]
        adapted["pos_embed"] = interpolate_pos_embs(adapted["pos_embed"], new, trained_grid=old, mode=mode)
        notes.append(f"resampled positions from {old[0]} × {old[1]} to {new[0]} × {new[1]} (mode {mode})")
    if not stored["registers"]:
        adapted.pop("register_tokens", None)  # empty, in Hugging Face's DINOv3
    if not wanted.get("mask_token"):
        adapted.pop("mask_token", None)
    elif "mask_token" in adapted:
        adapted["mask_token"] = adapted["mask_token"].reshape(1, -1)
    else:
        adapted["mask_token"] = torch.zeros(1, wanted["width"])
        notes.append("added a mask token of zeros")
    before, channels = stored["channels"], wanted["channels"]
    if before != channels:
        first = FIRST_KERNEL[stored["stem"]]
        adapted[first] = inflate(adapted[first], channels)
        notes.append(f"inflated patch embedding from {before} to {channels} channels")
    return adapted


def _provenance(raw: RawWeights, layout: Layout, model: LoadedBackbone) -> Provenance:
    facts = raw.facts
    if raw.architecture is None and layout.normalisation:
        facts = {**dict(zip(("mean", "std"), layout.normalisation, strict=True)), **facts}
    stated = {name: facts[name] for name in (*PROVENANCE_FACTS, "config") if facts.get(name) is not None}
    if len(stated.get("mean", ())) != model.channels:  # the statistics are those of other channels
        stated = {name: value for name, value in stated.items() if name not in ("mean", "std")}
    network = {"network": raw.network} if raw.network else {}
    return Provenance(layout.format, raw.source, raw.sha256, **{**stated, **network})


def _translate(raw: RawWeights, layout: Layout, asked: set[str]) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors under our names, and notes on what was dropped."""
    dropped: Counter[str] = Counter()
    kept: dict[str, Tensor] = {}
    for theirs, tensor in raw.tensors.items():
        name = layout.to_ours(theirs)
        if name in kept:
            raise WeightsError(f"{raw.source} holds {name} twice, the second time as {theirs}")
        part = next((part for pattern, part in layout.dropped.items() if re.fullmatch(pattern, name)), None)
        if part is None or part in asked:
            kept[name] = tensor
        else:
            dropped[part] += 1
    notes = [f"dropped {part} ({plural(count, 'tensor')})" for part, count in dropped.items()]
    return merge(kept, key_bias=not layout.rotary), notes


def _load_timm(raw: RawWeights, overrides: Mapping[str, Any]) -> tuple[LoadedTimmBackbone, list[str]]:
    """Return a model of timm with its weights; other channels get kernels as timm makes them."""
    _refuse_unknown(raw.source, overrides)
    facts, tensors = raw.facts, raw.tensors
    if changed := facts.get("model_args"):
        text = f"{raw.source}: config.json has model_args ({', '.join(changed)})"
        raise WeightsError(f"{text}, which are not supported")
    if raw.architecture is not None:
        stated = {"image_size": 224, "channels": 3, **raw.architecture}
    else:
        stated = {"name": facts.get("name") or facts["timm_name"]}
        stated |= {"image_size": facts.get("image_size") or 224, "channels": facts.get("channels", 3)}
        tensors = {f"model.{name}": tensor for name, tensor in tensors.items()}
    check_finite({name: t for name, t in tensors.items() if t.is_floating_point()}, raw.source)
    _check_size(stated, raw)
    # A model that is built draws its weights, which the caller's random numbers must not notice.
    with torch.random.fork_rng(devices=[]):
        model = LoadedTimmBackbone(**{**stated, "num_classes": 0, **overrides})
    pretrained, wanted, notes = model.model.pretrained_cfg, model.state_dict(), [f"{model.name} of timm"]
    classifiers = ("head.", *(f"model.{name}." for name in _names(pretrained.get("classifier"))))
    tensors = {n: tensor for n, tensor in tensors.items() if n in wanted or not n.startswith(classifiers)}
    if model.channels != stated["channels"]:
        from timm.models import adapt_input_conv

        for name in (f"model.{conv}.weight" for conv in _names(pretrained.get("first_conv"))):
            tensors[name] = adapt_input_conv(model.channels, tensors[name].float())
        notes.append(f"converted {stated['channels']} channels to {model.channels} as timm does")
    other = [name for name in tensors if name in wanted and tensors[name].shape != wanted[name].shape]
    convert = getattr(sys.modules[type(model.model).__module__], "checkpoint_filter_fn", None)
    if other and convert and model.image_size != height_width(stated["image_size"]):
        theirs = {name.removeprefix("model."): tensors[name] for name in tensors if name.startswith("model.")}
        tensors |= {f"model.{name}": tensor for name, tensor in convert(theirs, model.model).items()}
        notes.append(f"resampled {', '.join(other)} to another size as timm does")
    _load_strictly(model, tensors, raw.source)
    return model, notes


def _refuse_unknown(source: str, overrides: Mapping[str, Any]) -> None:
    """Refuse arguments that a model of timm has not."""
    if unknown := overrides.keys() - {field.name for field in fields(TimmConfig)}:
        names = ", ".join(sorted(unknown))
        advice = "; set loss.patch_weight=0" if "mask_token" in unknown else ""
        raise WeightsError(f"{source} is a model of timm, which has no {names}{advice}")


def _check_size(stated: Mapping[str, Any], raw: RawWeights) -> None:
    """Refuse a model of timm that is far larger, as it is stated, than the tensors that are there."""
    with torch.device("meta"):
        model = LoadedTimmBackbone(**{**stated, "num_classes": 0})
    needed = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    held = sum(tensor.numel() for tensor in raw.tensors.values())
    if needed > LARGER * held + UNSAVED:
        text = f"{raw.source} describes a network of {needed:,} numbers, but has {held:,}"
        raise WeightsError(f"{text}: its image_size or channels are not those of its tensors")


def _names(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names or ())
