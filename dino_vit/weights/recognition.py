"""Find out from the tensors which library saved them, and which architecture they belong to."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any

from torch import Tensor

from dino_vit.core.sizes import VIT_SIZES, height_width
from dino_vit.models.positions import Grid
from dino_vit.models.stems import REDUCTION
from dino_vit.models.vit import VisionTransformer
from dino_vit.weights import layouts
from dino_vit.weights.layouts import Layout
from dino_vit.weights.reading import RawWeights, WeightsError

HEADS_OF_WIDTH = {**{size["width"]: size["heads"] for size in VIT_SIZES.values()}, 1536: 24}
HYBRID_ROOT = "patch_embed.backbone.stem.conv.weight"
TIMM_ONLY = ("reg_token", "head.weight", "blocks.0.ls1.gamma", HYBRID_ROOT)
# Transformers with similar names that compute something else: pattern of their names, and what it shows.
UNSUPPORTED = {
    r"(.*\.)?(dist_token|distillation_token)": "a distillation token (DeiT)",
    r"(.*\.)?(norm_pre|pre_layrnorm)\..*": "a normalisation before the first block (CLIP)",
    r"(.*\.)?(rel_pos|relative_position)[^.]*(\..*)?": "relative positions (BEiT, SAM)",
    r"(model\.)?(layer|rope|blocks\.\d+\.gamma_1)(\..*)?": "blocks of another kind (DINOv3, EVA, CaiT)",
    r"(.*\.)?fc_norm\..*": "features that are averaged before they are normalised",
    r"attn_pool\..*": "features that are pooled by attention (SigLIP)",
}
EXACT_GELU = ("gelu", "gelu_python")  # its names in transformers
KNOWN_MODEL_ARGS = {  # of timm folders: shown by the tensors too, or without effect on the features
    "img_size", "patch_size", "in_chans", "num_classes", "embed_dim", "depth", "num_heads", "mlp_ratio",
    "qkv_bias", "init_values", "reg_tokens", "no_embed_class", "global_pool", "dynamic_img_size",
    "drop_rate", "drop_path_rate", "pos_drop_rate", "proj_drop_rate", "attn_drop_rate",
}  # fmt: skip


def recognise(raw: RawWeights, format: str | None = None) -> Layout:
    """Return the layout of the tensors; `format` decides where files of two libraries look the same."""
    if format not in (None, *layouts.FORMATS):
        raise WeightsError(f"format={format!r} is not supported; choose from {', '.join(layouts.FORMATS)}")
    if raw.metadata:
        return layouts.OURS
    _refuse_unsupported(raw)
    names = set(raw.tensors)
    if any(name.endswith("embeddings.cls_token") for name in names):
        layout = _huggingface_layout(names)
    elif "class_token" in names:
        layout = layouts.TORCHVISION
    elif {"cls_token", "pos_embed"} <= names:
        layout = _reference_like_layout(raw, names, format)
    else:
        raise WeightsError(
            f"{raw.source} is not a supported vision transformer (tensors: {', '.join(sorted(names)[:6])}, "
            f"...); supported formats are {', '.join(layouts.FORMATS)}"
        )
    if format not in (None, layout.format):
        raise WeightsError(f"{raw.source} is in the {layout.format} format, not in {format}")
    # A hub folder states what other files leave to the layout's defaults.
    config = raw.hub_config
    statistics = config.get("pretrained_cfg") or {}
    mean = config.get("image_mean", statistics.get("mean"))
    std = config.get("image_std", statistics.get("std"))
    if isinstance(mean, list) and isinstance(std, list):
        layout = replace(layout, normalisation=(tuple(mean), tuple(std)))
    return replace(layout, norm_eps=config.get("layer_norm_eps", layout.norm_eps))


def _refuse_unsupported(raw: RawWeights) -> None:
    """Refuse weights, or a config.json beside them, that our backbone would compute differently."""
    for pattern, what in UNSUPPORTED.items():
        if found := next((name for name in raw.tensors if re.fullmatch(pattern, name)), None):
            raise WeightsError(f"{raw.source} has {what}, which is not supported (tensor {found})")
    activation = raw.hub_config.get("hidden_act", "gelu")
    if activation not in EXACT_GELU:
        raise WeightsError(
            f"{raw.source}: config.json has hidden_act={activation!r}, but only the exact GELU is supported"
        )
    unknown = set(raw.hub_config.get("model_args") or {}) - KNOWN_MODEL_ARGS
    if unknown:
        raise WeightsError(
            f"{raw.source}: config.json has unsupported model_args ({', '.join(sorted(unknown))}), which may "
            "change the features"
        )


def _huggingface_layout(names: set[str]) -> Layout:
    if not any("layer_scale1" in name for name in names):
        return layouts.HF_VIT
    registers = any(name.endswith("embeddings.register_tokens") for name in names)
    return layouts.HF_DINOV2_REGISTERS if registers else layouts.HF_DINOV2


def _reference_like_layout(raw: RawWeights, names: set[str], format: str | None) -> Layout:
    """Distinguish DINO's, DINOv2's, timm's and our own bare state dicts, which share most names."""
    dinov2 = layouts.DINOV2_REGISTERS if "register_tokens" in names else layouts.DINOV2
    chunked = any(re.match(r"blocks\.\d+\.\d+\.", name) for name in names)
    if "mask_token" in names or chunked:
        return dinov2
    choices = {
        "reference": layouts.REFERENCE, "timm": layouts.TIMM, "dino-vit": layouts.OURS, "dinov2": dinov2
    }  # fmt: skip
    if format in choices:
        return choices[format]
    if "register_tokens" in names or any(".mlp.w12." in name for name in names):
        return dinov2
    from_timm = "architecture" in raw.hub_config or any(name in names for name in TIMM_ONLY)
    return layouts.TIMM if from_timm and not raw.trained_with_dino else layouts.REFERENCE


def translate(
    raw: RawWeights, layout: Layout, *, keep_classifier: bool, trained_size: int | Grid | None = None
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors under our names, and notes on what was dropped or converted."""
    dropped: Counter[str] = Counter()
    kept: dict[str, Tensor] = {}
    for theirs, tensor in raw.tensors.items():
        name = layout.to_ours(theirs)
        if name in kept:
            raise WeightsError(f"{raw.source} holds {name} twice, the second time as {theirs}")
        part = next((part for pattern, part in layout.dropped.items() if re.fullmatch(pattern, name)), None)
        if part is None or (part == "classifier" and keep_classifier):
            kept[name] = tensor
        else:
            dropped[part] += 1
    ours = layouts.merge(kept)
    notes = [f"dropped {part} ({count} tensor{'s' * (count > 1)})" for part, count in dropped.items()]
    merged = {name.split(".")[-2] for name in ours.keys() - kept.keys()}
    if "qkv" in merged:
        notes.append("merged separate q, k, v into qkv")
    if "fc1" in merged:
        notes.append("merged separate gate and up projections into fc1")
    positions = ours.get("pos_embed")
    if layout.format == "timm" and positions is not None and _lacks_cls(ours, raw, trained_size):
        ours["pos_embed"] = positions.new_zeros(1, 1 + positions.shape[1], positions.shape[2])
        ours["pos_embed"][:, 1:] = positions
        notes.append("added a zero position for the CLS token, which already includes its own")
    return ours, notes


def _lacks_cls(tensors: Mapping[str, Tensor], raw: RawWeights, trained_size: int | Grid | None) -> bool:
    """Return whether only patches have positions: as many as the grid has cells, or a square number."""
    positions, kernel = tensors["pos_embed"], tensors.get("patch_embed.proj.weight")
    if positions.ndim != 3 or kernel is None or kernel.ndim != 4 or 0 in kernel.shape:
        return False
    count, patch, size = positions.shape[1], kernel.shape[2:], trained_size or _stated_size(raw)
    if size is not None and math.prod(patch_grid(size, patch)) == count - 1:
        return False
    return _find_grid(count, patch, size) is not None


def infer_architecture(
    tensors: Mapping[str, Tensor], layout: Layout, raw: RawWeights, overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Infer the model's arguments from the shapes; `layout` and `overrides` give what no shape shows."""
    if raw.metadata:
        known = raw.metadata["architecture"]
        unknown = sorted(known.keys() - signature(VisionTransformer).parameters.keys())
        if unknown:
            raise WeightsError(f"{raw.source} has unknown architecture settings: {', '.join(unknown)}")
        return {name: tuple(value) if isinstance(value, list) else value for name, value in known.items()}
    try:
        width = tensors["cls_token"].shape[-1]
        stem = _infer_stem(tensors, overrides)
        hidden = tensors["blocks.0.mlp.fc2.weight"].shape[1]
        gated = tensors["blocks.0.mlp.fc1.weight"].shape[0] == 2 * hidden
        positions = tensors["pos_embed"].shape[1] - 1
    except KeyError as error:
        raise WeightsError(f"{raw.source} lacks {error}, which every vision transformer has") from error
    except (IndexError, ValueError, ZeroDivisionError) as error:
        raise WeightsError(f"{raw.source} has a tensor of an impossible shape: {error}") from error
    patch = height_width(stem["patch_size"])
    if 0 in (width, hidden, *patch, stem["channels"]):
        raise WeightsError(f"{raw.source} has an empty tensor in its first block or its patch embedding")
    grid = _infer_grid(positions, patch, raw, overrides.get("trained_size"))
    # Count the blocks instead of taking the highest number: strict loading then names a gap, however large.
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
    if HYBRID_ROOT in tensors:
        root = tensors[HYBRID_ROOT]
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


def _infer_grid(positions: int, patch: Grid, raw: RawWeights, trained_size: int | Grid | None) -> Grid:
    if trained_size is not None and math.prod(patch_grid(trained_size, patch)) != positions:
        rows, columns = patch_grid(trained_size, patch)
        raise WeightsError(
            f"{raw.source} has {positions} positions, but trained_size={trained_size} means "
            f"{rows} × {columns} patches"
        )
    grid = _find_grid(positions, patch, trained_size or _stated_size(raw))
    if grid is None:
        raise WeightsError(
            f"{raw.source} has {positions} positions, which do not form a square; give "
            "trained_size=(height, width) of the training images"
        )
    return grid


def _find_grid(count: int, patch: Sequence[int], size: int | Grid | None) -> Grid | None:
    """Return the grid of that many cells: the one of an image size, if given and if it fits, or a square."""
    if size is not None:
        rows, columns = patch_grid(size, patch)
        if rows * columns == count:
            return rows, columns
    side = math.isqrt(count)
    return (side, side) if side * side == count > 0 else None


def patch_grid(size: int | Grid, patch: Sequence[int]) -> Grid:
    """Return the rows and columns of patches in an image."""
    height, width = height_width(size)
    return height // patch[0], width // patch[1]


def _stated_size(raw: RawWeights) -> Grid | None:
    """Return the image size (height, width) in a hub folder's config.json, or None if it is missing or malformed."""
    timm = raw.hub_config.get("pretrained_cfg") or {}
    size = raw.hub_config.get("image_size") or (timm.get("input_size") or ())[1:]
    try:
        height, width = map(int, height_width(size))
    except (TypeError, ValueError):
        return None
    return height, width


def _infer_heads(width: int, raw: RawWeights, overrides: Mapping[str, Any]) -> int:
    config = raw.hub_config
    stated = config.get("num_attention_heads") or (config.get("model_args") or {}).get("num_heads")
    heads = overrides.get("heads") or stated or HEADS_OF_WIDTH.get(width)
    if heads is None:
        raise WeightsError(f"{raw.source}: no tensor shows the number of heads (width {width}); give heads=")
    return int(heads)
