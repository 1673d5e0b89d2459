"""A snippet of Python for each format of an export: it opens the file and embeds a photo as `dino-vit embed`.

Hugging Face rounds the corner of a crop down, where we round to even, so its crops may be a pixel apart.
"""

from pathlib import PurePath
from typing import Any

from dino_vit.data.images.pixels import IMAGENET_NORMALISATION
from dino_vit.models.backbone import Backbone
from dino_vit.models.positions import ROTARY_BASE
from dino_vit.models.timm_backbone import TimmBackbone
from dino_vit.models.vit import VisionTransformer

CROP = 224 / 256  # share of the resized shorter side
MODES = {1: "L", 3: "RGB"}  # Pillow's, by the number of channels

_OPEN = {
    "timm": """\
import timm, torch
model = timm.models.VisionTransformer({arguments})
timm.models.load_checkpoint(model, {path!r})
""",
    "timm model": """\
import timm, torch
model = timm.create_model({arguments}, checkpoint_path={path!r})
""",
    "timm, rotary": """\
import functools, timm, torch
norm = functools.partial(timm.layers.LayerNorm, eps={norm_eps})
model = timm.models.eva.Eva({arguments}, norm_layer=norm)
timm.models.load_checkpoint(model, {path!r})
""",
    "reference": """\
import functools, torch
import vision_transformer  # of github.com/facebookresearch/dino
norm = functools.partial(torch.nn.LayerNorm, eps=1e-6)
model = vision_transformer.VisionTransformer({arguments}, norm_layer=norm)
model.load_state_dict({tensors})
""",
    "huggingface": """\
from transformers import AutoImageProcessor, AutoModel
model = AutoModel.from_pretrained({path!r}, {arguments})
""",
    "onnx": """\
import onnxruntime, torch
session = onnxruntime.InferenceSession({path!r})
""",
}
_PHOTO = """\
from PIL import Image, ImageOps
image = ImageOps.exif_transpose(Image.open("photo.jpg")).convert({mode!r})
"""
_TRANSFORM = """\
from torchvision.transforms import v2
transform = v2.Compose([
    v2.PILToTensor(), v2.Resize({shorter_side}, v2.InterpolationMode.BICUBIC), v2.CenterCrop({size}),
    v2.ToDtype(torch.float32, scale=True), v2.Normalize({mean}, {std}),
])
images = transform(image)[None]
"""
_PROCESSOR = (
    'images = AutoImageProcessor.from_pretrained({path!r})(image, return_tensors="pt").pixel_values\n'
)
_COMPUTE = {
    "huggingface": "output = model.eval()(images).last_hidden_state[:, 0]",
    "onnx": 'cls, patches = session.run(None, {{"images": images.numpy()}})',
}


def photos_of(model: Backbone) -> dict[str, Any] | None:
    """Return how 8-bit photos are prepared, or None where the other libraries cannot do it as we do."""
    origin, (height, width), channels = model.provenance, model.image_size, model.channels
    mean, std = (origin.mean, origin.std) if origin is not None else (None, None)
    if (mean is None or std is None) and channels == 3:
        mean, std = IMAGENET_NORMALISATION
    scaled = origin is not None and (origin.bits == 16 or origin.range is not None)
    if mean is None or std is None or scaled or height != width or channels not in MODES:
        return None
    shorter_side = round(height / CROP)
    photos = {"channels": channels, "mode": MODES[channels], "size": height, "shorter_side": shorter_side}
    return {**photos, "mean": tuple(mean), "std": tuple(std)}


def model_arguments(model: Backbone, format: str) -> dict[str, Any]:
    """Return the arguments with which another library builds or opens the model of an export."""
    if isinstance(model, TimmBackbone):
        return model.arguments if format == "timm" else {}
    assert isinstance(model, VisionTransformer)
    a = model.architecture
    if format == "onnx":
        return {}
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
        return arguments
    arguments |= {"num_classes": a["num_classes"], "init_values": a["layer_scale"]}
    if not model.rotary:
        return {**arguments, "reg_tokens": model.registers, "no_embed_class": bool(model.registers)}
    arguments |= {"swiglu_mlp": a["mlp"] == "swiglu", "swiglu_align_to": 1}  # an Eva
    arguments |= {"num_reg_tokens": model.registers, "dynamic_img_size": True, "global_pool": "token"}
    arguments |= {"use_abs_pos_emb": False, "use_rot_pos_emb": True, "rope_type": "dinov3"}
    arguments |= {"rope_temperature": ROTARY_BASE, "rope_rotate_half": True, "use_fc_norm": False}
    return arguments


def usage(model: Backbone, path: PurePath, format: str) -> str:
    """Return lines of Python that open an export and compute the CLS features of a photo."""
    kind = format
    if format == "timm" and isinstance(model, TimmBackbone):
        kind = "timm model"
    elif format == "timm" and isinstance(model, VisionTransformer) and model.rotary:
        kind = "timm, rotary"
    arguments = ", ".join(f"{key}={value!r}" for key, value in model_arguments(model, format).items())
    photos, opening = photos_of(model), _OPEN[kind]
    if photos:
        prepare = _PHOTO + (_PROCESSOR if format == "huggingface" else _TRANSFORM)
    else:
        shape = ", ".join(map(str, ("n", model.channels, *model.image_size)))
        prepare = f"images = ...  # ({shape}), float32, normalised as in the training\n"
    facts = {"path": str(path), "arguments": arguments, "norm_eps": model.architecture.get("norm_eps")}
    facts["tensors"] = f"torch.load({str(path)!r})"
    if format == "reference" and path.suffix == ".safetensors":
        opening = f"import safetensors.torch\n{opening}"
        facts["tensors"] = f"safetensors.torch.load_file({str(path)!r})"
    lines = opening + prepare + _COMPUTE.get(format, "output = model.eval()(images)")
    return lines.format(**facts, **(photos or {})).replace(", )", ")")
