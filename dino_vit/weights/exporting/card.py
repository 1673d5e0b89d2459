"""The facts about a backbone, and the model card that states them in a Hugging Face folder."""

from pathlib import Path, PurePosixPath
from typing import Any

from jinja2 import Template

from dino_vit import __version__
from dino_vit.config import yaml
from dino_vit.config.loading import load
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.config.settings import ConfigError, result_changes
from dino_vit.core.text import printable, printable_lines
from dino_vit.models.backbone import Backbone
from dino_vit.models.vit import VisionTransformer
from dino_vit.weights.exporting.usage import photos_of, usage

FAMILIES = {192: "ViT-Ti", 384: "ViT-S", 768: "ViT-B", 1024: "ViT-L", 1280: "ViT-H", 1536: "ViT-g"}
# By this an export tells its own card, which it replaces, from one that a person wrote.
CARD_MARK = "<!-- Written by dino-vit export, which replaces this file unless this line is removed. -->"
SHOWN = (
    *("architecture", "parameters", "width", "depth", "heads", "patch_size", "image_size", "channels"),
    *("file", "sha256", "network", "step"),
)

_CARD = """\
---
library_name: transformers
pipeline_tag: image-feature-extraction
license: {{ license }}
tags: [{% if run %}dino, self-supervised, {% endif %}vit]
---

{{ mark }}

# {{ facts.architecture }}{% if run %}, pretrained without labels{% endif %}


A vision transformer that turns images into features, for search, clustering, or a classifier of your own.
{% if run %}
It was pretrained on images without labels, with the objective of
{% if run.method == "dinov2" %}[DINOv2](https://arxiv.org/abs/2304.07193)
{%- else %}[DINO](https://arxiv.org/abs/2104.14294){% endif %}
{% if run.init %}, starting from `{{ public(run.init.weights) }}`{% endif %}.
{% else %}
How it was trained is not recorded in the file that it was exported from.
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
{% if photos %}
The processor resizes the shorter side to {{ photos.shorter_side }} pixels and crops the centre.
{% else %}
No processor of transformers prepares such images (range of the values: {{ show("range", facts.range) }}).
{% endif %}
Values from 0 to 1 are normalised with
mean ({{ show("mean", (photos or facts).mean) }}) and std ({{ show("std", (photos or facts).std) }}).
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

## Limits

{% if run %}
- Of the images of the training, only the name of their source is recorded: `{{ public(run.data.source) }}`.
{% else %}
- The images of the training are not recorded.
{% endif %}
  What they show, and who may use them, is for the owner of these weights to state.
- Measure the features on images of your own before you rely on them.
{% if license == "other" %}
- No licence is stated yet. The owner has to name it as `license` at the top, or export with `--license`.
{% endif %}
"""


def model_card(model: Backbone, *, name: str = ".", license: str | None = None, evaluation: str = "") -> str:
    """Return the README.md of a Hugging Face folder; `name` is what its lines of Python open."""
    facts, run = describe(model), _pretraining(model)
    facts["file"] = facts["file"] and printable(Path(facts["file"]).name)
    card = Template(_CARD, trim_blocks=True, keep_trailing_newline=True).render(
        license=yaml.write(license or "other"),
        mark=CARD_MARK,
        facts=facts,
        names=[key for key in SHOWN if facts.get(key) is not None],
        show=show,
        version=__version__,
        name=name,
        usage=usage(model, PurePosixPath(name), "huggingface"),
        photos=photos_of(model),
        run=run,
        evaluation=evaluation,
        changes=result_changes(run, PretrainConfig(method=run.method)) if run else {},
        public=_public,
        write=yaml.write,
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


def describe(model: Backbone) -> dict[str, Any]:
    """Return the facts about a backbone, most important first."""
    provenance = model.provenance
    origin = {name: getattr(provenance, name, None) for name in ("format", "sha256", "network", "step")}
    pixels = {name: getattr(provenance, name, None) for name in ("mean", "std", "bits", "range")}
    if pixels["bits"] and not pixels["range"]:
        pixels["range"] = "0 to the largest value of the type"
    return {
        "file": provenance.source if provenance else None,
        **origin,
        **(_of_transformer(model) if isinstance(model, VisionTransformer) else _of_timm(model)),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "width": model.width,
        "patch_size": list(model.patch_size) if model.has_patches else None,
        "image_size": list(model.image_size),
        "grid": list(model.grid_of(*model.image_size)),  # of patches
        "channels": model.channels,
        **pixels,
        "config": provenance.config if provenance else {},
    }


def _of_transformer(model: VisionTransformer) -> dict[str, Any]:
    a = model.architecture
    return {
        "architecture": f"{FAMILIES.get(model.width, 'ViT')}/{model.patch_size[0]}",
        **{name: getattr(model, name) for name in ("depth", "heads", "registers")},
        "mlp": f"{a['mlp']} × {a['mlp_ratio']:.4g}",
        "layer_scale": a["layer_scale"] is not None,
        **{name: a[name] for name in ("stem", "norm_eps", "positions")},
        "position_mode": model.position_mode,
    }


def _of_timm(model: Backbone) -> dict[str, Any]:
    return {"architecture": f"{model.architecture['name']} of timm"}


def show(name: str, value: Any) -> str:
    """Return a fact as text."""
    if value is None:
        return "not recorded in the file"
    if name in ("patch_size", "image_size", "grid"):
        return f"{value[0]} × {value[1]}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(f"{number:.4g}" for number in value)
    return f"{value:,}" if name == "parameters" else str(value)
