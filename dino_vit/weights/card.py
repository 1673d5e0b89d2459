"""The facts about a backbone, and the README.md of an export that is a folder."""

import re
from dataclasses import asdict
from pathlib import Path, PurePath
from typing import Any

import yaml

from dino_vit import __version__
from dino_vit.core.text import brief, printable_lines, public
from dino_vit.models.backbone import Backbone
from dino_vit.weights.metadata import pretraining_of
from dino_vit.weights.usage import usage

FAMILIES = {192: "ViT-Ti", 384: "ViT-S", 768: "ViT-B", 1024: "ViT-L", 1280: "ViT-H", 1536: "ViT-g"}
STRUCTURE = (
    *("depth", "heads", "registers", "mlp", "mlp_ratio", "layer_scale", "qk_scale"),
    *("norm_eps", "stem", "positions", "position_mode", "dropout", "attention_dropout"),
)
# By this an export tells its own card, which it replaces, from one that a person wrote.
CARD_MARK = "<!-- Written by dino-vit export, which replaces this file unless this line is removed. -->"


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


def model_card(
    model: Backbone, format: str = "huggingface", *, license: str | None = None, evaluation: str = ""
) -> str:
    """Return the README.md of a folder for transformers or timm; `evaluation` is Markdown."""
    run, facts = pretraining_of(model.provenance.config), describe(model)
    facts["file"] = facts["file"] and Path(facts["file"]).name
    named = {name: value for name, value in facts.items() if value is not None and name != "config"}
    rows = {name.replace("_", " "): code(show(name, value)) for name, value in named.items()}
    rows["exported by"] = f"dino-vit {__version__}"
    trained = "How and on which images it was trained is not recorded."
    if run:
        source = run.data.source
        images = [source] if isinstance(source, str) else source or ()
        start = f", starting from {code(_name(run.init.weights))}" if run.init else ""
        trained = f"Pretrained without labels ({code(f'method={run.method}')}){start}, on images of "
        trained += f"{code(', '.join(map(_name, images)))}."
    head = {
        "library_name": "timm" if format == "timm" else "transformers",
        "pipeline_tag": "image-feature-extraction",
        "license": license or "other",
        "tags": ["dino", "self-supervised", "vit"] if run else ["vit"],
    }
    prefix = "hf-hub:" if format == "timm" else ""
    parts = [
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---",
        CARD_MARK,
        f"# {facts['architecture']}",
        f"A vision transformer that turns images into features. {trained}",
        "" if license else "No licence is stated yet: the owner has to name it as `license` at the top.",
        "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())]),
        f"In this folder (from the hub by its name, `{prefix}OWNER/NAME`):",
        f"```python\n{usage(model, PurePath('.'), format)}\n```",
        evaluation,
    ]
    return printable_lines("\n\n".join(filter(None, parts)) + "\n")


def code(value: object, most: int = 300) -> str:
    """Return a value as a code span, in which nothing is markup."""
    text = brief(value, most)
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    space = " " if "`" in text else ""
    return f"{fence}{space}{text}{space}{fence}".replace("|", r"\|")  # in a table


def _name(path: str) -> str:
    """Return the name of weights or images; of a path of this machine its last part only."""
    return public(path) if "://" in path or path.startswith("hf:") else Path(path).name or path
