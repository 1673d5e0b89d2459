"""A backbone in the terms of another library: what that lacks, and our tensors under its names."""

import torch
from torch import Tensor, nn

from dino_vit.models.backbone import Backbone
from dino_vit.models.timm_backbone import TimmBackbone
from dino_vit.models.vit import ViTConfig
from dino_vit.weights.formats import layouts
from dino_vit.weights.formats.builders import dinov2_mlp
from dino_vit.weights.formats.layouts import Layout, split
from dino_vit.weights.metadata import WeightsError


def check_architecture(model: Backbone, format: str) -> None:
    """Refuse an architecture that the other library does not have."""
    if isinstance(model, TimmBackbone):
        if format != "timm":
            raise WeightsError(f"{model.name} of timm is written as timm or onnx, not as {format}")
        return
    a, layout = model.architecture, layout_of(model, format)
    faults = [f"{key}={a[key]}" for key in layout.lacks if a[key] != getattr(ViTConfig, key)]
    if a["stem"] == "conv" and len({*model.patch_size}) > 1:
        faults.append("stem=conv with patches that are not square")
    if a["positions"] == "rotary" and not layout.rotary:
        faults.append("positions=rotary")
    if a["positions"] == "rotary" and a["key_bias"]:
        faults.append("key_bias=True")
    is_square = len({*model.patch_size}) == len({*model.image_size}) == 1
    if format in ("huggingface", "reference") and not is_square:
        faults.append("non-square images or patches")
    if format == "huggingface":
        if layout.rotary and a["layer_scale"] is None:
            faults.append("positions=rotary without layer_scale")
        dinov2 = layout in (layouts.HF_DINOV2, layouts.HF_DINOV2_REGISTERS)
        if dinov2 and round(model.width * a["mlp_ratio"]) != dinov2_mlp(model)[1]:
            faults.append(f"mlp_ratio={a['mlp_ratio']:.3g}")
    if faults:
        text = f"the {format} format does not support {', '.join(faults)}"
        if "stem=conv" in faults:
            text += "; export to timm or onnx, or train with model.stem=patch (recipe=auto may choose conv)"
        raise WeightsError(text)


def layout_of(model: Backbone, format: str) -> Layout:
    a = model.architecture
    rotary, gated = a["positions"] == "rotary", a["mlp"] == "swiglu"
    if format == "reference":
        return layouts.REFERENCE
    if format == "timm":
        return layouts.TIMM_DINOV3 if rotary else layouts.TIMM
    if rotary:
        return layouts.HF_DINOV3_GATED if gated else layouts.HF_DINOV3
    if a["layer_scale"] is None:
        return layouts.HF_VIT
    return layouts.HF_DINOV2_REGISTERS if model.registers else layouts.HF_DINOV2


def contiguous_state_dict(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}


def to_layout(model: Backbone, layout: Layout) -> dict[str, Tensor]:
    """Return the tensors of a vision transformer as another library stores them."""
    tensors = contiguous_state_dict(model)
    huggingface, gated = layout.format == "huggingface", model.architecture["mlp"] == "swiglu"
    if layout is layouts.TIMM and model.registers:  # its models with registers have no position for CLS
        tensors["cls_token"] = tensors["cls_token"] + tensors["pos_embed"][:, :1]
        tensors["pos_embed"] = tensors["pos_embed"][:, 1:].contiguous()
    if huggingface or layout.rotary:
        split(tensors, "attn.qkv.bias", ("attn.q.bias", "attn.k.bias", "attn.v.bias"))
    if huggingface:
        split(tensors, "attn.qkv.weight", ("attn.q.weight", "attn.k.weight", "attn.v.weight"))
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("head.")}
    if layout.rotary:
        tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("attn.k.bias")}
    if layout.rotary and gated:
        split(tensors, "mlp.fc1", ("mlp.gate", "mlp.up"))
    mask_token = tensors.pop("mask_token", torch.zeros(1, model.width))  # read by masked training only
    if huggingface and layout is not layouts.HF_VIT:
        tensors["mask_token"] = mask_token[None] if layout.rotary else mask_token
    if huggingface and layout.rotary:  # an empty tensor where there are none
        tensors.setdefault("register_tokens", torch.zeros(1, 0, model.width))
    renamed = {layout.to_theirs(name): tensor for name, tensor in tensors.items()}
    if gated and not layout.rotary:
        for ours, theirs in ((".mlp.fc1.", ".mlp.weights_in."), (".mlp.fc2.", ".mlp.weights_out.")):
            renamed = {name.replace(ours, theirs): tensor for name, tensor in renamed.items()}
    return renamed
