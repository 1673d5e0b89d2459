"""Recognise whose weights some tensors are, and refuse those that our backbone would compute differently."""

import re
from dataclasses import replace

import torch

from dino_vit.core.text import brief
from dino_vit.models.positions import ROTARY_BASE
from dino_vit.weights.layouts import (
    DINOV2_REGISTERS,
    HF_DINOV3_GATED,
    LAYOUTS,
    LOOK_ALIKES,
    OURS,
    REFERENCE,
    TIMM,
    TIMM_DINOV3,
    Layout,
)
from dino_vit.weights.metadata import WeightsError
from dino_vit.weights.reading import RawWeights

FORMATS = ("dino-vit", "reference", "timm", "torchvision", "huggingface", "dinov2", "dinov3")
# Transformers with similar names that compute something else: pattern of their names, and what it shows.
UNSUPPORTED = {
    r"(.*\.)?(dist_token|distillation_token)": "a distillation token (DeiT)",
    r"(.*\.)?(norm_pre|pre_layrnorm)\..*": "a normalisation before the first block (CLIP)",
    r"(.*\.)?(rel_pos|relative_position)[^.]*(\..*)?": "relative positions (BEiT, SAM)",
    r"(model\.)?(layer|rope|blocks\.\d+\.gamma_1)(\..*)?": "blocks of another kind (EVA, CaiT)",
    r"local_cls_norm\..*": "a norm of its own for the CLS token (DINOv3 7B)",
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
    if format not in (None, *FORMATS):
        raise WeightsError(f"format={format!r} is not supported; choose from {', '.join(FORMATS)}")
    if raw.metadata:
        return OURS
    format = format or raw.export.get("format")
    layout = next((layout for layout in LAYOUTS if layout.fits(raw.tensors)), None)
    if raw.export.get("positions") == "rotary" and raw.export["format"] == "timm":
        layout = TIMM_DINOV3
    _refuse_unsupported(raw, layout)
    if layout is None:
        raise WeightsError(
            f"{raw.source} is not a supported vision transformer (tensors: "
            f"{', '.join(sorted(raw.tensors)[:6])}, ...); supported formats are {', '.join(FORMATS)}"
        )
    if layout in (DINOV2_REGISTERS, *LOOK_ALIKES):
        layout = _of_look_alikes(raw, layout, format)
    if format not in (None, layout.format):
        raise WeightsError(f"{raw.source} is in the {layout.format} format, not in {format}")
    # A hub folder states what other files leave to the layout's defaults.
    layout = replace(layout, normalisation=stated_normalisation(raw) or layout.normalisation)
    return replace(layout, norm_eps=raw.hub_config.get("layer_norm_eps", layout.norm_eps))


def _of_look_alikes(raw: RawWeights, layout: Layout, format: str | None) -> Layout:
    """Distinguish DINO's, DINOv2's, timm's and our own bare state dicts, which share most names."""
    if format is None and "architecture" in raw.hub_config:
        format = "timm"
    if layout is TIMM and raw.trained_with_dino:
        layout = REFERENCE
    if format in (None, layout.format):
        return layout
    return next((other for other in LOOK_ALIKES if other.format == format), layout)


def stated_normalisation(raw: RawWeights) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Return the mean and std that the config.json of a hub folder states."""
    statistics = raw.hub_config.get("pretrained_cfg") or {}
    mean = raw.hub_config.get("image_mean", statistics.get("mean"))
    std = raw.hub_config.get("image_std", statistics.get("std"))
    return (tuple(mean), tuple(std)) if isinstance(mean, list) and isinstance(std, list) else None


def _check_rotary(raw: RawWeights) -> None:
    """Refuse learned positions, rotations of other periods, and keys with a bias."""
    if "pos_embed" in raw.tensors:
        raise WeightsError(f"{raw.source} has learned positions beside rotary ones, which is not supported")
    periods = raw.tensors.get("rope_embed.periods")
    if periods is not None:
        ours = ROTARY_BASE ** (torch.arange(len(periods)) / len(periods))
        if not torch.allclose(periods.float(), ours, rtol=1e-2):  # the files hold them in bfloat16
            raise WeightsError(f"{raw.source} has rotary positions of other periods, which are not supported")
    for name, tensor in raw.tensors.items():
        bias = tensor if name.endswith((".k_proj.bias", ".attn.k_bias")) else None
        if name.endswith(".qkv.bias") and f"{name}_mask" not in raw.tensors:
            bias = tensor.chunk(3)[1]
        if bias is not None and bias.any():
            raise WeightsError(f"{raw.source} has keys with a bias ({name}), which is not supported")


def _refuse_unsupported(raw: RawWeights, layout: Layout | None) -> None:
    """Refuse weights, or a config.json beside them, that our backbone would compute differently."""
    for pattern, what in UNSUPPORTED.items():
        name = next((name for name in raw.tensors if re.fullmatch(pattern, name)), None)
        if name and (layout is None or layout.to_ours(name) == name):
            raise WeightsError(f"{raw.source} has {what}, which is not supported (tensor {name})")
    stated = raw.hub_config.get("rope_parameters") or raw.hub_config
    if (base := stated.get("rope_theta", ROTARY_BASE)) != ROTARY_BASE:
        raise WeightsError(
            f"{raw.source}: config.json has rope_theta={base}, but only {ROTARY_BASE:g} is supported"
        )
    if layout and layout.rotary:
        _check_rotary(raw)
    activations = ("silu",) if layout is HF_DINOV3_GATED else EXACT_GELU
    activation = raw.hub_config.get("hidden_act", activations[0])
    if activation not in activations:
        raise WeightsError(
            f"{raw.source}: config.json has hidden_act={brief(activation)}, but only the exact GELU is "
            "supported"
        )
    unknown = set(raw.hub_config.get("model_args") or {}) - KNOWN_MODEL_ARGS
    if unknown:
        raise WeightsError(
            f"{raw.source}: config.json has unsupported model_args ({', '.join(sorted(unknown))}), which may "
            "change the features"
        )
