"""`dino-vit inspect-weights` and `dino-vit export`: describe a backbone, or write it for another library."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from dino_vit.commands import Result
from dino_vit.config.sections import Side, WeightsFormat
from dino_vit.config.settings import Few, Problem, Settings, setting
from dino_vit.core.sizes import height_width
from dino_vit.models.backbone import Backbone
from dino_vit.models.vit import VisionTransformer
from dino_vit.weights import export_backbone, load_backbone
from dino_vit.weights.backbone import LoadedBackbone
from dino_vit.weights.usage import usage

FAMILIES = {192: "ViT-Ti", 384: "ViT-S", 768: "ViT-B", 1024: "ViT-L", 1280: "ViT-H", 1536: "ViT-g"}


class _WeightsConfig(Settings):
    source: str = Field(description="weights file (.pth, .pt, .safetensors), run folder or hub folder")
    network: Literal["teacher", "student"] = setting("teacher", "network of a training checkpoint")
    source_format: WeightsFormat | None = setting(
        None, "format of the source where files look alike; null: detected"
    )
    heads: Few | None = setting(None, "attention heads, for a width that does not imply them")
    image_size: Side | None = setting(
        None, "resample the positions to this side, or height and width; null: as stored"
    )

    positional: ClassVar[tuple[str, ...]] = ("source",)
    options: ClassVar[tuple[str, ...]] = ("network", "source_format", "heads", "image_size")

    def load(self) -> LoadedBackbone:
        """Load the backbone."""
        overrides: dict[str, Any] = {"heads": self.heads} if self.heads else {}
        if self.image_size:
            overrides["image_size"] = height_width(self.image_size)
        return load_backbone(self.source, network=self.network, format=self.source_format, **overrides)


class InspectWeightsConfig(_WeightsConfig):
    """Show the format, architecture, normalisation, network and step of a weights file or folder."""

    as_json: bool = setting(False, "print JSON")
    switches: ClassVar = {"json": "as_json"}


class ExportConfig(_WeightsConfig):
    """Write a backbone in the format of another library, and check that its features agree."""

    out: str = Field(
        description="file to write (.pth, .pt, .safetensors, .onnx, .pt2), or folder for huggingface"
    )
    format: Literal["reference", "timm", "torchvision", "huggingface", "onnx", "pt2"] = Field(
        description="format to write"
    )
    dynamic: bool = setting(False, "onnx and pt2: take images of any size; otherwise of that of the weights")
    overwrite: bool = setting(False, "replace OUT if it exists")

    positional: ClassVar = ("source", "out")
    options: ClassVar = ("format", *_WeightsConfig.options)
    switches: ClassVar = {"overwrite": "overwrite", "dynamic": "dynamic"}

    def contradictions(self) -> Iterator[Problem]:
        """Yield a switch that would have no effect."""
        if self.dynamic and self.format not in ("onnx", "pt2"):
            text = f"--dynamic is for onnx and pt2; {self.format} takes images of any size that it can"
            yield Problem(f"{text}, so leave it out", ("dynamic", "format"))


@dataclass(frozen=True, kw_only=True)
class WeightsFacts(Result):
    """What is known of a backbone."""

    facts: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ExportResult(Result):
    """The file or folder that was written; as text, the lines that use it."""

    path: Path


def inspect(config: InspectWeightsConfig) -> WeightsFacts:
    """Return the facts about a backbone; as text, two columns or JSON."""
    facts = describe(config.load())
    lines = [
        f"{name.replace('_', ' '):<14}  {_show(name, facts[name])}" for name in facts if name != "config"
    ]
    return WeightsFacts(facts=facts, text=json.dumps(facts, indent=2) if config.as_json else "\n".join(lines))


def export(config: ExportConfig) -> ExportResult:
    """Write a backbone for another library."""
    model, path = config.load(), Path(config.out)
    export_backbone(model, path, config.format, overwrite=config.overwrite, dynamic=config.dynamic)
    return ExportResult(path=path, text=usage(model, path, config.format))


def describe(model: Backbone) -> dict[str, Any]:
    """Return the facts about a backbone, most important first."""
    known = model.provenance
    origin = {name: getattr(known, name, None) for name in ("format", "sha256", "network", "step")}
    pixels = {name: getattr(known, name, None) for name in ("mean", "std", "bits", "range")}
    if pixels["bits"] and not pixels["range"]:
        pixels["range"] = "0 to the largest value of the type"
    return {
        "file": known.source if known else None,
        **origin,
        **(_of_transformer(model) if isinstance(model, VisionTransformer) else _of_timm(model)),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "width": model.width,
        "patch_size": list(model.patch_size) if model.has_patches else None,
        "image_size": list(model.image_size),
        "grid": list(model.grid_of(*model.image_size)),  # of patches
        "channels": model.channels,
        **pixels,
        "config": known.config if known else {},
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


def _show(name: str, value: Any) -> str:
    if value is None:
        return "not recorded in the file"
    if name in ("patch_size", "image_size", "grid"):
        return f"{value[0]} × {value[1]}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(f"{number:.4g}" for number in value)
    return f"{value:,}" if name == "parameters" else str(value)
