"""Stems in files: what tensors show of them, and how timm builds them."""

import re
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from dino_vit.config.sections import REDUCTION
from dino_vit.core import Size
from dino_vit.models.stems import conv_widths
from dino_vit.models.vit import VisionTransformer

_STAGE = re.compile(r"patch_embed\.backbone\.stages\.(\d)\.blocks\.\d+\.conv1\.weight")
_CONV = re.compile(r"patch_embed\.backbone\.\d+\.conv\.weight")
# How timm builds them, with the keywords of `timm_stem`.
LINES = {
    "conv": """\
stem = timm.models.vision_transformer_hybrid.ConvStem(
    {arguments}, norm_layer=timm.layers.GroupNorm1, act_layer=torch.nn.GELU
)
embed = functools.partial(timm.layers.HybridEmbed, backbone=stem, proj=False)
""",
    "hybrid": """\
conv = functools.partial(timm.layers.StdConv2dSame, eps=1e-8)
stem = timm.models.resnetv2.ResNetV2({arguments}, conv_layer=conv)
embed = functools.partial(timm.layers.HybridEmbed, backbone=stem)
""",
}


def infer_stem(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the arguments of a VisionTransformer that the tensors of its stem show."""
    if (root := tensors.get("patch_embed.backbone.stem.conv.weight")) is not None:
        blocks = Counter(match[1] for name in tensors if (match := _STAGE.fullmatch(name)))
        cells = tensors["patch_embed.proj.weight"].shape[2:]
        return {
            "stem": "hybrid",
            "channels": root.shape[1],
            "patch_size": (cells[0] * REDUCTION, cells[1] * REDUCTION),
            "resnet_layers": tuple(blocks[stage] for stage in "012"),
            "resnet_width": root.shape[0],
        }
    if (kernel := tensors.get("patch_embed.backbone.0.conv.weight")) is not None:
        side = 2 ** (sum(bool(_CONV.fullmatch(name)) for name in tensors) - 1)
        depth = side.bit_length() - 1  # the last one is of 1 × 1
        width, last = tensors[f"patch_embed.backbone.{depth}.conv.weight"].shape[:2]
        found = {"stem": "conv", "channels": kernel.shape[1], "patch_size": (side, side)}
        return found if width == last else {**found, "stem_width": last}
    _, channels, height, width = tensors["patch_embed.proj.weight"].shape
    return {"stem": "patch", "channels": channels, "patch_size": (height, width)}


def timm_stem(model: VisionTransformer) -> dict[str, Any]:
    """Return the keywords with which timm builds a stem of convolutions, or the ResNet of a hybrid one."""
    if model.config.stem == "hybrid":
        width = model.config.resnet_width
        channels = tuple(width * 4 * 2**stage for stage in range(3))
        keywords = {"layers": model.config.resnet_layers, "channels": channels, "stem_chs": width}
        keywords |= {"in_chans": model.channels, "num_classes": 0, "global_pool": ""}
        return {**keywords, "preact": False, "stem_type": "same"}
    widths = conv_widths(model.patch_size, model.config.stem_width or model.width)
    count = len(widths)
    return {
        "in_chans": model.channels,
        "depth": count + 1,
        "channels": (*widths, model.width),
        "kernel_size": (*[3] * count, 1),
        "stride": (*[2] * count, 1),
    }


def timm_patch(model: VisionTransformer) -> Size:
    """Return the size of timm's patches, which are of the feature map of a stem."""
    height, width = model.patch_size
    return (1, 1) if model.config.stem == "conv" else (height // REDUCTION, width // REDUCTION)


def build_timm_stem(model: VisionTransformer) -> Any:
    """Return what timm's VisionTransformer takes as `embed_layer`, built as `LINES` build it."""
    import timm

    keywords = timm_stem(model)
    if model.config.stem == "conv":
        own = {"norm_layer": timm.layers.GroupNorm1, "act_layer": nn.GELU}
        stem = timm.models.vision_transformer_hybrid.ConvStem(**keywords, **own)
        return partial(timm.layers.HybridEmbed, backbone=stem, proj=False)
    conv = partial(timm.layers.StdConv2dSame, eps=1e-8)
    stem = timm.models.resnetv2.ResNetV2(**keywords, conv_layer=conv)
    return partial(timm.layers.HybridEmbed, backbone=stem)
