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
from dino_vit.weights.metadata import pretraining_of

FAMILIES = {192: "ViT-Ti", 384: "ViT-S", 768: "ViT-B", 1024: "ViT-L", 1280: "ViT-H", 1536: "ViT-g"}
STRUCTURE = (
    *("depth", "heads", "registers", "mlp", "mlp_ratio", "layer_scale", "qk_scale"),
    *("norm_eps", "stem", "positions", "position_mode", "dropout", "attention_dropout"),
)

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

CARD_FACTS = (
    *("architecture", "parameters", "width", "depth", "heads", "patch_size", "image_size", "channels"),
    "positions",
    *("file", "sha256", "network", "step"),
)
# By this an export tells its own card, which it replaces, from one that a person wrote.
CARD_MARK = "<!-- Written by dino-vit export, which replaces this file unless this line is removed. -->"
_CARD = """\
---
library_name: {{ library }}
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

In the folder of this file (elsewhere, write its path or {{ elsewhere }} instead of `{{ here }}`):

```python
{{ usage }}
```

`output` is {{ output }} of each image{{ after }}. Values from 0 to 1 are normalised with
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


def usage(model: Backbone, path: PurePath, format: str) -> str:
    """Return lines of Python that open an export and compute the CLS features of images, or of a photo."""
    origin, transform, (height, width) = model.provenance, transform_of(model), model.image_size
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


def model_card(
    model: Backbone, format: str = "huggingface", *, license: str | None = None, evaluation: str = ""
) -> str:
    """Return the README.md of a folder for transformers or timm; `evaluation` is Markdown."""
    described, transform, run = describe(model), transform_of(model), pretraining_of(model.provenance.config)
    facts, is_timm = dict[str, Any](), isinstance(model, TimmBackbone)
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
        usage=Markdown(usage(model, PurePath("."), format)),
        library=Markdown("timm" if format == "timm" else "transformers"),
        elsewhere=Markdown("`hf-hub:OWNER/NAME` of the hub" if format == "timm" else "its name on the hub"),
        here=Markdown("local-dir:." if format == "timm" else "."),
        output=Markdown("the pooled features" if is_timm else "the CLS token"),
        after=Markdown("" if is_timm else " after the final LayerNorm"),
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
