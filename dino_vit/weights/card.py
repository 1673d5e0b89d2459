"""What is said about a backbone: its facts, how other libraries open an export, and the model card."""

import re
from dataclasses import asdict
from pathlib import Path, PurePath
from typing import Any

from jinja2 import Environment

from dino_vit import __version__
from dino_vit.config.loading import write_yaml
from dino_vit.core.text import brief, printable, printable_lines, public
from dino_vit.models.backbone import Backbone
from dino_vit.models.positions import ROTARY_BASE
from dino_vit.models.timm_backbone import TimmBackbone
from dino_vit.models.vit import VisionTransformer
from dino_vit.views.eval_transform import EvalTransform, eval_transform_of
from dino_vit.weights.metadata import pretraining_of
from dino_vit.weights.reading import INTERPOLATIONS
from dino_vit.weights.stems import LINES as STEM_LINES
from dino_vit.weights.stems import timm_patch, timm_stem

FAMILIES = {192: "ViT-Ti", 384: "ViT-S", 768: "ViT-B", 1024: "ViT-L", 1280: "ViT-H", 1536: "ViT-g"}
STRUCTURE = (
    *("depth", "heads", "registers", "mlp", "mlp_ratio", "layer_scale", "qk_scale"),
    *("norm_eps", "stem", "positions", "position_mode", "dropout", "attention_dropout"),
)
MODES = {1: "L", 3: "RGB"}  # Pillow's, by the number of channels
RESAMPLE = {name: number for number, name in INTERPOLATIONS.items()}

_USAGE = {
    "timm": """\
import functools, timm, torch
norm = functools.partial(timm.layers.LayerNorm, eps={norm_eps})
{stem}model = timm.models.{name}({arguments}, norm_layer=norm{embed}).eval()
timm.models.load_checkpoint(model, {path!r})
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
_PHOTO = """\
image = ImageOps.exif_transpose(Image.open("photo.jpg")).convert({mode!r})
images = AutoImageProcessor.from_pretrained({path!r})(image, return_tensors="pt").pixel_values"""

CARD_FACTS = (
    *("architecture", "parameters", "width", "depth", "heads", "patch_size", "image_size", "channels"),
    "positions",
    *("file", "sha256", "network", "step"),
)
# By this an export tells its own card, which it replaces, from one that a person wrote.
CARD_MARK = "<!-- Written by dino-vit export, which replaces this file unless this line is removed. -->"
_CARD = """\
---
library_name: transformers
pipeline_tag: image-feature-extraction
license: {{ license }}
tags: [{% if run %}dino, self-supervised, {% endif %}vit]
---

{{ mark }}

# {{ title }}

A vision transformer that turns images into features, for search, clustering, or a classifier of your own.
{% if run %}
It was pretrained without labels ({{ "method=" ~ run.method }})
{%- if run.init %}, starting from {{ public(run.init.weights) }}{% endif %}.
Of its images only the name of their source is recorded: {{ images }}.
{% else %}
How and on which images it was trained is not recorded in the file that it was exported from.
{% endif %}
{% if license == "other" %}
No licence is stated yet. The owner has to name it as `license` at the top, or export with `--license`.
{% endif %}

| | |
|---|---|
{% for name, value in facts.items() if value is not none %}
| {{ markdown(name.replace("_", " ")) }} | {{ value }} |
{% endfor %}

## Usage

In the folder of this file (elsewhere, write its path or its name on the hub instead of `.`):

```python
{{ usage }}
```

`output` is the CLS token of each image after the final LayerNorm. Values from 0 to 1 are normalised with
mean ({{ markdown(show("mean", mean)) }}) and std ({{ markdown(show("std", std)) }}).
{% if evaluation %}

{{ evaluation }}
{% endif %}
"""


class Markdown(str):
    """Text of ours for a model card; all other text is shown as it is."""


def describe(model: Backbone) -> dict[str, Any]:
    """Return the facts about a backbone, most important first."""
    origin = asdict(model.provenance)
    if origin["bits"] and not origin["range"]:
        origin["range"] = "0 to the largest value of the type"
    a, family = model.architecture, FAMILIES.get(model.width, "ViT")
    return {
        "file": origin["source"] or None,
        "format": origin["format"] or None,
        "sha256": origin["sha256"] or None,
        **{key: origin[key] for key in ("network", "step")},
        "architecture": f"{a['name']} of timm" if "name" in a else f"{family}/{model.patch_size[0]}",
        **{key: a[key] for key in STRUCTURE if a.get(key) is not None and (a[key] or "drop" not in key)},
        **{key: a[key] for key in ("resnet_layers", "resnet_width") if a.get("stem") == "hybrid"},
        **({"stem_width": a["stem_width"]} if a.get("stem_width") else {}),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "width": model.width,
        "patch_size": list(model.patch_size) if model.has_patches else None,
        "image_size": list(model.image_size),
        "grid": list(model.grid_of(*model.image_size)),  # of patches
        "channels": model.channels,
        **{key: origin[key] for key in ("mean", "std", "bits", "range", "config")},
    }


def show(name: str, value: Any) -> str:
    """Return a fact as text."""
    if value is None:
        return "not recorded in the file"
    if name in ("patch_size", "image_size", "grid"):
        return f"{value[0]} × {value[1]}"
    if isinstance(value, tuple):
        return ", ".join(f"{number:.4g}" for number in value)
    return f"{value:,}" if name == "parameters" else str(value)


def processor_config(model: Backbone) -> dict[str, Any] | None:
    """Return how transformers prepares 8-bit photos, or None where it cannot do it as we do."""
    transform = _transform(model)
    if transform is None or model.channels not in MODES or len({*transform.size}) > 1:
        return None
    if transform.pixels.bits == 16 or transform.pixels.range is not None:
        return None
    side, crops = transform.size[0], transform.fit == "crop"
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


def _transform(model: Backbone) -> EvalTransform | None:
    """Return how images are prepared in evaluations, unless the weights do not say it."""
    known = model.channels == 3 or model.provenance.mean is not None
    return eval_transform_of(model, verbose=False) if known else None


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
        return arguments
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


def usage(model: Backbone, path: PurePath, format: str) -> str:
    """Return lines of Python that open an export and compute the CLS features of images, or of a photo."""
    origin, transform, (height, width) = model.provenance, _transform(model), model.image_size
    at_other_size = transform is not None and transform.size != model.image_size
    resized = ""
    if transform and not at_other_size and transform.fit == "whole":
        resized = f"resized ({transform.interpolation}), "
    elif transform and not at_other_size and height == width:
        side = transform.resized_side(height)
        resized = f"shorter side resized to {side} ({transform.interpolation}), centre crop, "
    shape = f"(n, {model.channels}, {height}, {width})"
    images = f"images = ...  # {shape}, float32, {resized}normalised as in the training"
    if origin.mean and origin.std:
        images += f": mean ({show('mean', origin.mean)}), std ({show('std', origin.std)})"
    photo = transform and not at_other_size and transform.code()
    if photo:
        images = photo if format == "onnx" else f"{photo}\nimages = torch.from_numpy(images)"
    if format == "huggingface" and processor_config(model):
        images = _PHOTO.format(mode=MODES[model.channels], path=str(path))
    lines = _USAGE["timm model" if format == "timm" and isinstance(model, TimmBackbone) else format]
    arguments = model_arguments(model, format)
    # Of the models of transformers that we write, its ViT alone has to be asked to resample its positions.
    resample = at_other_size and "add_pooling_layer" in arguments
    given = [f"{key}={value!r}" for key, value in arguments.items()]
    stem = ""
    if isinstance(model, VisionTransformer) and model.config.stem != "patch":
        keywords = ", ".join(f"{key}={value!r}" for key, value in timm_stem(model).items())
        stem = STEM_LINES[model.config.stem].format(arguments=keywords)
    return lines.format(
        path=str(path),
        arguments=", ".join(given),
        more="".join(f", {each}" for each in given),
        images=images,
        resample=", interpolate_pos_encoding=True" if resample else "",
        stem=stem,
        embed=", embed_layer=embed" if stem else "",
        name="eva.Eva" if model.architecture.get("positions") == "rotary" else "VisionTransformer",
        norm_eps=model.architecture.get("norm_eps"),
        reader="safetensors.torch.load_file" if path.suffix == ".safetensors" else "torch.load",
    ).rstrip()


def model_card(model: Backbone, *, license: str | None = None, evaluation: str = "") -> str:
    """Return the README.md of a Hugging Face folder; `evaluation` is Markdown."""
    described, transform, run = describe(model), _transform(model), pretraining_of(model.provenance.config)
    facts: dict[str, Any] = {}
    for name in CARD_FACTS:
        value = described.get(name)  # of a model of timm some are not known
        facts[name] = value if name in ("file", "network") or value is None else Markdown(show(name, value))
    facts["file"] = facts["file"] and Path(facts["file"]).name
    source = run.data.source if run else ()
    page = Environment(finalize=code, trim_blocks=True, keep_trailing_newline=True).from_string(_CARD)
    card = page.render(
        license=Markdown(write_yaml(license or "other")),
        mark=Markdown(CARD_MARK),
        title=facts["architecture"],
        facts=facts | {"exported by": Markdown(f"dino-vit {__version__}")},
        show=show,
        usage=Markdown(usage(model, PurePath("."), "huggingface")),
        mean=transform and transform.mean,
        std=transform and transform.std,
        run=run,
        evaluation=evaluation and Markdown(evaluation),
        images=", ".join(map(_public, [source] if isinstance(source, str) else source or ())),
        public=_public,
        markdown=Markdown,
    )
    return printable_lines(card)


def code(value: object, most: int = 300) -> str:
    """Return a value as a code span, in which nothing is markup, unless it is Markdown of ours."""
    if isinstance(value, Markdown):
        return value
    text = brief(value, most)
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    space = " " if "`" in text else ""
    return f"{fence}{space}{text}{space}{fence}".replace("|", r"\|")  # in a table


def _public(name: str) -> str:
    """Return the name of weights or images; of a path of this machine its last part only."""
    return public(name) if "://" in name or name.startswith("hf:") else printable(Path(name).name or name)
