"""`dino-vit inspect-weights` and `dino-vit export`: describe a backbone, or write it for another library."""

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from dino_vit.commands import Result
from dino_vit.config.sections import Side, WeightsFormat
from dino_vit.config.settings import Few, Settings, setting
from dino_vit.core import height_width
from dino_vit.models.backbone import Backbone
from dino_vit.training.diagnosis import evaluation_text
from dino_vit.training.metrics import BASELINE, METRICS, read_records
from dino_vit.weights import load_backbone
from dino_vit.weights.card import describe, model_card, show, usage
from dino_vit.weights.export import export_backbone
from dino_vit.weights.loading import LoadedBackbone


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

    def load(self) -> LoadedBackbone:
        """Load the backbone."""
        overrides: dict[str, Any] = {"heads": self.heads} if self.heads else {}
        if self.image_size:
            overrides["image_size"] = height_width(self.image_size)
        return load_backbone(self.source, network=self.network, format=self.source_format, **overrides)


class InspectWeightsConfig(_WeightsConfig):
    """Show the format, architecture, normalisation, network and step of a weights file or folder."""

    as_json: bool = setting(False, "print JSON")

    examples: ClassVar = ("inspect-weights runs/pretrain",)


class ExportConfig(_WeightsConfig):
    """Write a backbone in the format of another library, and check that its features agree."""

    out: str = Field(description="file to write (.pth, .pt, .safetensors, .onnx), or folder for huggingface")
    format: Literal["reference", "timm", "huggingface", "onnx"] = Field(description="format to write")
    dynamic: bool = setting(False, "onnx: take images of any size; otherwise of that of the weights")
    overwrite: bool = setting(False, "replace OUT if it exists")
    license: str | None = setting(None, "huggingface: licence for the model card, such as apache-2.0")

    positional: ClassVar = ("source", "out")
    examples: ClassVar = ("export runs/pretrain vits16.pth --format timm",)

    def contradictions(self) -> Iterator[str]:
        """Yield settings that would have no effect."""
        if self.dynamic and self.format != "onnx":
            yield f"--dynamic is for --format onnx, not {self.format}"
        if self.license is not None and self.format != "huggingface":
            yield f"--license is for --format huggingface, not {self.format}"


@dataclass(frozen=True, kw_only=True)
class WeightsFacts(Result):
    """What a backbone is."""

    facts: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ExportResult(Result):
    """The file or folder that was written; as text, the lines that use it."""

    path: Path


def inspect(config: InspectWeightsConfig) -> WeightsFacts:
    """Return the facts about a backbone; as text, two columns or JSON."""
    facts = describe(config.load())
    lines = [f"{name.replace('_', ' '):<14}  {show(name, facts[name])}" for name in facts if name != "config"]
    return WeightsFacts(facts=facts, text=json.dumps(facts, indent=2) if config.as_json else "\n".join(lines))


def export(config: ExportConfig) -> ExportResult:
    """Write a backbone for another library."""
    model, path, card = config.load(), Path(config.out), None
    for_hub = config.format == "huggingface"
    if for_hub:
        card = model_card(model, license=config.license, evaluation=_evaluation(model))
    options = {"overwrite": config.overwrite, "dynamic": config.dynamic}
    export_backbone(model, path, config.format, **options, card=card)
    text = usage(model, path, config.format)
    if for_hub:  # a comment, so that the lines stay Python
        text += f"\n# to share the folder: hf upload OWNER/NAME {shlex.quote(str(path))}"
    return ExportResult(path=path, text=text)


def _evaluation(model: Backbone) -> str:
    """Return what the run of a checkpoint measured at its step, or nothing."""
    source, step = (model.provenance.source, model.provenance.step) if model.provenance else ("", None)
    if step is None or Path(source).parent.name != "checkpoints":
        return ""
    folder = Path(source).parent.parent
    history = [r for r in read_records(folder / "metrics.jsonl", METRICS) if r.step <= step and r.rankme]
    before = next(iter(read_records(folder / "baseline.json", BASELINE)), None)
    figures = evaluation_text(history, before)
    return f"Measured at step {history[-1].step:,}, on images of the source: {figures}." if figures else ""
