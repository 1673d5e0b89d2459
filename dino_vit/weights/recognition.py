"""Recognise whose weights some tensors are, and infer the architecture that they belong to.

Weights that our backbone would compute differently are refused.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, get_args

import torch
from torch import Tensor

from dino_vit.config.sections import WeightsFormat
from dino_vit.core import VIT_SIZES, height_width
from dino_vit.core.text import brief
from dino_vit.models.positions import ROTARY_BASE, Grid
from dino_vit.models.vit import ViTConfig
from dino_vit.weights.formats import layouts
from dino_vit.weights.formats.layouts import Layout
from dino_vit.weights.formats.stems import infer_stem
from dino_vit.weights.metadata import OtherArchitecture, WeightsError
from dino_vit.weights.read_file import RawWeights

FORMATS = get_args(WeightsFormat)
HEADS_OF_WIDTH = {**{size["width"]: size["heads"] for size in VIT_SIZES.values()}, 1536: 24}
HEADS_OF_DINOV3 = {1280: 20, 4096: 32}
TRAINED_SIDE = 224  # pixels, of weights that show no size
ROTARY_RESCALE = 2.0  # in DINOv3's training
EXACT_GELU = ("gelu", "gelu_python")  # its names in transformers
KNOWN_MODEL_ARGS = {  # of timm folders: shown by the tensors too, or without effect on the features
    "img_size", "patch_size", "in_chans", "num_classes", "embed_dim", "depth", "num_heads", "mlp_ratio",
    "qkv_bias", "init_values", "reg_tokens", "no_embed_class", "global_pool", "dynamic_img_size",
    "drop_rate", "drop_path_rate", "pos_drop_rate", "proj_drop_rate", "attn_drop_rate",
}  # fmt: skip


def recognise(raw: RawWeights, format: str | None = None) -> Layout:
    """Return the layout of the tensors; `format` decides where files of two libraries look the same."""
    if format not in (None, *FORMATS):
        raise WeightsError(f"format={format!r} is not supported; choose from {', '.join(FORMATS)}")
    if raw.architecture is not None:
        return layouts.OURS
    format = format or raw.facts.get("format")
    layout = next((layout for layout in layouts.LAYOUTS if layout.fits(raw.tensors)), None)
    if raw.facts.get("positions") == "rotary" and format == "timm":
        layout = layouts.TIMM_DINOV3
    if layout is None:
        raise OtherArchitecture(
            f"{raw.source} is not a supported vision transformer ({', '.join(sorted(raw.tensors)[:6])} ...), "
            f"which are {', '.join(FORMATS)}; of another model of timm give the folder with its config.json"
        )
    _refuse_unsupported(raw, layout)
    if layout is layouts.TIMM and raw.trained_with_dino:
        layout = layouts.REFERENCE
    if layout in (layouts.DINOV2_REGISTERS, *layouts.LOOK_ALIKES) and format not in (None, layout.format):
        layout = next((other for other in layouts.LOOK_ALIKES if other.format == format), layout)
    if format not in (None, layout.format):
        raise WeightsError(f"{raw.source} is in the {layout.format} format, not in {format}")
    return layout


def _refuse_unsupported(raw: RawWeights, layout: Layout) -> None:
    """Refuse weights that our backbone would compute differently, although their tensors fit."""
    periods = raw.tensors.get("rope_embed.periods")
    if periods is not None:
        ours = ROTARY_BASE ** (torch.arange(len(periods)) / len(periods))
        if not torch.allclose(periods.float(), ours, rtol=1e-2):  # the files hold them in bfloat16
            raise WeightsError(f"{raw.source} has rotary positions of other periods, which are not supported")
    base = raw.facts.get("rotary_base", ROTARY_BASE)
    activations = ("silu",) if layout is layouts.HF_DINOV3_GATED else EXACT_GELU
    activation = raw.facts.get("activation", activations[0])
    unknown = set(raw.facts.get("model_args", ())) - KNOWN_MODEL_ARGS
    unsupported = {
        f"rope_theta={base}": base != ROTARY_BASE,
        f"hidden_act={brief(activation)}": activation not in activations,
        f"model_args {', '.join(sorted(unknown))}": bool(unknown),
    }
    if faults := [fault for fault, is_present in unsupported.items() if is_present]:
        raise OtherArchitecture(f"{raw.source}: config.json has {', '.join(faults)}, which is not supported")


def infer_architecture(
    tensors: Mapping[str, Tensor],
    layout: Layout,
    raw: RawWeights,
    overrides: Mapping[str, Any],
) -> dict[str, Any]:
    """Infer the model's arguments from the shapes, and from what else is known if no shape shows them."""
    # Count the blocks instead of taking the highest number: strict loading then names a gap, however large.
    depth = len({match[1] for name in tensors if (match := re.match(r"blocks\.(\d+)\.", name))})
    if raw.architecture is not None:
        return {**asdict(ViTConfig()), "depth": depth, **raw.architecture}
    width = tensors["cls_token"].shape[-1]
    hidden = tensors["blocks.0.mlp.fc2.weight"].shape[1]
    gated = tensors["blocks.0.mlp.fc1.weight"].shape[0] == 2 * hidden
    stem = infer_stem(tensors)
    patch = height_width(stem["patch_size"])
    rescale = raw.facts.get("rotary_rescale", ROTARY_RESCALE) or None
    if layout.rotary:
        grid = patch_grid(raw.facts.get("image_size") or TRAINED_SIDE, patch)
    else:
        grid = _infer_grid(tensors["pos_embed"].shape[1], patch, raw, layout)
    masked = any(name.endswith("bias_mask") for name in raw.tensors)  # as in DINOv3's released files
    biases = [tensor.chunk(3)[1] for name, tensor in tensors.items() if name.endswith("attn.qkv.bias")]
    key_bias = layout.rotary and not masked and any(bias.any() for bias in biases)
    return {
        "positions": "rotary" if layout.rotary else raw.facts.get("positions", "learned"),
        "rotary_rescale": rescale if layout.rotary else None,
        **stem,
        "image_size": (grid[0] * patch[0], grid[1] * patch[1]),
        "width": width,
        "depth": depth,
        "heads": _infer_heads(width, raw, layout, overrides),
        "mlp": "swiglu" if gated else "gelu",
        "mlp_ratio": hidden / width,
        "num_classes": len(tensors["head.weight"]) if "head.weight" in tensors else 0,
        "position_mode": layout.position_mode,
        "registers": tensors["register_tokens"].shape[1] if "register_tokens" in tensors else 0,
        "qkv_bias": "blocks.0.attn.qkv.bias" in tensors,
        "key_bias": key_bias or None,
        "layer_scale": 1.0 if "blocks.0.ls1.gamma" in tensors else None,
        "norm_eps": raw.facts.get("norm_eps", layout.norm_eps),
    }


def _infer_grid(positions: int, patch: Grid, raw: RawWeights, layout: Layout) -> Grid:
    """Return the grid of the positions: that of the training images if known and if it fits, or a square."""
    size = raw.facts.get("image_size")
    stated = patch_grid(size, patch) if size else None
    # In timm's files the CLS token may have no position.
    counts = (positions - 1, positions) if layout.format == "timm" else (positions - 1,)
    if stated and math.prod(stated) in counts:
        return stated
    for count in counts:
        if (side := math.isqrt(max(count, 0))) and side * side == count:
            return side, side
    raise OtherArchitecture(
        f"{raw.source} has {counts[0]} positions, which do not form a square; give the folder that has the "
        "config.json of these weights, which says the size of the training images"
    )


def patch_grid(size: int | Grid, patch: Sequence[int]) -> Grid:
    """Return the rows and columns of patches in an image."""
    height, width = height_width(size)
    return height // patch[0], width // patch[1]


def _infer_heads(width: int, raw: RawWeights, layout: Layout, overrides: Mapping[str, Any]) -> int:
    usual = HEADS_OF_WIDTH | (HEADS_OF_DINOV3 if layout.rotary else {})
    heads = overrides.get("heads") or raw.facts.get("heads") or usual.get(width)
    if heads is None:
        raise OtherArchitecture(
            f"{raw.source}: no tensor shows the number of heads (width {width}); in Python "
            "load_backbone takes heads=N, and save_backbone writes a file that states it"
        )
    return int(heads)
