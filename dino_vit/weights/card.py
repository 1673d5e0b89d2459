"""What is said about a backbone: its facts, the Python lines that open an export, and the model card.

The lines embed a photo as `dino-vit embed` does. Hugging Face rounds the corner of a crop down, where we
round to even, so its crops may be a pixel apart.
"""

from dataclasses import asdict
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

from jinja2 import Template

from dino_vit import __version__
from dino_vit.config.loading import load, write_yaml
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.config.settings import ConfigError, result_changes
from dino_vit.core.text import printable, printable_lines
from dino_vit.data.images.pixels import IMAGENET_NORMALISATION
from dino_vit.models.backbone import Backbone
from dino_vit.models.positions import ROTARY_BASE
from dino_vit.models.timm_backbone import TimmBackbone
from dino_vit.models.vit import VisionTransformer

FAMILIES = {192: "ViT-Ti", 384: "ViT-S", 768: "ViT-B", 1024: "ViT-L", 1280: "ViT-H", 1536: "ViT-g"}
STRUCTURE = (
    *("depth", "heads", "registers", "mlp", "mlp_ratio", "layer_scale"),
    *("stem", "norm_eps", "positions", "position_mode"),
)
CROP = 224 / 256  # share of the resized shorter side
MODES = {1: "L", 3: "RGB"}  # Pillow's, by the number of channels

_OPEN = {
    "timm": """\
import functools, timm, torch
norm = functools.partial(timm.layers.LayerNorm, eps={norm_eps})
model = timm.models.{name}({arguments}, norm_layer=norm)
timm.models.load_checkpoint(model, {path!r})
""",
    "timm model": """\
import timm, torch
model = timm.create_model({arguments}, checkpoint_path={path!r})
""",
    "reference": """\
import functools, safetensors.torch, torch
import vision_transformer  # of github.com/facebookresearch/dino
norm = functools.partial(torch.nn.LayerNorm, eps=1e-6)
model = vision_transformer.VisionTransformer({arguments}, norm_layer=norm)
model.load_state_dict({reader}({path!r}))
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

# By this an export tells its own card, which it replaces, from one that a person wrote.
CARD_MARK = "<!-- Written by dino-vit export, which replaces this file unless this line is removed. -->"
CARD_FACTS = (
    *("architecture", "parameters", "width", "depth", "heads", "patch_size", "image_size", "channels"),
    *("file", "sha256", "network", "step"),
)
PAPERS = {
    "dino": "[DINO](https://arxiv.org/abs/2104.14294)",
    "dinov2": "[DINOv2](https://arxiv.org/abs/2304.07193)",
}
_CARD = """\
---
library_name: transformers
pipeline_tag: image-feature-extraction
license: {{ license }}
tags: [{% if run %}dino, self-supervised, {% endif %}vit]
---

{{ mark }}

# {{ facts.architecture }}

A vision transformer that turns images into features, for search, clustering, or a classifier of your own.
{% if run %}
It was pretrained without labels, with the objective of {{ paper }}
{%- if run.init %}, starting from `{{ public(run.init.weights) }}`{% endif %}.
Of its images only the name of their source is recorded: `{{ public(run.data.source) }}`.
{% else %}
How and on which images it was trained is not recorded in the file that it was exported from.
{% endif %}
What the images show, and who may use them, is for the owner of these weights to state.
{% if license == "other" %}
No licence is stated yet. The owner has to name it as `license` at the top, or export with `--license`.
{% endif %}

| | |
|---|---|
{% for name in names %}
| {{ name.replace("_", " ") }} | {{ show(name, facts[name]) }} |
{% endfor %}
| exported by | dino-vit {{ version }} |

## Usage

{% if name == "." %}
In the folder of this file (elsewhere, write the path of the folder instead of `.`):

{% endif %}
```python
{{ usage }}
```

`output` has {{ facts.width }} features per image: the CLS token after the final LayerNorm.
Values from 0 to 1 are normalised with
mean ({{ show("mean", pixels.mean) }}) and std ({{ show("std", pixels.std) }}).
{% if run %}

## Training

{% if evaluation %}
{{ evaluation }}

{% endif %}
The settings that differ from the defaults of `method={{ run.method }}`:

```yaml
{% for key, (_, value) in changes.items() %}
{{ key }}: {{ write(public(value)) }}
{% endfor %}
```
{% endif %}
"""


def describe(model: Backbone) -> dict[str, Any]:
    """Return the facts about a backbone, most important first."""
    origin = asdict(model.provenance) if model.provenance else {}
    if origin.get("bits") and not origin["range"]:
        origin["range"] = "0 to the largest value of the type"
    a, family = model.architecture, FAMILIES.get(model.width, "ViT")
    return {
        "file": origin.get("source"),
        **{key: origin.get(key) for key in ("format", "sha256", "network", "step")},
        "architecture": f"{a['name']} of timm" if "name" in a else f"{family}/{model.patch_size[0]}",
        **{key: a[key] for key in STRUCTURE if a.get(key) is not None},
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "width": model.width,
        "patch_size": list(model.patch_size) if model.has_patches else None,
        "image_size": list(model.image_size),
        "grid": list(model.grid_of(*model.image_size)),  # of patches
        "channels": model.channels,
        **{key: origin.get(key) for key in ("mean", "std", "bits", "range")},
        "config": origin.get("config", {}),
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
    photos = photos_of(model)
    opening = _OPEN["timm model" if format == "timm" and isinstance(model, TimmBackbone) else format]
    prepare = _PHOTO + (_PROCESSOR if format == "huggingface" else _TRANSFORM)
    if photos is None:
        shape = ", ".join(map(str, ("n", model.channels, *model.image_size)))
        prepare = f"images = ...  # ({shape}), float32, normalised as in the training\n"
    facts = {
        "path": str(path),
        "arguments": ", ".join(f"{key}={value!r}" for key, value in model_arguments(model, format).items()),
        "name": "eva.Eva" if model.architecture.get("positions") == "rotary" else "VisionTransformer",
        "norm_eps": model.architecture.get("norm_eps"),
        "reader": "safetensors.torch.load_file" if path.suffix == ".safetensors" else "torch.load",
    }
    lines = opening + prepare + _COMPUTE.get(format, "output = model.eval()(images)")
    return lines.format(**facts, **(photos or {})).replace(", )", ")")


def model_card(model: Backbone, *, name: str = ".", license: str | None = None, evaluation: str = "") -> str:
    """Return the README.md of a Hugging Face folder; `name` is what its lines of Python open."""
    facts, run = describe(model), _pretraining(model)
    facts["file"] = facts["file"] and Path(facts["file"]).name
    card = Template(_CARD, trim_blocks=True, keep_trailing_newline=True).render(
        license=write_yaml(license or "other"),
        mark=CARD_MARK,
        facts=facts,
        names=[key for key in CARD_FACTS if facts.get(key) is not None],
        show=show,
        version=__version__,
        name=name,
        usage=usage(model, PurePosixPath(name), "huggingface"),
        pixels=photos_of(model) or facts,
        run=run,
        paper=run and PAPERS[run.method],
        evaluation=evaluation,
        changes=result_changes(run, PretrainConfig(method=run.method)) if run else {},
        public=_public,
        write=write_yaml,
    )
    return printable_lines(card)


def is_own_card(path: Path) -> bool:
    """Return whether a file is a card that an export wrote and nobody has claimed since."""
    return path.is_file() and CARD_MARK.encode() in path.read_bytes()


def _pretraining(model: Backbone) -> PretrainConfig | None:
    """Return the settings of the pretraining that a backbone comes from, if it is one of ours."""
    settings = model.provenance.config if model.provenance else {}
    try:
        return load(PretrainConfig, None, settings) if settings else None
    except ConfigError:  # of a fine-tuning, or of another version
        return None


def _public(value: object) -> object:
    """Return a setting; of a path outside of the project its last name only."""
    if not isinstance(value, str):
        return value
    outside = Path(value).is_absolute() or value.startswith(("~", ".."))
    return printable(Path(value).name if outside else value)
