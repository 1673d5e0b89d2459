"""How another library opens an export: the arguments of its model, and lines of Python for the user.

The lines prepare a photo as `dino-vit embed` does: they resize its shorter side and crop the centre. Two
differences remain. Hugging Face rounds the corner of the crop down, where torchvision, timm and we round to
even: the crops are a pixel apart if the resized image is larger by 3, 7, 11, ... pixels. And others
resize the shorter side of every image to 256/224 of the crop, whose border they cut off; one that is not
larger than the crop we resize to the crop itself.
"""

import math
from pathlib import PurePath
from typing import Any, NamedTuple

from torch import nn

from dino_vit.data.images.pixels import IMAGENET_NORMALISATION
from dino_vit.models.backbone import Backbone
from dino_vit.models.positions import ROTARY_BASE
from dino_vit.models.timm_backbone import TimmBackbone
from dino_vit.models.vit import VisionTransformer

MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}  # Pillow's, by the number of channels
CROP = 224 / 256  # share of the resized shorter side

_OPEN = {
    "timm": """\
import timm
model = timm.models.VisionTransformer({arguments})
timm.models.load_checkpoint(model, {path!r})
""",
    "timm's own": """\
import timm
model = timm.create_model({arguments}, checkpoint_path={path!r})
""",
    "onnx": """\
import onnxruntime
session = onnxruntime.InferenceSession({path!r})
""",
    "pt2": """\
import torch
model = torch.export.load({path!r}).module()
""",
    "timm, rotary": """\
import functools, timm
model = timm.models.eva.Eva({arguments})
timm.models.load_checkpoint(model, {path!r})
""",
    "torchvision": """\
import torch
from torchvision.models import VisionTransformer
model = VisionTransformer({arguments})
model.heads = torch.nn.Identity()
model.load_state_dict({tensors})
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
}
_TRANSFORM = """\
from torchvision.transforms import v2
transform = v2.Compose([
    v2.PILToTensor(), v2.Resize({shorter_side}, v2.InterpolationMode.BICUBIC), v2.CenterCrop({size}),
    v2.ToDtype(torch.float32, scale=True), v2.Normalize({mean}, {std}),
])
"""
_PREPARE = {
    "timm": """\
transform = timm.data.create_transform(
    ({channels}, {size}, {size}), interpolation="bicubic", crop_pct={crop_pct:.6g}, mean={mean}, std={std}
)
""",
    "torchvision": _TRANSFORM,
    "reference": _TRANSFORM,
    "onnx": f"import torch\n{_TRANSFORM}",
    "pt2": _TRANSFORM,
    "huggingface": "processor = AutoImageProcessor.from_pretrained({path!r})\n",
}
_PHOTO = """\
from PIL import Image, ImageOps
image = ImageOps.exif_transpose(Image.open("photo.jpg")).convert({mode!r})
"""


class LayerNorm(NamedTuple):
    """A LayerNorm as an argument of timm's models."""

    eps: float

    def __call__(self, width: int, **keywords: Any) -> nn.Module:
        return nn.LayerNorm(width, eps=self.eps, **keywords)

    def __repr__(self) -> str:
        return f"functools.partial(timm.layers.LayerNorm, eps={self.eps:g})"


class Photos(NamedTuple):
    """How 8-bit photos are prepared for a backbone."""

    channels: int
    mode: str  # of Pillow
    size: int
    shorter_side: int  # before the centre is cropped
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def crop_pct(self) -> float:
        """What timm divides the size by, to round it down where we round to the nearest."""
        exact = math.floor(self.size / CROP) == self.shorter_side
        return CROP if exact else self.size / (self.shorter_side + 0.5)

    @property
    def processor(self) -> dict[str, Any]:
        """What Hugging Face prepares them by, its preprocessor_config.json."""
        return {
            "image_processor_type": "BitImageProcessor",
            "do_convert_rgb": self.channels == 3,
            "do_resize": True,
            "size": {"shortest_edge": self.shorter_side},
            "resample": 3,
            "do_center_crop": True,
            "crop_size": {"height": self.size, "width": self.size},
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": self.mean,
            "image_std": self.std,
        }


def photos_of(model: Backbone, format: str) -> Photos | None:
    """Return how photos are prepared, or None where the other library cannot do it as we do."""
    known, (height, width), channels = model.provenance, model.image_size, model.channels
    mean, std = (known.mean, known.std) if known is not None else (None, None)
    if (mean is None or std is None) and channels == 3:
        mean, std = IMAGENET_NORMALISATION
    deep = known is not None and (known.bits == 16 or known.range is not None)
    # Pillow, which timm resizes by, multiplies colours by their alpha.
    supported = channels in MODES and not (format == "timm" and channels in (2, 4))
    if mean is None or std is None or deep or height != width or not supported:
        return None
    return Photos(channels, MODES[channels], height, round(height / CROP), tuple(mean), tuple(std))


def model_arguments(model: Backbone, format: str) -> dict[str, Any]:
    """Return the arguments with which another library builds or opens the model of an export."""
    if isinstance(model, TimmBackbone):
        return model.arguments if format == "timm" else {}
    assert isinstance(model, VisionTransformer)
    a, size, patch = model.architecture, model.image_size[0], model.patch_size[0]
    sizes = {"depth": model.depth, "num_heads": model.heads}
    if format == "timm":
        arguments = {
            "img_size": model.image_size,
            "patch_size": model.patch_size,
            "in_chans": model.channels,
            "num_classes": a["num_classes"],
            "embed_dim": model.width,
            **sizes,
            "mlp_ratio": a["mlp_ratio"],
            "qkv_bias": a["qkv_bias"],
            "init_values": a["layer_scale"],
        }
        if model.rotary:  # an Eva
            arguments |= {"swiglu_mlp": a["mlp"] == "swiglu", "swiglu_align_to": 1}
            arguments |= {"num_reg_tokens": model.registers}
            arguments |= {"use_abs_pos_emb": False, "use_rot_pos_emb": True, "rope_type": "dinov3"}
            arguments |= {"rope_temperature": ROTARY_BASE, "rope_rotate_half": True, "use_fc_norm": False}
            arguments |= {"dynamic_img_size": True, "global_pool": "token"}
            return {**arguments, "norm_layer": LayerNorm(a["norm_eps"])}
        return {
            **arguments,
            "reg_tokens": model.registers,
            "no_embed_class": bool(model.registers),
        }
    if format == "reference":
        sizes |= {"patch_size": patch, "in_chans": model.channels, "embed_dim": model.width}
        return {"img_size": [size], **sizes, "mlp_ratio": a["mlp_ratio"], "qkv_bias": True}
    if format == "torchvision":
        hidden = {"hidden_dim": model.width, "mlp_dim": round(model.width * a["mlp_ratio"])}
        sizes = {"num_layers": model.depth, "num_heads": model.heads}
        return {"image_size": size, "patch_size": patch, **sizes, **hidden}
    if format in ("onnx", "pt2"):
        return {}
    # A ViT of Hugging Face has a pooler, which is no part of the export.
    return {"add_pooling_layer": False} if a["layer_scale"] is None and not model.rotary else {}


def usage(model: Backbone, path: PurePath, format: str) -> str:
    """Return lines of Python that open an export and compute the CLS features of a photo."""
    photos, name = photos_of(model, format), repr(str(path))
    safe, huggingface = path.suffix == ".safetensors", format == "huggingface"
    facts: dict[str, Any] = {
        "path": str(path),
        "arguments": ", ".join(f"{key}={value!r}" for key, value in model_arguments(model, format).items()),
        "tensors": f"safetensors.torch.load_file({name})" if safe else f"torch.load({name})",
    }
    key = format
    if format == "timm" and isinstance(model, TimmBackbone):
        key = "timm's own"
    elif format == "timm" and isinstance(model, VisionTransformer) and model.rotary:
        key = "timm, rotary"
    opened = _OPEN[key]
    lines = ("import safetensors.torch\n" if safe and "{tensors}" in opened else "") + opened
    if photos:
        facts |= {**photos._asdict(), "crop_pct": photos.crop_pct}
        lines += _PREPARE[format] + _PHOTO
        images = '**processor(image, return_tensors="pt")' if huggingface else "transform(image)[None]"
    else:
        shape = ", ".join(map(str, ("n", model.channels, *model.image_size)))
        lines += f"images = ...  # ({shape}), float32, normalised as in the training\n"
        images = "images"
    if format == "onnx":
        lines += f'cls, patches = session.run(None, {{{{"images": {images}.numpy()}}}})'
    elif format == "pt2":
        lines += f"cls, patches = model({images})"
    else:
        cls = ".last_hidden_state[:, 0]" if huggingface else ""
        lines += f"output = model.eval()({images}){cls}"
    return lines.format(**facts).replace(", )", ")")
