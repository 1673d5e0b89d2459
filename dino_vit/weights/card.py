"""The facts about a backbone, and the README.md of an export that is a folder."""

from dataclasses import asdict
from pathlib import PurePath
from typing import Any

import yaml

from dino_vit import __version__
from dino_vit.core.text import printable_lines
from dino_vit.models.backbone import Backbone
from dino_vit.weights.usage import usage

FAMILIES = {192: "ViT-Ti", 384: "ViT-S", 768: "ViT-B", 1024: "ViT-L", 1280: "ViT-H", 1536: "ViT-g"}
STRUCTURE = (
    *("depth", "heads", "registers", "mlp", "mlp_ratio", "layer_scale", "qk_scale"),
    *("norm_eps", "stem", "stem_width", "positions", "position_mode", "dropout", "attention_dropout"),
)


def describe_backbone(model: Backbone) -> dict[str, Any]:
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


def model_card(model: Backbone, format: str) -> str:
    """Return the README.md of a folder for transformers or timm, which its owner completes."""
    facts = describe_backbone(model)
    known = {name: value for name, value in facts.items() if value is not None and name != "config"}
    known.pop("file", None)  # a path of this machine
    rows = [f"| {name.replace('_', ' ')} | `{show(name, value)}` |" for name, value in known.items()]
    head = {
        "library_name": "timm" if format == "timm" else "transformers",
        "pipeline_tag": "image-feature-extraction",
        "license": "other",
        "tags": ["vit"],
    }
    prefix = "hf-hub:" if format == "timm" else ""
    parts = [
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---",
        f"# {facts['architecture']}",
        "A backbone that turns images into features. Its owner has to say here which images it was trained "
        "on, and to name a licence as `license` at the top.",
        "\n".join(["| | |", "|---|---|", *rows, f"| exported by | dino-vit {__version__} |"]),
        f"In this folder (from the hub by its name, `{prefix}OWNER/NAME`):",
        f"```python\n{usage(model, PurePath('.'), format)}\n```",
    ]
    return printable_lines("\n\n".join(parts) + "\n")
