"""Load and save a backbone: strictly, and logging in one line what was loaded and converted."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from dino_vit.core.sizes import height_width
from dino_vit.core.storage import write_tensors
from dino_vit.models.positions import Grid, interpolate_pos_embs
from dino_vit.models.vit import Provenance, VisionTransformer
from dino_vit.weights.layouts import Layout
from dino_vit.weights.reading import FORMAT_VERSION, RawWeights, WeightsError, read_weights
from dino_vit.weights.recognition import infer_architecture, patch_grid, recognise, translate

log = logging.getLogger("dino_vit")


def load_backbone(
    source: str | Path | Mapping[str, Any],
    *,
    network: str = "teacher",
    format: str | None = None,
    trained_size: int | Grid | None = None,
    **overrides: Any,
) -> VisionTransformer:
    """Return the backbone of a run folder, a hub folder, a file or a dict, in evaluation mode.

    `network` selects the teacher or the student of a training checkpoint; `format` decides where files of
    DINO and of timm look alike; `trained_size` is for files whose positions do not form a square. Any keyword
    of `VisionTransformer` overrides what the tensors show: another `image_size` resamples the positions,
    other `channels` inflate the patch embedding, `num_classes` keeps the classifier.
    """
    raw = read_weights(source, network)
    layout = recognise(raw, format)
    keep_classifier = bool(overrides.get("num_classes"))
    tensors, notes = translate(raw, layout, keep_classifier=keep_classifier, trained_size=trained_size)
    stored = infer_architecture(tensors, layout, raw, {**overrides, "trained_size": trained_size})
    wanted = {**stored, **overrides}
    if not keep_classifier:
        wanted["num_classes"] = 0
    with torch.device("meta"):
        model = VisionTransformer(**wanted)
    tensors, adapted = _adapt(tensors, stored, wanted, raw.source)
    try:
        model.load_state_dict(tensors, assign=True)
    except RuntimeError as error:
        raise WeightsError(f"{raw.source} does not fit the inferred architecture: {error}") from error
    model.provenance = _provenance(raw, layout, model)
    log.info(
        "%s: loaded %d tensors (%s, %s, sha256 %s)%s",
        raw.source,
        len(tensors),
        layout.format,
        model.provenance.network or "backbone",
        raw.sha256[:12],
        "".join(f"; {note}" for note in (*notes, *adapted)),
    )
    return model.eval()


def _adapt(
    tensors: Mapping[str, Tensor], stored: Mapping[str, Any], wanted: Mapping[str, Any], source: str
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors in float32, resampled and inflated to the wanted size and channels, with notes."""
    notes = []
    types = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise WeightsError(f"{source}: {name} is {types[name]}; weights must be floating-point numbers")
    if converted := set(types.values()) - {"float32"}:
        notes.append(f"converted {', '.join(sorted(converted))} to float32")
    adapted = {name: tensor.to(torch.float32, copy=True).contiguous() for name, tensor in tensors.items()}
    patch = height_width(stored["patch_size"])
    old, new = (patch_grid(architecture["image_size"], patch) for architecture in (stored, wanted))
    if old != new:
        mode = wanted["position_mode"]
        adapted["pos_embed"] = interpolate_pos_embs(adapted["pos_embed"], new, trained_grid=old, mode=mode)
        notes.append(f"resampled positions from {old[0]} × {old[1]} to {new[0]} × {new[1]} (mode {mode})")
    before, channels = stored["channels"], wanted["channels"]
    if before != channels and stored["stem"] == "conv":
        # Every channel gets the mean kernel, scaled so that equal channels give the same output as before.
        mean = adapted["patch_embed.proj.weight"].mean(dim=1, keepdim=True) * (before / channels)
        adapted["patch_embed.proj.weight"] = mean.expand(-1, channels, -1, -1).contiguous()
        notes.append(
            f"inflated patch embedding from {before} to {channels} channels (mean kernel × "
            f"{before}/{channels})"
        )
    return adapted, notes


def _provenance(raw: RawWeights, layout: Layout, model: VisionTransformer) -> Provenance:
    mean, std = layout.normalisation or (None, None)
    known = raw.metadata or {"mean": mean, "std": std}
    mean, std, range = (tuple(known[key]) if known.get(key) else None for key in ("mean", "std", "range"))
    if mean is not None and len(mean) != model.channels:
        mean = std = None  # the statistics are those of other channels
    return Provenance(
        format=layout.format,
        source=raw.source,
        sha256=raw.sha256,
        mean=mean,
        std=std,
        bits=known.get("bits"),  # missing in files from when there was only one depth
        range=range,
        network=raw.network or known.get("network"),
        step=known.get("step"),
        config=known.get("config", {}),
    )


def save_backbone(
    model: VisionTransformer,
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
    known = asdict(model.provenance) if model.provenance else {}
    metadata: dict[str, Any] = {k: known.get(k) if value is None else value for k, value in given.items()}
    for name in ("mean", "std"):
        if metadata[name] is not None and len(metadata[name]) != model.channels:
            given_count, channels = len(metadata[name]), model.channels
            raise WeightsError(f"{name} needs one value per channel ({channels}), not {given_count}")
    metadata |= {"kind": "backbone", "version": FORMAT_VERSION, "architecture": model.architecture}
    write_tensors(path, model.state_dict(), json.dumps(metadata, sort_keys=True))
