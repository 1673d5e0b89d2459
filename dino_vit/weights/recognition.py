"""Whose weights are these, and which architecture do they belong to: answered by the tensors themselves."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from inspect import signature
from typing import Any

from torch import Tensor

from dino_vit.core.sizes import height_width
from dino_vit.models.positions import Grid
from dino_vit.models.stems import REDUCTION
from dino_vit.models.vit import VisionTransformer
from dino_vit.weights import layouts
from dino_vit.weights.foreign import refuse_foreign
from dino_vit.weights.layouts import Layout
from dino_vit.weights.reading import RawWeights, WeightsError

HEADS_OF_WIDTH = {192: 3, 384: 6, 768: 12, 1024: 16, 1280: 16, 1536: 24}


def recognise(raw: RawWeights, format: str | None = None) -> Layout:
    """Return the layout of the tensors; `format` decides where files of two kinds look the same."""
    if format is not None and format not in layouts.FORMATS:
        raise WeightsError(f"format={format!r} is none of {', '.join(layouts.FORMATS)}")
    if raw.metadata:
        return layouts.OURS
    names = set(raw.tensors)
    layout: Layout
    if any(name.endswith("embeddings.cls_token") for name in names):
        layout = _huggingface(names)
    elif "class_token" in names:
        layout = layouts.TORCHVISION
    elif {"cls_token", "pos_embed"} <= names:
        layout = _reference_family(raw, names, format)
    else:
        refuse_foreign(raw)
        shown = ", ".join(sorted(names)[:6])
        raise WeightsError(
            f"{raw.source} holds {len(names)} tensors of no vision transformer that is known here "
            f"({shown}, ...); known are {', '.join(layouts.FORMATS)}"
        )
    refuse_foreign(raw)
    if format not in (None, layout.format):
        raise WeightsError(f"{raw.source} is in the {layout.format} format, not in {format}")
    return _with_hub_config(layout, raw.hub_config)


def _huggingface(names: set[str]) -> Layout:
    bare = {layouts.HF_PREFIX.sub("", name, count=1) for name in names}
    if not any("layer_scale1" in name for name in bare):
        return layouts.HF_VIT
    return layouts.HF_DINOV2_REGISTERS if "embeddings.register_tokens" in bare else layouts.HF_DINOV2


def _reference_family(raw: RawWeights, names: set[str], format: str | None) -> Layout:
    """Tell DINO's, DINOv2's, timm's and our own bare state dicts apart, which share their names."""
    by_format = {"reference": layouts.REFERENCE, "timm": layouts.TIMM, "dino-vit": layouts.OURS}
    chunked = any(re.match(r"blocks\.\d+\.\d+\.", name) for name in names)
    if "mask_token" in names or chunked:
        return layouts.DINOV2_REGISTERS if "register_tokens" in names else layouts.DINOV2
    if format in by_format:
        return by_format[format]
    if format == "dinov2" or "register_tokens" in names or any(".mlp.w12." in name for name in names):
        return layouts.DINOV2_REGISTERS if "register_tokens" in names else layouts.DINOV2
    timm_alone = ("reg_token", "head.weight", "blocks.0.ls1.gamma", "patch_embed.backbone.stem.conv.weight")
    if not raw.trained_with_dino and (
        "architecture" in raw.hub_config or any(name in names for name in timm_alone)
    ):
        return layouts.TIMM
    return layouts.REFERENCE


def _with_hub_config(layout: Layout, config: Mapping[str, Any]) -> Layout:
    """Add what config.json and preprocessor_config.json say to what the layout assumes."""
    statistics = config.get("pretrained_cfg") or {}
    mean = config.get("image_mean", statistics.get("mean"))
    std = config.get("image_std", statistics.get("std"))
    if isinstance(mean, list) and isinstance(std, list):
        layout = replace(layout, normalisation=(tuple(mean), tuple(std)))
    return replace(layout, norm_eps=config.get("layer_norm_eps", layout.norm_eps))


def translate(
    raw: RawWeights, layout: Layout, *, keep_classifier: bool, trained_size: int | Grid | None = None
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors under our names, and notes on what was left out or converted."""
    left_out: dict[str, int] = {}
    ours: dict[str, Tensor] = {}
    for theirs, tensor in raw.tensors.items():
        name = theirs
        if layout.format == "huggingface":
            name = layouts.HF_PREFIX.sub("", name, count=1)
        elif layout.format == "dinov2":
            name = re.sub(r"^blocks\.\d+\.(\d+)\.", r"blocks.\1.", name)
        translated = layout.to_ours(name)
        if translated in ours:
            raise WeightsError(f"{raw.source} holds {translated} twice, the second time as {theirs}")
        what = _left_out_as(name, translated, layout)
        if what is None or (what == "classifier" and keep_classifier):
            ours[translated] = tensor
        else:
            left_out[what] = left_out.get(what, 0) + 1
    fused = layouts.fuse(ours)
    notes = [f"left out {what} ({count} tensors)" for what, count in left_out.items()]
    if len(fused) != len(ours):
        notes.append("fused what is kept apart (queries, keys, values)")
    positions = fused.get("pos_embed")
    if layout.format == "timm" and positions is not None and _lacks_cls(positions, fused, raw, trained_size):
        fused["pos_embed"] = positions.new_zeros(1, 1 + positions.shape[1], positions.shape[2])
        fused["pos_embed"][:, 1:] = positions
        notes.append("added a zero CLS position, as it is folded into the CLS token")
    return fused, notes


def _lacks_cls(
    positions: Tensor, tensors: Mapping[str, Tensor], raw: RawWeights, trained_size: int | Grid | None
) -> bool:
    """Tell whether positions are those of the patches alone: as many as the grid has, or a square number."""
    kernel = tensors.get("patch_embed.proj.weight")
    if positions.ndim != 3 or kernel is None or kernel.ndim != 4:
        return False
    count = positions.shape[1]
    size = trained_size or _stated_size(raw)
    if size is not None and "patch_embed.backbone.stem.conv.weight" not in tensors:
        height, width = height_width(size)
        patches = (height // kernel.shape[2]) * (width // kernel.shape[3])
        if count in (patches, patches + 1):
            return count == patches
    return math.isqrt(count) ** 2 == count


def _left_out_as(theirs: str, ours: str, layout: Layout) -> str | None:
    """Return what a tensor that is no part of a backbone is, or None for one that is."""
    for pattern, what in layout.left_out.items():
        if re.fullmatch(pattern, theirs) or re.fullmatch(pattern, ours):
            return what
    return None


def infer_architecture(
    tensors: Mapping[str, Tensor], layout: Layout, raw: RawWeights, overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Read the constructor's keywords off the shapes; what none shows comes from layout or overrides."""
    if raw.metadata:
        known = raw.metadata["architecture"]
        strange = sorted(known.keys() - signature(VisionTransformer).parameters.keys())
        if strange:
            raise WeightsError(
                f"{raw.source} is of an architecture that is not known here: {', '.join(strange)}"
            )
        return {name: tuple(value) if isinstance(value, list) else value for name, value in known.items()}
    try:
        width = tensors["cls_token"].shape[-1]
        stem = _infer_stem(tensors, overrides)
        hidden = tensors["blocks.0.mlp.fc2.weight"].shape[1]
        gated = tensors["blocks.0.mlp.fc1.weight"].shape[0] == 2 * hidden
        positions = tensors["pos_embed"].shape[1] - 1
    except KeyError as error:
        raise WeightsError(
            f"{raw.source} lacks a tensor that every vision transformer has: {error}"
        ) from error
    except (IndexError, ValueError, ZeroDivisionError) as error:
        raise WeightsError(f"{raw.source} has a tensor of a shape that no vision transformer has") from error
    patch = height_width(stem["patch_size"])
    if 0 in (width, hidden, *patch, stem["channels"]):
        raise WeightsError(f"{raw.source} has an empty tensor where a block or the patches should be")
    grid = _infer_grid(positions, patch, raw, overrides)
    # As many as there are, not as high as they are numbered: a gap is then named, however high it reaches.
    blocks = {match[1] for name in tensors if (match := re.match(r"blocks\.(\d+)\.", name))}
    return {
        **stem,
        "image_size": (grid[0] * patch[0], grid[1] * patch[1]),
        "width": width,
        "depth": len(blocks),
        "heads": _infer_heads(width, raw, overrides),
        "mlp": "swiglu" if gated else "gelu",
        "mlp_ratio": hidden / width,
        "num_classes": len(tensors["head.weight"]) if "head.weight" in tensors else 0,
        "position_mode": layout.position_mode,
        "registers": tensors["register_tokens"].shape[1] if "register_tokens" in tensors else 0,
        "qkv_bias": "blocks.0.attn.qkv.bias" in tensors,
        "layer_scale": 1.0 if "blocks.0.ls1.gamma" in tensors else None,
        "norm_eps": layout.norm_eps,
    }


def _infer_stem(tensors: Mapping[str, Tensor], overrides: Mapping[str, Any]) -> dict[str, Any]:
    kernel = tensors["patch_embed.proj.weight"]
    if "patch_embed.backbone.stem.conv.weight" in tensors:
        root = tensors["patch_embed.backbone.stem.conv.weight"]
        found = [re.match(r"patch_embed\.backbone\.stages\.(\d)\.blocks\.(\d+)\.", name) for name in tensors]
        layers = [max(int(m[2]) for m in found if m and int(m[1]) == stage) + 1 for stage in range(3)]
        patch = (kernel.shape[2] * REDUCTION, kernel.shape[3] * REDUCTION)
        resnet = {"resnet_layers": tuple(layers), "resnet_width": root.shape[0]}
        return {"stem": "hybrid", "channels": root.shape[1], "patch_size": patch, **resnet}
    if kernel.ndim == 4:
        return {"stem": "conv", "channels": kernel.shape[1], "patch_size": tuple(kernel.shape[2:])}
    channels = overrides.get("channels", 3)
    side = math.isqrt(kernel.shape[1] // channels)
    return {"stem": "unfold", "channels": channels, "patch_size": overrides.get("patch_size", (side, side))}


def _infer_grid(positions: int, patch: Grid, raw: RawWeights, overrides: Mapping[str, Any]) -> Grid:
    """Return the trained grid, which is square unless the user says at which size it was trained."""
    if overrides.get("trained_size") is not None:
        height, width = height_width(overrides["trained_size"])
        grid = (height // patch[0], width // patch[1])
        if grid[0] * grid[1] != positions:
            raise WeightsError(
                f"{raw.source} has {positions} positions, but trained_size={overrides['trained_size']} means "
                f"{grid[0]} × {grid[1]} patches"
            )
        return grid
    if (stated := _stated_size(raw)) is not None:
        grid = (stated[0] // patch[0], stated[1] // patch[1])
        if grid[0] * grid[1] == positions:
            return grid
    side = math.isqrt(positions)
    if side * side != positions or not positions:
        raise WeightsError(
            f"{raw.source} has {positions} positions, which is no square; give the trained_size=(height, "
            "width) of the images that it learned from"
        )
    return side, side


def _stated_size(raw: RawWeights) -> Grid | None:
    """Return the image size (height, width) that config.json of a hub folder states, if it states one."""
    timm = raw.hub_config.get("pretrained_cfg") or {}
    size = raw.hub_config.get("image_size") or (timm.get("input_size") or ())[1:]
    try:
        height, width = height_width(tuple(size) if isinstance(size, list) else size)
    except (TypeError, ValueError):
        return None
    return height, width


def _infer_heads(width: int, raw: RawWeights, overrides: Mapping[str, Any]) -> int:
    config = raw.hub_config
    stated = config.get("num_attention_heads") or (config.get("model_args") or {}).get("num_heads")
    heads = overrides.get("heads") or stated or HEADS_OF_WIDTH.get(width)
    if heads is None:
        raise WeightsError(
            f"{raw.source} has a width of {width}, and no tensor shows how many heads share it; give heads="
        )
    return int(heads)
