"""Tensor names of other libraries: recognise whose they are, translate them to ours and back.

Our own names are those of the 2021 DINO code and of timm: cls_token, pos_embed, patch_embed.proj,
blocks.{i}.norm1, blocks.{i}.attn.qkv, blocks.{i}.attn.proj, blocks.{i}.ls1.gamma, blocks.{i}.mlp.fc1, norm.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dino_vit.core.text import brief
from dino_vit.data.images.pixels import IMAGENET_NORMALISATION
from dino_vit.models.positions import PositionMode
from dino_vit.weights.metadata import WeightsError
from dino_vit.weights.reading import RawWeights


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
TIMM = Layout(
    "timm", "timm", pairs=(("reg_token", "register_tokens"),), dropped=CLASSIFIER, normalisation=None
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

FORMATS = ("dino-vit", "reference", "timm", "torchvision", "huggingface", "dinov2")
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
MERGED = (  # a tensor of ours, and the separate ones that others store instead
    ("attn.qkv", ("attn.q", "attn.k", "attn.v")),
    ("attn.qkv", ("attn.query", "attn.key", "attn.value")),
    ("mlp.fc1", ("mlp.gate", "mlp.up")),
)


def merge(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Concatenate separate q, k, v, and separate gate and up projections, into the single tensors of ours."""
    merged = dict(tensors)
    for name in tensors:
        for whole, parts in MERGED:
            names = [name.replace(f".{parts[0]}.", f".{part}.") for part in parts]
            joined = name.replace(f".{parts[0]}.", f".{whole}.")
            # An incomplete set, or one beside the tensor it would become, stays: strict loading reports it.
            if joined not in merged and all(part in merged for part in names):
                merged[joined] = torch.cat([merged.pop(part) for part in names])
    return merged


def recognise(raw: RawWeights, format: str | None = None) -> Layout:
    """Return the layout of the tensors; `format` decides where files of two libraries look the same."""
    if format not in (None, *FORMATS):
        raise WeightsError(f"format={format!r} is not supported; choose from {', '.join(FORMATS)}")
    if raw.metadata:
        return OURS
    format = format or raw.export.get("format")
    _refuse_unsupported(raw)
    names = set(raw.tensors)
    if any(name.endswith("embeddings.cls_token") for name in names):
        scaled = any("layer_scale1" in name for name in names)
        layout = huggingface_layout(
            scaled, any(name.endswith("embeddings.register_tokens") for name in names)
        )
    elif "class_token" in names:
        layout = TORCHVISION
    elif {"cls_token", "pos_embed"} <= names:
        layout = _reference_like_layout(raw, names, format)
    else:
        raise WeightsError(
            f"{raw.source} is not a supported vision transformer (tensors: {', '.join(sorted(names)[:6])}, "
            f"...); supported formats are {', '.join(FORMATS)}"
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
            f"{raw.source}: config.json has hidden_act={brief(activation)}, but only the exact GELU is "
            "supported"
        )
    unknown = set(raw.hub_config.get("model_args") or {}) - KNOWN_MODEL_ARGS
    if unknown:
        raise WeightsError(
            f"{raw.source}: config.json has unsupported model_args ({', '.join(sorted(unknown))}), which may "
            "change the features"
        )


def _reference_like_layout(raw: RawWeights, names: set[str], format: str | None) -> Layout:
    """Distinguish DINO's, DINOv2's, timm's and our own bare state dicts, which share most names."""
    dinov2 = DINOV2_REGISTERS if "register_tokens" in names else DINOV2
    chunked = any(re.match(r"blocks\.\d+\.\d+\.", name) for name in names)
    if "mask_token" in names or chunked:
        return dinov2
    if format in ("reference", "timm", "dino-vit", "dinov2"):
        return next(layout for layout in (REFERENCE, TIMM, OURS, dinov2) if layout.format == format)
    if "register_tokens" in names or any(".mlp.w12." in name for name in names):
        return dinov2
    from_timm = "architecture" in raw.hub_config or any(name in names for name in TIMM_ONLY)
    return TIMM if from_timm and not raw.trained_with_dino else REFERENCE


def huggingface_layout(scaled: bool, registers: bool) -> Layout:
    """Return the layout of a Hugging Face model: ViT, or with layer scale DINOv2."""
    if not scaled:
        return HF_VIT
    return HF_DINOV2_REGISTERS if registers else HF_DINOV2
