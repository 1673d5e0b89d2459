"""Save a backbone as a file of our own, which says all that loading needs."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from dino_vit.core.storage import write_tensors
from dino_vit.models.backbone import Backbone
from dino_vit.weights.metadata import FORMAT_VERSION, WeightsError


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
