"""What files say of their weights: ours, which are written here, our exports, and config.json."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from dino_vit.core.storage import write_tensors
from dino_vit.core.text import brief
from dino_vit.models.backbone import Backbone

FORMAT_VERSION = 1  # of the metadata in our own files
EXPORT_KEY = "dino_vit_export"  # of an export, under which it says what its tensors do not show
HUB_FILES = ("model.safetensors", "pytorch_model.bin", "model.bin")  # a config.json beside these is theirs

TRAINING_FACTS = ("mean", "std", "bits", "range", "network", "step")  # of Provenance, that an export keeps


class WeightsError(ValueError):
    """The given weights cannot be used as requested."""


def check_metadata(path: Path, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of one of our own files, its lists as the tuples that they were."""
    if (version := metadata.get("version", FORMAT_VERSION)) != FORMAT_VERSION:
        raise WeightsError(
            f"{path} has format version {brief(repr(version))}, but this dino-vit reads version "
            f"{FORMAT_VERSION}; upgrade dino-vit to load it"
        )
    if "architecture" not in metadata:  # such as the classifier and optimiser of a fine-tuning
        raise WeightsError(f"{path} holds no backbone: architecture is missing from its metadata")
    return {**metadata, "architecture": _with_tuples(metadata["architecture"])}


def parse_metadata(path: Path, text: str) -> dict[str, Any]:
    """Return the metadata in one of our own files."""
    return check_metadata(path, _parse(f"the metadata of {path}", text))


def describe_export(model: Backbone, format: str) -> str:
    """Return what the tensors of an export do not show, as JSON."""
    origin = {name: getattr(model.provenance, name, None) for name in TRAINING_FACTS}
    return json.dumps(
        {
            **origin,
            "format": format,
            "heads": model.heads,
            "image_size": model.image_size,
            "channels": model.channels,
            **{key: value for key, value in model.architecture.items() if key in ("positions", "name")},
        }
    )


def parse_export(path: Path, text: object) -> dict[str, Any]:
    """Return what one of our exports says about itself."""
    return _with_tuples(_parse(f"the metadata of {path}", text))


def read_hub_config(weights: Path) -> dict[str, Any]:
    """Return config.json of a hub folder together with the preprocessor's statistics, or an empty dict."""
    config: dict[str, Any] = {}
    for name in ("preprocessor_config.json", "config.json"):
        path = weights.with_name(name)
        if weights.name in HUB_FILES and path.is_file():
            config |= _parse(str(path), path.read_bytes())
    if "model_type" not in config and "architecture" not in config:
        return {}
    return config


def _with_tuples(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was JSON with its lists as the tuples that they were."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in content.items()}


def _parse(where: str, text: Any) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise WeightsError(f"{where} is not a JSON object: {error}") from error
    if not isinstance(content, dict):
        raise WeightsError(f"{where} is not a JSON object")
    return content


def save_backbone(
    model: Backbone,
    path: str | Path,
    *,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    bits: Literal[8, 16] | None = None,
    range: tuple[float, float] | None = None,
    network: str | None = None,
    step: int | None = None,
    config: Mapping[str, Any] | None = None,
) -> None:
    """Write a safetensors file with all that loading needs; arguments default to the model's provenance."""
    path = Path(path)
    if path.suffix != ".safetensors":
        raise WeightsError(f"{path} must end in .safetensors")
    pixels = {"mean": mean, "std": std, "bits": bits, "range": range}
    given = {**pixels, "network": network, "step": step, "config": config}
    provenance = asdict(model.provenance) if model.provenance else {}
    metadata: dict[str, Any] = {
        k: provenance.get(k) if value is None else value for k, value in given.items()
    }
    for name in ("mean", "std"):
        values, channels = metadata[name], model.channels
        if values is not None and len(values) != channels:
            raise WeightsError(f"{name} needs one value per channel ({channels}), not {len(values)}")
    metadata |= {"kind": "backbone", "version": FORMAT_VERSION, "architecture": model.architecture}
    write_tensors(path, model.state_dict(), json.dumps(metadata, sort_keys=True))
