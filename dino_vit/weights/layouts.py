"""The names that others give to the tensors of a vision transformer, their way to ours and back.

Our own names are those of the 2021 DINO code and of timm: cls_token, pos_embed, patch_embed.proj,
blocks.{i}.norm1, blocks.{i}.attn.qkv, blocks.{i}.attn.proj, blocks.{i}.ls1.gamma, blocks.{i}.mlp.fc1, norm.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dino_vit.data.images.pixels import IMAGENET_NORMALISATION
from dino_vit.models.positions import PositionMode

Normalisation = tuple[tuple[float, ...], tuple[float, ...]]


@dataclass(frozen=True)
class Layout:
    """One family of files: its names, and what its tensors do not say."""

    format: str
    position_mode: PositionMode
    pairs: tuple[tuple[str, str], ...] = ()  # (theirs, ours); {i} is the number of a block
    left_out: Mapping[str, str] = field(default_factory=dict)  # pattern of names: what they are
    norm_eps: float = 1e-6
    normalisation: Normalisation | None = IMAGENET_NORMALISATION

    def to_ours(self, name: str) -> str:
        """Return our name for one of theirs; a name that the layout does not list stays as it is."""
        return _translate(name, self.pairs)

    def to_theirs(self, name: str) -> str:
        """Return the name that this layout writes for one of ours."""
        return _translate(name, tuple((ours, theirs) for theirs, ours in self.pairs))


def _translate(name: str, pairs: tuple[tuple[str, str], ...]) -> str:
    for old, new in pairs:
        pattern = re.escape(old).replace(r"\{i\}", r"(?P<i>\d+)")
        match = re.fullmatch(rf"{pattern}(?P<rest>\.weight|\.bias)?", name)
        if match:
            found = match.groupdict()
            return new.replace("{i}", found.get("i") or "") + (found["rest"] or "")
    return name


DINO_HEADS = {r"(dino_head|ibot_head|projection_head|prototypes|head\.(mlp|last_layer))\..*": "DINO head"}
CLASSIFIER = {r"head\.(weight|bias)": "classifier"}
GATED = (("blocks.{i}.mlp.w12", "blocks.{i}.mlp.fc1"), ("blocks.{i}.mlp.w3", "blocks.{i}.mlp.fc2"))

OURS = Layout("dino-vit", "hf", left_out=CLASSIFIER)
REFERENCE = Layout("reference", "dino", left_out={**DINO_HEADS, **CLASSIFIER})
DINOV2 = Layout("dinov2", "dinov2", pairs=GATED, left_out={**DINO_HEADS, r"mask_token": "mask token"})
DINOV2_REGISTERS = Layout("dinov2", "timm", pairs=GATED, left_out=DINOV2.left_out)
TIMM = Layout(
    "timm", "timm", pairs=(("reg_token", "register_tokens"),), left_out=CLASSIFIER, normalisation=None
)
TORCHVISION = Layout(
    "torchvision",
    "hf",
    pairs=(
        ("class_token", "cls_token"),
        ("encoder.pos_embedding", "pos_embed"),
        ("conv_proj", "patch_embed.proj"),
        ("encoder.layers.encoder_layer_{i}.ln_1", "blocks.{i}.norm1"),
        ("encoder.layers.encoder_layer_{i}.self_attention.in_proj_weight", "blocks.{i}.attn.qkv.weight"),
        ("encoder.layers.encoder_layer_{i}.self_attention.in_proj_bias", "blocks.{i}.attn.qkv.bias"),
        ("encoder.layers.encoder_layer_{i}.self_attention.out_proj", "blocks.{i}.attn.proj"),
        ("encoder.layers.encoder_layer_{i}.ln_2", "blocks.{i}.norm2"),
        ("encoder.layers.encoder_layer_{i}.mlp.0", "blocks.{i}.mlp.fc1"),
        ("encoder.layers.encoder_layer_{i}.mlp.3", "blocks.{i}.mlp.fc2"),
        ("encoder.layers.encoder_layer_{i}.mlp.linear_1", "blocks.{i}.mlp.fc1"),  # as before 0.13
        ("encoder.layers.encoder_layer_{i}.mlp.linear_2", "blocks.{i}.mlp.fc2"),
        ("encoder.ln", "norm"),
        ("heads.head", "head"),
    ),
    left_out=CLASSIFIER,
)

_HF_EMBEDDINGS = (
    ("embeddings.cls_token", "cls_token"),
    ("embeddings.position_embeddings", "pos_embed"),
    ("embeddings.patch_embeddings.projection", "patch_embed.proj"),
    ("layernorm", "norm"),
    ("classifier", "head"),
    ("encoder.layer.{i}.attention.attention.query", "blocks.{i}.attn.q"),
    ("encoder.layer.{i}.attention.attention.key", "blocks.{i}.attn.k"),
    ("encoder.layer.{i}.attention.attention.value", "blocks.{i}.attn.v"),
    ("encoder.layer.{i}.attention.output.dense", "blocks.{i}.attn.proj"),
)
_HF_IN_MEMORY = (
    tuple(  # what state_dict() of a model from transformers 5 shows, unlike the files that it writes
        (f"{blocks}.{{i}}.attention.{theirs}_proj", f"blocks.{{i}}.attn.{ours}")
        for blocks in ("layers", "encoder.layer")
        for theirs, ours in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "proj"))
    )
)
_HF_LEFT_OUT = {r"pooler\..*": "pooler", r"embeddings\.mask_token": "mask token"}
HF_VIT = Layout(
    "huggingface",
    "hf",
    pairs=(
        *_HF_EMBEDDINGS,
        ("encoder.layer.{i}.layernorm_before", "blocks.{i}.norm1"),
        ("encoder.layer.{i}.layernorm_after", "blocks.{i}.norm2"),
        ("encoder.layer.{i}.intermediate.dense", "blocks.{i}.mlp.fc1"),
        ("encoder.layer.{i}.output.dense", "blocks.{i}.mlp.fc2"),
        ("layers.{i}.layernorm_before", "blocks.{i}.norm1"),
        ("layers.{i}.layernorm_after", "blocks.{i}.norm2"),
        ("layers.{i}.mlp.fc1", "blocks.{i}.mlp.fc1"),
        ("layers.{i}.mlp.fc2", "blocks.{i}.mlp.fc2"),
        *_HF_IN_MEMORY,
    ),
    left_out={**_HF_LEFT_OUT, **CLASSIFIER},
    norm_eps=1e-12,
    normalisation=None,
)
_HF_DINOV2_PAIRS = (
    *_HF_EMBEDDINGS,
    ("embeddings.register_tokens", "register_tokens"),
    ("encoder.layer.{i}.norm1", "blocks.{i}.norm1"),
    ("encoder.layer.{i}.norm2", "blocks.{i}.norm2"),
    ("encoder.layer.{i}.layer_scale1.lambda1", "blocks.{i}.ls1.gamma"),
    ("encoder.layer.{i}.layer_scale2.lambda1", "blocks.{i}.ls2.gamma"),
    ("encoder.layer.{i}.mlp.fc1", "blocks.{i}.mlp.fc1"),
    ("encoder.layer.{i}.mlp.fc2", "blocks.{i}.mlp.fc2"),
    ("encoder.layer.{i}.mlp.weights_in", "blocks.{i}.mlp.fc1"),
    ("encoder.layer.{i}.mlp.weights_out", "blocks.{i}.mlp.fc2"),
    ("encoder.layer.{i}.mlp.gate_proj", "blocks.{i}.mlp.gate"),
    ("encoder.layer.{i}.mlp.up_proj", "blocks.{i}.mlp.up"),
    ("encoder.layer.{i}.mlp.down_proj", "blocks.{i}.mlp.fc2"),
    *_HF_IN_MEMORY,
)
HF_DINOV2 = Layout("huggingface", "hf", pairs=_HF_DINOV2_PAIRS, left_out={**_HF_LEFT_OUT, **CLASSIFIER})
HF_DINOV2_REGISTERS = Layout("huggingface", "timm", pairs=_HF_DINOV2_PAIRS, left_out=HF_DINOV2.left_out)

HF_PREFIX = re.compile(r"(vit|dinov2|dinov2_with_registers)\.")
FORMATS = ("dino-vit", "reference", "timm", "torchvision", "huggingface", "dinov2")


FUSED = (  # a tensor of ours, and the separate ones that others keep in its place
    ("attn.qkv", ("attn.q", "attn.k", "attn.v")),
    ("attn.qkv", ("attn.query", "attn.key", "attn.value")),
    ("mlp.fc1", ("mlp.gate", "mlp.up")),
)


def fuse(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Join queries, keys and values, and gates with what they weigh, where they are kept apart."""
    fused = dict(tensors)
    for name in tensors:
        for whole, parts in FUSED:
            match = re.fullmatch(rf"(blocks\.\d+\.){re.escape(parts[0])}\.(weight|bias)", name)
            names = [f"{match[1]}{part}.{match[2]}" for part in parts] if match else []
            joined = f"{match[1]}{whole}.{match[2]}" if match else ""
            # Parts without siblings, or beside what they would be joined to, stay: as surplus they are named.
            if match and joined not in fused and all(part in fused for part in names):
                fused[joined] = torch.cat([fused.pop(part) for part in names])
    return fused


def split_qkv(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Cut every qkv into the separate queries, keys and values."""
    parts: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if ".attn.qkv." not in name:
            parts[name] = tensor
            continue
        for third, rows in zip("qkv", tensor.chunk(3), strict=True):
            parts[name.replace(".qkv.", f".{third}.")] = rows.clone()
    return parts
