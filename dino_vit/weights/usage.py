"""Lines of Python that open an export and compute the features of a photo."""

from pathlib import PurePath

from dino_vit.models.backbone import Backbone
from dino_vit.models.timm_backbone import TimmBackbone
from dino_vit.models.vit import VisionTransformer
from dino_vit.weights.formats.builders import (
    MODES,
    is_folder,
    model_arguments,
    processor_config,
    transform_of,
)
from dino_vit.weights.formats.stems import LINES as STEM_LINES
from dino_vit.weights.formats.stems import timm_stem

_USAGE = {
    "timm": """\
import functools, timm, torch
norm = functools.partial(timm.layers.LayerNorm, eps={norm_eps})
{stem}model = timm.models.{name}({arguments}, norm_layer=norm{embed}).eval()
timm.models.load_checkpoint(model, {path!r})
{images}
output = model(images)
""",
    "timm folder": """\
import timm
from PIL import Image, ImageOps
model = timm.create_model({folder!r}, pretrained=True).eval()
{images}
output = model(images)
""",
    "timm model": """\
import timm, torch
model = timm.create_model({arguments}, checkpoint_path={path!r}).eval()
{images}
output = model(images)
""",
    "reference": """\
import functools, safetensors.torch, torch
import vision_transformer  # of github.com/facebookresearch/dino
norm = functools.partial(torch.nn.LayerNorm, eps=1e-6)
model = vision_transformer.VisionTransformer({arguments}, norm_layer=norm).eval()
model.load_state_dict({reader}({path!r}))
{images}
output = model(images)
""",
    "huggingface": """\
from PIL import Image, ImageOps
from transformers import AutoImageProcessor, AutoModel
model = AutoModel.from_pretrained({path!r}{more}).eval()
{images}
output = model(images{resample}).last_hidden_state[:, 0]
""",
    "onnx": """\
import onnxruntime
session = onnxruntime.InferenceSession({path!r})
{images}
cls, patches = session.run(None, {{"images": images}})
""",
}
_TIMM_PHOTO = """\
transform = timm.data.create_transform(**timm.data.resolve_data_config(model=model))
image = ImageOps.exif_transpose(Image.open("photo.jpg")).convert({mode!r})
images = transform(image)[None]"""
_PHOTO = """\
image = ImageOps.exif_transpose(Image.open("photo.jpg")).convert({mode!r})
images = AutoImageProcessor.from_pretrained({path!r})(image, return_tensors="pt").pixel_values"""


def usage(model: Backbone, path: PurePath, format: str) -> str:
    """Return lines of Python that open an export and compute the CLS features of images, or of a photo."""
    origin, transform, (height, width) = model.provenance, transform_of(model), model.image_size
    at_other_size = transform is not None and transform.size != model.image_size
    shape = f"(n, {model.channels}, {height}, {width})"
    images = f"images = ...  # {shape}, float32, normalised as in the training"
    if origin.mean and origin.std:
        mean, std = (", ".join(f"{x:.4g}" for x in values) for values in (origin.mean, origin.std))
        images += f": mean ({mean}), std ({std})"
    photo = transform and not at_other_size and transform.code()
    if photo:
        images = photo if format == "onnx" else f"{photo}\nimages = torch.from_numpy(images)"
    if format == "huggingface" and processor_config(model):
        images = _PHOTO.format(mode=MODES[model.channels], path=str(path))
    kind = format
    if format == "timm" and is_folder(path, format):
        kind = "timm folder"
        if transform and transform.code():  # which timm can prepare too
            images = _TIMM_PHOTO.format(mode=MODES[model.channels])
    elif format == "timm" and isinstance(model, TimmBackbone):
        kind = "timm model"
    arguments = model_arguments(model, format)
    # Of the models of transformers that we write, its ViT alone has to be asked to resample its positions.
    resample = at_other_size and "add_pooling_layer" in arguments
    given = [f"{key}={value!r}" for key, value in arguments.items()]
    stem = ""
    if isinstance(model, VisionTransformer) and model.config.stem != "patch":
        keywords = ", ".join(f"{key}={value!r}" for key, value in timm_stem(model).items())
        stem = STEM_LINES[model.config.stem].format(arguments=keywords)
    return (
        _USAGE[kind]
        .format(
            path=str(path),
            arguments=", ".join(given),
            more="".join(f", {each}" for each in given),
            folder=f"local-dir:{path}",
            images=images,
            resample=", interpolate_pos_encoding=True" if resample else "",
            stem=stem,
            embed=", embed_layer=embed" if stem else "",
            name="eva.Eva" if model.architecture.get("positions") == "rotary" else "VisionTransformer",
            norm_eps=model.architecture.get("norm_eps"),
            reader="safetensors.torch.load_file" if path.suffix == ".safetensors" else "torch.load",
        )
        .rstrip()
    )
