"""Tensor names of other libraries: those that tell whose they are, and their translation to ours and back.

Our own names are those of the 2021 DINO code and of timm: cls_token, pos_embed, patch_embed.proj,
blocks.{i}.norm1, blocks.{i}.attn.qkv, blocks.{i}.attn.proj, blocks.{i}.ls1.gamma, blocks.{i}.mlp.fc1, norm.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
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
    marks: tuple[str, ...] = ()  # patterns: a file of this layout has a name for each
    names: Mapping[str, str] = field(default_factory=dict)  # theirs: ours; the first is written
    in_blocks: Mapping[str, str] = field(default_factory=dict)  # the same, after the number of a block
    blocks: tuple[str, ...] = ("blocks.",)  # what precedes that number; the first is written
    dropped: Mapping[str, str] = field(default_factory=dict)  # pattern of our names: what they belong to
    norm_eps: float = 1e-6
    normalisation: tuple[tuple[float, ...], tuple[float, ...]] | None = IMAGENET_NORMALISATION
    removed: str = ""  # pattern of what is cut out of a name before it is looked up
    rotary: bool = False  # rotary positions, and keys without bias
    lacks: tuple[str, ...] = ()  # arguments of VisionTransformer of which it holds the defaults only

    def fits(self, names: Iterable[str]) -> bool:
        """Tell whether there is a name for each of the marks."""
        return all(any(re.fullmatch(mark, name) for name in names) for mark in self.marks)

    def to_ours(self, name: str) -> str:
        """Return our name for one of theirs; a name that is not listed stays as it is."""
        name = re.sub(self.removed, "", name, count=1)
        if match := re.fullmatch(rf"({'|'.join(map(re.escape, self.blocks))})(\d+)\.(.+)", name):
            return f"blocks.{match[2]}.{_translate(match[3], self.in_blocks.items()) or match[3]}"
        return _translate(name, self.names.items()) or name

    def to_theirs(self, name: str) -> str:
        """Return the name that this layout writes for one of ours."""
        if match := re.fullmatch(r"blocks\.(\d+)\.(.+)", name):
            theirs = _translate(match[2], ((ours, theirs) for theirs, ours in self.in_blocks.items()))
            return f"{self.blocks[0]}{match[1]}.{theirs or match[2]}"
        return _translate(name, ((ours, theirs) for theirs, ours in self.names.items())) or name


def _translate(name: str, pairs: Iterable[tuple[str, str]]) -> str | None:
    """Return the new name of a module or a parameter, if it is listed."""
    for old, new in pairs:
        if (rest := name.removeprefix(old)) in ("", ".weight", ".bias"):
            return new + rest
    return None


DINO_HEADS = {r"(dino_head|ibot_head|projection_head|prototypes|head\.(mlp|last_layer))\..*": "DINO head"}
MASK_TOKEN = {r"mask_token": "mask token"}
CLASSIFIER = {r"head\.(weight|bias)": "classifier"}

OURS = Layout("dino-vit", "hf", dropped=CLASSIFIER)
REFERENCE = Layout(
    "reference",
    "dino",
    marks=("cls_token", "pos_embed"),
    dropped={**DINO_HEADS, **CLASSIFIER},
    lacks=("registers", "layer_scale", "mlp", "qkv_bias", "norm_eps", "stem", "qk_scale"),
)
DINOV2 = Layout(
    "dinov2",
    "dinov2",
    marks=(*REFERENCE.marks, r"mask_token|blocks\.\d+\.\d+\..*|.*\.mlp\.w12\..*"),
    in_blocks={"mlp.w12": "mlp.fc1", "mlp.w3": "mlp.fc2"},
    dropped={**DINO_HEADS, **MASK_TOKEN},
    removed=r"(?<=^blocks\.)\d+\.(?=\d+\.)",  # training stores blocks in chunks: blocks.{chunk}.{i}
)
DINOV2_REGISTERS = replace(DINOV2, position_mode="timm", marks=(*REFERENCE.marks, "register_tokens"))
_PERIODS = {r"rope_embed\.periods": "periods", r"blocks\.\d+\.attn\.qkv\.bias_mask": "mask"}
_PERIODS |= {r"local_cls_norm\..*": "norm of local crops"}
DINOV3 = replace(
    DINOV2,
    format="dinov3",
    marks=("storage_tokens",),
    names={"storage_tokens": "register_tokens"},
    in_blocks={"mlp.w1": "mlp.gate", "mlp.w2": "mlp.up", "mlp.w3": "mlp.fc2"},
    dropped={**DINOV2.dropped, **_PERIODS},
    norm_eps=1e-5,
    rotary=True,
)
TIMM = Layout(
    "timm",
    "timm",
    marks=(*REFERENCE.marks, r"reg_token|head\.weight|blocks\.0\.ls1\.gamma|patch_embed\.backbone\..*"),
    names={"reg_token": "register_tokens"},
    dropped=CLASSIFIER,
    normalisation=None,
    lacks=("mlp", "norm_eps", "qk_scale"),
)
TIMM_DINOV3 = replace(  # an Eva
    TIMM,
    marks=("reg_token", r"blocks\.0\.gamma_1"),
    in_blocks={
        "gamma_1": "ls1.gamma",
        "gamma_2": "ls2.gamma",
        "attn.q_bias": "attn.q.bias",
        "attn.v_bias": "attn.v.bias",
        "mlp.fc1_g": "mlp.gate",
        "mlp.fc1_x": "mlp.up",
    },
    norm_eps=1e-5,
    rotary=True,
    lacks=("stem", "qk_scale"),
)
TORCHVISION = Layout(
    "torchvision",
    "hf",
    marks=("class_token",),
    names={
        "class_token": "cls_token",
        "encoder.pos_embedding": "pos_embed",
        "conv_proj": "patch_embed.proj",
        "encoder.ln": "norm",
        "heads.head": "head",
    },
    blocks=("encoder.layers.encoder_layer_",),
    in_blocks={
        "ln_1": "norm1",
        "self_attention.in_proj_weight": "attn.qkv.weight",
        "self_attention.in_proj_bias": "attn.qkv.bias",
        "self_attention.out_proj": "attn.proj",
        "ln_2": "norm2",
        "mlp.0": "mlp.fc1",
        "mlp.3": "mlp.fc2",
        "mlp.linear_1": "mlp.fc1",  # before torchvision 0.13
        "mlp.linear_2": "mlp.fc2",
    },
    dropped=CLASSIFIER,
)

_HF_TOKENS = {f"embeddings.{name}": name for name in ("cls_token", "mask_token", "register_tokens")}
_HF_HEADS = {f"attention.{x}_proj": f"attn.{x}" for x in "qkv"} | {"attention.o_proj": "attn.proj"}
_HF_ATTENTION = {
    "attention.attention.query": "attn.q",
    "attention.attention.key": "attn.k",
    "attention.attention.value": "attn.v",
    "attention.output.dense": "attn.proj",
    **_HF_HEADS,
}
_HF_MLP = {"mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2"}
_HF_GATED = {"mlp.gate_proj": "mlp.gate", "mlp.up_proj": "mlp.up", "mlp.down_proj": "mlp.fc2"}
_HF_SCALED = {f"layer_scale{number}.lambda1": f"ls{number}.gamma" for number in (1, 2)}
HF_VIT = Layout(
    "huggingface",
    "hf",
    marks=(r".*embeddings\.cls_token",),
    names={
        **_HF_TOKENS,
        "embeddings.position_embeddings": "pos_embed",
        "embeddings.patch_embeddings.projection": "patch_embed.proj",
        "layernorm": "norm",
        "classifier": "head",
    },
    blocks=("encoder.layer.", "layers."),  # `layers.` in state_dict() of transformers 5, unlike in its files
    in_blocks={
        **_HF_ATTENTION,
        "layernorm_before": "norm1",
        "layernorm_after": "norm2",
        "intermediate.dense": "mlp.fc1",
        "output.dense": "mlp.fc2",
    },
    dropped={r"pooler\..*": "pooler", **MASK_TOKEN, **CLASSIFIER},
    norm_eps=1e-12,
    normalisation=None,
    removed=r"^(vit|dinov2|dinov2_with_registers)\.",  # classifiers keep their backbone under its name
    lacks=("registers", "mlp", "stem", "qk_scale"),
)
HF_DINOV2 = replace(
    HF_VIT,
    marks=(*HF_VIT.marks, ".*layer_scale1.*"),
    in_blocks={
        **_HF_ATTENTION,
        **_HF_SCALED,
        **_HF_MLP,
        "mlp.weights_in": "mlp.fc1",
        "mlp.weights_out": "mlp.fc2",
        **_HF_GATED,
    },
    norm_eps=1e-6,
    normalisation=IMAGENET_NORMALISATION,
    lacks=("stem", "qk_scale"),
)
HF_DINOV2_REGISTERS = replace(
    HF_DINOV2, position_mode="timm", marks=(*HF_DINOV2.marks, r".*embeddings\.register_tokens")
)
HF_DINOV3 = Layout(
    "huggingface",
    "hf",
    marks=(r"embeddings\.patch_embeddings\.weight",),
    names={**_HF_TOKENS, "embeddings.patch_embeddings": "patch_embed.proj"},
    blocks=("layer.", "model.layer."),  # of a file, and of a state_dict()
    in_blocks={**_HF_HEADS, **_HF_SCALED, "mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"},
    dropped=MASK_TOKEN,
    norm_eps=1e-5,
    rotary=True,
    lacks=("stem", "qk_scale"),
)
HF_DINOV3_GATED = replace(
    HF_DINOV3,
    marks=(*HF_DINOV3.marks, r".*\.mlp\.gate_proj\.weight"),
    in_blocks={**_HF_HEADS, **_HF_SCALED, **_HF_GATED},
)

LAYOUTS = (  # the first that fits is taken, so those with more marks come before others
    *(DINOV3, HF_DINOV3_GATED, HF_DINOV3, TIMM_DINOV3),
    *(HF_DINOV2_REGISTERS, HF_DINOV2, HF_VIT, TORCHVISION),
    *(DINOV2_REGISTERS, DINOV2, TIMM, REFERENCE),
)
LOOK_ALIKES = (DINOV2, TIMM, REFERENCE, OURS)  # where the format decides that is given or stated

MERGED = (  # a tensor of ours, and the separate ones that others store instead
    ("attn.qkv", ("attn.q", "attn.k", "attn.v")),
    ("mlp.fc1", ("mlp.gate", "mlp.up")),
)


def merge(tensors: Mapping[str, Tensor], *, key_bias: bool = True) -> dict[str, Tensor]:
    """Concatenate separate q, k, v, and separate gate and up projections, into the single tensors of ours.

    Without `key_bias` it is zeros where there are others and none of the keys.
    """
    merged = dict(tensors)
    if not key_bias:
        query_biases = [name for name in tensors if name.endswith(".attn.q.bias")]
        zeros = {n.replace("attn.q.", "attn.k."): torch.zeros_like(tensors[n]) for n in query_biases}
        merged = zeros | merged
    for name in tensors:
        for whole, parts in MERGED:
            names = [name.replace(f".{parts[0]}.", f".{part}.") for part in parts]
            joined = name.replace(f".{parts[0]}.", f".{whole}.")
            # An incomplete set, or one beside the tensor it would become, stays: strict loading reports it.
            if joined not in merged and all(part in merged for part in names):
                merged[joined] = torch.cat([merged.pop(part) for part in names])
    return merged


def split(tensors: dict[str, Tensor], whole: str, parts: Sequence[str]) -> None:
    """Replace each tensor whose name contains `whole` by its parts."""
    for name in [name for name in tensors if whole in name]:
        for part, rows in zip(parts, tensors.pop(name).chunk(len(parts)), strict=True):
            tensors[name.replace(whole, part)] = rows.clone()
