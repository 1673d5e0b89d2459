"""Transformers that are alike but compute something else: refused by what tells them from ours."""

from __future__ import annotations

import re

from dino_vit.weights.reading import RawWeights, WeightsError

TELLTALES = {  # patterns of names: what they show
    r"(.*\.)?(dist_token|distillation_token)": "a distillation token (DeiT)",
    r"(.*\.)?(norm_pre|pre_layrnorm)\..*": "a normalisation before the first block (CLIP)",
    r"(.*\.)?(rel_pos|relative_position)[^.]*(\..*)?": "relative positions (BEiT, SAM)",
    r"(model\.)?(layer|rope|blocks\.\d+\.gamma_1)(\..*)?": "blocks of another kind (DINOv3, EVA, CaiT)",
    r"(.*\.)?fc_norm\..*": "features that are averaged before they are normalised",
    r"attn_pool\..*": "features that are pooled by attention (SigLIP)",
}
EXACT_GELU = ("gelu", "gelu_python")  # by its names in transformers
SHOWN_BY_TENSORS = {  # or without effect on the features: model_args of a timm folder
    "img_size", "patch_size", "in_chans", "num_classes", "embed_dim", "depth", "num_heads", "mlp_ratio",
    "qkv_bias", "init_values", "reg_tokens", "no_embed_class", "global_pool", "dynamic_img_size",
    "drop_rate", "drop_path_rate", "pos_drop_rate", "proj_drop_rate", "attn_drop_rate",
}  # fmt: skip


def refuse_foreign(raw: RawWeights) -> None:
    """Say what of these weights, or of the config.json beside them, this backbone does not have."""
    for pattern, what in TELLTALES.items():
        found = [name for name in raw.tensors if re.fullmatch(pattern, name)]
        if found:
            raise WeightsError(
                f"{raw.source} has {what}, which this backbone does not have: {len(found)} tensors such as "
                f"{found[0]}"
            )
    activation = raw.hub_config.get("hidden_act", "gelu")
    if activation not in EXACT_GELU:
        raise WeightsError(
            f"{raw.source}: config.json has hidden_act={activation!r}, but this backbone has the exact GELU"
        )
    unknown = set(raw.hub_config.get("model_args") or {}) - SHOWN_BY_TENSORS
    if unknown:
        raise WeightsError(
            f"{raw.source}: config.json has model_args that no tensor shows ({', '.join(sorted(unknown))}); "
            "whether the features would be the same cannot be told"
        )
