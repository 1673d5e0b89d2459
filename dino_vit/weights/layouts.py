"""Tensor names of other libraries, and their translation to ours and back.

Our own names are those of the 2021 DINO code and of timm: cls_token, pos_embed, patch_embed.proj,
blocks.{i}.norm1, blocks.{i}.attn.qkv, blocks.{i}.attn.proj, blocks.{i}.ls1.gamma, blocks.{i}.mlp.fc1, norm.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dino_vit.data.images.pixels import IMAGENET_NORMALISATION
from dino_vit.models.positions import PositionMode


@dataclass(frozen=True)
class Layout:
    """The tensor names of one family of files, and what its tensors do not show."""

    format: str
    position_mode: PositionMode
    pairs: tuple[tuple[str, str], ...] = ()  # (theirs, ours); {i} is the number of a block
    dropped: Mapping[str, str] = field(default_factory=dict)  # pattern of our names: what they belong to
    norm_eps: float = 1e-6
    normalisation: tuple[tuple[float, ...], tuple[float, ...]] | None = IMAGENET_NORMALISATION
    removed: str = ""  # pattern of what is cut out of a name before it is looked up
    rotary: bool = False  # rotary positions, and keys without bias

    def to_ours(self, name: str) -> str:
        """Return our name for one of theirs; a name that is not listed stays as it is."""
        return _translate(re.sub(self.removed, "", name, count=1), self.pairs)

    def to_theirs(self, name: str) -> str:
        """Return the name that this layout writes for one of ours."""
        return _translate(name, ((ours, theirs) for theirs, ours in self.pairs))


def _translate(name: str, pairs: Iterable[tuple[str, str]]) -> str:
    for old, new in pairs:
        pattern = re.escape(old).replace(r"\{i\}", r"(?P<i>\d+)")
        match = re.fullmatch(rf"{pattern}(?P<rest>\.weight|\.bias)?", name)
        if match:
            found = match.groupdict()
            return new.replace("{i}", found.get("i") or "") + (found["rest"] or "")
    return name


DINO_HEADS = {r"(dino_head|ibot_head|projection_head|prototypes|head\.(mlp|last_layer))\..*": "DINO head"}
MASK_TOKEN = {r"mask_token": "mask token"}
CLASSIFIER = {r"head\.(weight|bias)": "classifier"}

OURS = Layout("dino-vit", "hf", dropped=CLASSIFIER)
REFERENCE = Layout("reference", "dino", dropped={**DINO_HEADS, **CLASSIFIER})
DINOV2 = Layout(
    "dinov2",
    "dinov2",
    pairs=(("blocks.{i}.mlp.w12", "blocks.{i}.mlp.fc1"), ("blocks.{i}.mlp.w3", "blocks.{i}.mlp.fc2")),
    dropped={**DINO_HEADS, **MASK_TOKEN},
    removed=r"(?<=^blocks\.)\d+\.(?=\d+\.)",  # training stores blocks in chunks: blocks.{chunk}.{i}
)
DINOV2_REGISTERS = replace(DINOV2, position_mode="timm")
DINOV3 = replace(
    DINOV2,
    format="dinov3",
    pairs=(
        ("storage_tokens", "register_tokens"),
        ("blocks.{i}.mlp.w1", "blocks.{i}.mlp.gate"),
        ("blocks.{i}.mlp.w2", "blocks.{i}.mlp.up"),
        ("blocks.{i}.mlp.w3", "blocks.{i}.mlp.fc2"),
    ),
    dropped={
        **DINOV2.dropped,
        r"rope_embed\.periods": "periods",
        r"blocks\.\d+\.attn\.qkv\.bias_mask": "mask",
    },
    norm_eps=1e-5,
    rotary=True,
)
TIMM = Layout(
    "timm", "timm", pairs=(("reg_token", "register_tokens"),), dropped=CLASSIFIER, normalisation=None
)
TIMM_DINOV3 = replace(  # an Eva
    TIMM,
    pairs=(
        ("reg_token", "register_tokens"),
        ("blocks.{i}.gamma_1", "blocks.{i}.ls1.gamma"),
        ("blocks.{i}.gamma_2", "blocks.{i}.ls2.gamma"),
        ("blocks.{i}.attn.q_bias", "blocks.{i}.attn.q.bias"),
        ("blocks.{i}.attn.v_bias", "blocks.{i}.attn.v.bias"),
        ("blocks.{i}.mlp.fc1_g", "blocks.{i}.mlp.gate"),
        ("blocks.{i}.mlp.fc1_x", "blocks.{i}.mlp.up"),
    ),
    norm_eps=1e-5,
    rotary=True,
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
        ("encoder.layers.encoder_layer_{i}.mlp.linear_1", "blocks.{i}.mlp.fc1"),  # before torchvision 0.13
        ("encoder.layers.encoder_layer_{i}.mlp.linear_2", "blocks.{i}.mlp.fc2"),
        ("encoder.ln", "norm"),
        ("heads.head", "head"),
    ),
    dropped=CLASSIFIER,
)

_HF_SHARED = (
    ("embeddings.cls_token", "cls_token"),
    ("embeddings.mask_token", "mask_token"),
    ("embeddings.position_embeddings", "pos_embed"),
    ("embeddings.patch_embeddings.projection", "patch_embed.proj"),
    ("layernorm", "norm"),
    ("classifier", "head"),
    ("encoder.layer.{i}.attention.attention.query", "blocks.{i}.attn.q"),
    ("encoder.layer.{i}.attention.attention.key", "blocks.{i}.attn.k"),
    ("encoder.layer.{i}.attention.attention.value", "blocks.{i}.attn.v"),
    ("encoder.layer.{i}.attention.output.dense", "blocks.{i}.attn.proj"),
    *(  # state_dict() of a model of transformers 5, whose files keep the names above
        (f"{blocks}.{{i}}.attention.{theirs}_proj", f"blocks.{{i}}.attn.{ours}")
        for blocks in ("layers", "encoder.layer")
        for theirs, ours in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "proj"))
    ),
)
HF_VIT = Layout(
    "huggingface",
    "hf",
    pairs=(
        *_HF_SHARED,
        ("encoder.layer.{i}.layernorm_before", "blocks.{i}.norm1"),
        ("encoder.layer.{i}.layernorm_after", "blocks.{i}.norm2"),
        ("encoder.layer.{i}.intermediate.dense", "blocks.{i}.mlp.fc1"),
        ("encoder.layer.{i}.output.dense", "blocks.{i}.mlp.fc2"),
        ("layers.{i}.layernorm_before", "blocks.{i}.norm1"),
        ("layers.{i}.layernorm_after", "blocks.{i}.norm2"),
        ("layers.{i}.mlp.fc1", "blocks.{i}.mlp.fc1"),
        ("layers.{i}.mlp.fc2", "blocks.{i}.mlp.fc2"),
    ),
    dropped={r"pooler\..*": "pooler", **MASK_TOKEN, **CLASSIFIER},
    norm_eps=1e-12,
    normalisation=None,
    removed=r"^(vit|dinov2|dinov2_with_registers)\.",  # classifiers keep their backbone under its name
)
HF_DINOV2 = replace(
    HF_VIT,
    pairs=(
        *_HF_SHARED,
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
    ),
    norm_eps=1e-6,
    normalisation=IMAGENET_NORMALISATION,
)
HF_DINOV2_REGISTERS = replace(HF_DINOV2, position_mode="timm")
_HF_DINOV3_SHARED = (
    ("embeddings.cls_token", "cls_token"),
    ("embeddings.mask_token", "mask_token"),
    ("embeddings.register_tokens", "register_tokens"),
    ("embeddings.patch_embeddings", "patch_embed.proj"),
    *(
        (f"{blocks}.{{i}}.{theirs}", f"blocks.{{i}}.{ours}")
        for blocks in ("layer", "model.layer")  # the second of a model's state_dict()
        for theirs, ours in (
            *((f"attention.{name}_proj", f"attn.{name}") for name in "qkv"),
            ("attention.o_proj", "attn.proj"),
            ("layer_scale1.lambda1", "ls1.gamma"),
            ("layer_scale2.lambda1", "ls2.gamma"),
            ("norm1", "norm1"),
            ("norm2", "norm2"),
            ("mlp.down_proj", "mlp.fc2"),
        )
    ),
)
HF_DINOV3 = Layout(
    "huggingface",
    "hf",
    pairs=(
        *_HF_DINOV3_SHARED,
        *((f"{blocks}.{{i}}.mlp.up_proj", "blocks.{i}.mlp.fc1") for blocks in ("layer", "model.layer")),
    ),
    dropped=MASK_TOKEN,
    norm_eps=1e-5,
    rotary=True,
)
HF_DINOV3_GATED = replace(
    HF_DINOV3,
    pairs=(
        *_HF_DINOV3_SHARED,
        *(
            (f"{blocks}.{{i}}.mlp.{name}_proj", f"blocks.{{i}}.mlp.{name}")
            for blocks in ("layer", "model.layer")
            for name in ("gate", "up")
        ),
    ),
)

MERGED = (  # a tensor of ours, and the separate ones that others store instead
    ("attn.qkv", ("attn.q", "attn.k", "attn.v")),
    ("attn.qkv", ("attn.query", "attn.key", "attn.value")),
    ("mlp.fc1", ("mlp.gate", "mlp.up")),
)


def merge(tensors: Mapping[str, Tensor], *, key_bias: bool = True) -> dict[str, Tensor]:
    """Concatenate separate q, k, v, and separate gate and up projections, into the single tensors of ours.

    Without `key_bias` it is zeros where there are others.
    """
    merged = dict(tensors)
    if not key_bias:
        of_queries = [name for name in tensors if name.endswith(".attn.q.bias")]
        merged |= {n.replace("attn.q.", "attn.k."): torch.zeros_like(tensors[n]) for n in of_queries}
    for name in tensors:
        for whole, parts in MERGED:
            names = [name.replace(f".{parts[0]}.", f".{part}.") for part in parts]
            joined = name.replace(f".{parts[0]}.", f".{whole}.")
            # An incomplete set, or one beside the tensor it would become, stays: strict loading reports it.
            if joined not in merged and all(part in merged for part in names):
                merged[joined] = torch.cat([merged.pop(part) for part in names])
    return merged


def huggingface_layout(scaled: bool, registers: bool) -> Layout:
    """Return the layout of a Hugging Face model: ViT, or with layer scale DINOv2."""
    if not scaled:
        return HF_VIT
    return HF_DINOV2_REGISTERS if registers else HF_DINOV2
