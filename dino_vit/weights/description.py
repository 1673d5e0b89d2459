"""What a loaded backbone is, in words and as JSON."""

from __future__ import annotations

import json
from typing import Any

from dino_vit.models.vit import VisionTransformer

FAMILY = {192: "ViT-Ti", 384: "ViT-S", 768: "ViT-B", 1024: "ViT-L", 1280: "ViT-H", 1536: "ViT-g"}


def describe(model: VisionTransformer) -> dict[str, Any]:
    """Return the facts that someone who is handed the file wants to know, most important first."""
    a, known = model.architecture, model.provenance
    family = FAMILY.get(model.width, "ViT")
    facts: dict[str, Any] = {
        "file": known.source if known else None,
        "format": known.format if known else None,
        "sha256": known.sha256 if known else None,
        "network": known.network if known else None,
        "step": known.step if known else None,
        "architecture": f"{family}/{model.patch_size[0]}",
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "width": model.width,
        "depth": model.depth,
        "heads": model.heads,
        "mlp": f"{a['mlp']} × {a['mlp_ratio']:.4g}",
        "stem": a["stem"],
        "patch_size": list(model.patch_size),
        "image_size": list(model.image_size),
        "grid": list(model.trained_grid),
        "channels": model.channels,
        "registers": model.registers,
        "layer_scale": a["layer_scale"] is not None,
        "norm_eps": a["norm_eps"],
        "positions": a["positions"],
        "position_mode": model.position_mode,
        "mean": known.mean if known else None,
        "std": known.std if known else None,
        "bits": known.bits if known else None,
        "range": known.range or "0 to the largest value of the type" if known and known.bits else None,
        "config": known.config if known else {},
    }
    return facts


def format_description(facts: dict[str, Any], *, as_json: bool) -> str:
    """Return the facts as JSON or as two columns; what is unknown is said to be."""
    if as_json:
        return json.dumps(facts, indent=2)
    rows = {name: value for name, value in facts.items() if name != "config"}
    width = max(map(len, rows))
    return "\n".join(
        f"{name.replace('_', ' '):<{width}}  {_show(name, value)}" for name, value in rows.items()
    )


def _show(name: str, value: Any) -> str:
    if value is None:
        return "not recorded in the file"
    if name in ("patch_size", "image_size", "grid"):
        return f"{value[0]} × {value[1]}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and name == "parameters":
        return f"{value:,}"
    if isinstance(value, tuple):
        return ", ".join(f"{number:.4g}" for number in value)
    return str(value)
