"""How other libraries build the model of an export: their arguments, and the config.json of a folder."""

import math
from pathlib import PurePath
from typing import Any

from dino_vit.models.backbone import Backbone
from dino_vit.models.positions import ROTARY_BASE
from dino_vit.models.timm_backbone import TimmBackbone
from dino_vit.models.vit import VisionTransformer
from dino_vit.views.eval_transform import EvalTransform, eval_transform_of
from dino_vit.weights.formats.stems import timm_patch
from dino_vit.weights.metadata import WeightsError
from dino_vit.weights.read_file import INTERPOLATIONS

MODES = {1: "L", 3: "RGB"}  # Pillow's, by the number of channels
RESNET_50 = (3, 4, 9), 64  # blocks and width of the hybrid stem that timm has a name for
# Models of timm by width, as which a folder names ours; model_args has all in which it differs.
TIMM_NAMES = {192: "vit_tiny_patch16_224", 768: "vit_base_patch16_224", 1024: "vit_large_patch16_224"}
TIMM_NAMES |= {1280: "vit_huge_patch14_224"}
# Of rotary ones the same by the epsilon of their LayerNorms, which is no part of model_args.
ROTARY_NAMES = {1e-6: "eva02_small_patch14_224", 1e-5: "vit_small_patch16_dinov3"}
RESAMPLE = {name: number for number, name in INTERPOLATIONS.items()}


def is_folder(path: PurePath, format: str) -> bool:
    """Tell whether an export of this name is a folder; of timm it is one without a suffix."""
    return format == "huggingface" or (format == "timm" and not path.suffix)


def model_arguments(model: Backbone, format: str) -> dict[str, Any]:
    """Return the arguments with which another library builds or opens the model of an export."""
    if isinstance(model, TimmBackbone):
        return model.arguments
    assert isinstance(model, VisionTransformer)
    a = model.architecture
    if format == "huggingface":  # whose ViT has a pooler, which is no part of the export
        return {"add_pooling_layer": False} if a["layer_scale"] is None and not model.rotary else {}
    arguments = {
        "img_size": [model.image_size[0]] if format == "reference" else model.image_size,
        "patch_size": model.patch_size[0] if format == "reference" else model.patch_size,
        "in_chans": model.channels,
        "embed_dim": model.width,
        "depth": model.depth,
        "num_heads": model.heads,
        "mlp_ratio": a["mlp_ratio"],
        "qkv_bias": a["qkv_bias"],
    }
    if format == "reference":
        return arguments | ({"num_classes": a["num_classes"]} if a["num_classes"] else {})
    if model.config.stem != "patch":  # timm's patches are of the feature map of a stem
        arguments["patch_size"] = timm_patch(model)
    arguments |= {"num_classes": a["num_classes"], "init_values": a["layer_scale"]}
    if not model.rotary:
        return {**arguments, "reg_tokens": model.registers, "no_embed_class": bool(model.registers)}
    arguments |= {"swiglu_mlp": a["mlp"] == "swiglu", "swiglu_align_to": 1}  # an Eva
    arguments |= {"num_reg_tokens": model.registers, "dynamic_img_size": True, "global_pool": "token"}
    arguments |= {"use_abs_pos_emb": False, "use_rot_pos_emb": True, "rope_type": "dinov3"}
    arguments |= {"rope_temperature": ROTARY_BASE, "rope_rotate_half": True, "use_fc_norm": False}
    return arguments


def timm_name(model: Backbone) -> str:
    """Return the model of timm that builds ours with other arguments, or raise WeightsError."""
    if isinstance(model, TimmBackbone):
        return model.name.partition(".")[0]
    assert isinstance(model, VisionTransformer)
    a, stem = model.architecture, model.architecture["stem"]
    resnet = (a["resnet_layers"], a["resnet_width"]) == RESNET_50
    # Where timm's own model has a layer scale, None would not take it away.
    scaled = a["layer_scale"] is not None or a["norm_eps"] == 1e-6
    if model.rotary and scaled and a["norm_eps"] in ROTARY_NAMES:
        return ROTARY_NAMES[a["norm_eps"]]
    if not model.rotary and stem == "patch":
        return TIMM_NAMES.get(model.width, "vit_small_patch16_224")
    if not model.rotary and stem == "hybrid" and resnet:
        return "vit_base_r50_s16_224"
    names = ("positions", "norm_eps", "layer_scale") if model.rotary else ("stem", "resnet_layers")
    raise WeightsError(
        f"timm.create_model cannot build {', '.join(f'{name}={a[name]}' for name in names)}, so no folder is "
        "written; give the name of a file, such as vit.pth, which the printed lines open"
    )


def timm_config(model: Backbone) -> dict[str, Any]:
    """Return the config.json by which timm.create_model builds a model and prepares its images."""
    transform, arguments = transform_of(model), model_arguments(model, "timm")
    size = transform.size if transform else model.image_size
    arguments = {key: value for key, value in arguments.items() if value is not None and key != "model_name"}
    if isinstance(model, TimmBackbone):
        fixed = {key: model.model.pretrained_cfg.get(key) for key in ("first_conv", "classifier")}
    else:
        convolution = {"hybrid": "backbone.stem.conv"}.get(model.architecture["stem"], "proj")
        fixed = {"first_conv": f"patch_embed.{convolution}", "classifier": "head"}
        arguments |= {"dynamic_img_size": True} if size != model.image_size else {}
    prepared: dict[str, Any] = {}
    if transform is not None:
        crops, side = transform.resize_mode == "crop", transform.resized_side(size[0])
        prepared = {"mean": transform.mean, "std": transform.std, "interpolation": transform.interpolation}
        prepared |= {"crop_mode": "center" if crops else "squash"}
        prepared |= {"crop_pct": _crop_share(size[0], side) if crops else 1.0}
    classes = getattr(model.config, "num_classes", 0)
    is_fixed = "img_size" in arguments and not arguments.get("dynamic_img_size")
    return {
        "architecture": timm_name(model),
        "num_classes": classes,
        "num_features": model.width,
        "model_args": arguments,
        "pretrained_cfg": {
            "input_size": (model.channels, *size),
            "fixed_input_size": is_fixed,
            "num_classes": classes,
            **{key: value for key, value in fixed.items() if value},
            **prepared,
        },
    }


def _crop_share(crop: int, side: int) -> float:
    """Return the share by which timm divides the side of a crop and rounds down to that of the image."""
    share = crop / side
    return share if math.floor(crop / share) == side else math.nextafter(share, 0)


def huggingface_config(model: Backbone) -> dict[str, Any]:
    a, gated = model.architecture, model.architecture["mlp"] == "swiglu"
    config = {
        "hidden_size": model.width,
        "num_hidden_layers": model.depth,
        "num_attention_heads": model.heads,
        "image_size": model.image_size[0],
        "patch_size": model.patch_size[0],
        "num_channels": model.channels,
        "qkv_bias": a["qkv_bias"],
        "layer_norm_eps": a["norm_eps"],
        "hidden_act": "gelu",
        "torch_dtype": "float32",
    }
    hidden = {"intermediate_size": round(model.width * a["mlp_ratio"])}
    if a["positions"] == "rotary":
        bias = {f"{name}_bias": a["qkv_bias"] for name in ("query", "value")}
        config |= {**bias, "key_bias": False, "mlp_bias": True, "proj_bias": True, "rope_theta": ROTARY_BASE}
        config |= {**hidden, "use_gated_mlp": gated, "hidden_act": "silu" if gated else "gelu"}
        config |= {"layerscale_value": 1.0, "pos_embed_rescale": a["rotary_rescale"]}
        config |= {"num_register_tokens": model.registers}
        return {**config, "model_type": "dinov3_vit", "architectures": ["DINOv3ViTModel"]}
    if a["layer_scale"] is None:
        return {**config, **hidden, "model_type": "vit", "architectures": ["ViTModel"]}
    config |= {"mlp_ratio": dinov2_mlp(model)[0], "use_swiglu_ffn": gated, "layerscale_value": 1.0}
    if not model.registers:
        return {**config, "model_type": "dinov2", "architectures": ["Dinov2Model"]}
    names = {"model_type": "dinov2_with_registers", "architectures": ["Dinov2WithRegistersModel"]}
    return {**config, **names, "num_register_tokens": model.registers}


def dinov2_mlp(model: Backbone) -> tuple[int, int]:
    """Return the integer mlp_ratio of a DINOv2 config, and the hidden width that it means in transformers."""
    ratio: float = model.architecture["mlp_ratio"]
    if model.architecture["mlp"] != "swiglu":
        return round(ratio), model.width * round(ratio)
    stated = round(ratio * 3 / 2)  # gated MLPs use two thirds of it, rounded up to a multiple of 8
    return stated, (model.width * stated * 2 // 3 + 7) // 8 * 8


def processor_config(model: Backbone) -> dict[str, Any] | None:
    """Return how transformers prepares 8-bit photos, or None where it cannot do it as we do."""
    transform = transform_of(model)
    if transform is None or model.channels not in MODES or len({*transform.size}) > 1:
        return None
    if transform.pixels.bits == 16 or transform.pixels.range is not None:
        return None
    side, crops = transform.size[0], transform.resize_mode == "crop"
    crop = {"height": side, "width": side}
    return {
        "image_processor_type": "BitImageProcessor",
        "do_convert_rgb": model.channels == 3,
        "size": {"shortest_edge": transform.resized_side(side)} if crops else crop,
        "resample": RESAMPLE[transform.interpolation],
        "do_center_crop": crops,
        "crop_size": crop,
        "image_mean": transform.mean,
        "image_std": transform.std,
    }


def transform_of(model: Backbone) -> EvalTransform | None:
    """Return how images are prepared in evaluations, unless the weights do not say it."""
    known = model.channels == 3 or model.provenance.mean is not None
    return eval_transform_of(model, verbose=False) if known else None
