"""Load and save a backbone: strictly, by name alone, and saying in one line what was done."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
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
from dino_vit.weights.recognition import infer_architecture, recognise, translate

log = logging.getLogger("dino_vit")

NAMES_SHOWN = 20


def load_backbone(
    source: str | Path | Mapping[str, Any],
    *,
    network: str = "teacher",
    format: str | None = None,
    trained_size: int | Grid | None = None,
    **overrides: Any,
) -> VisionTransformer:
    """Return the backbone that a run folder, a file or a dict holds, in evaluation mode.

    `network` picks the teacher or the student of a training checkpoint; `format` decides where files of DINO
    and of timm look alike; `trained_size` is for files whose positions are no square. Any keyword of
    `VisionTransformer` overrides what the tensors say: another `image_size` resamples the positions, other
    `channels` inflate the patch embedding, `num_classes` keeps the classifier.
    """
    raw = read_weights(source, network)
    layout = recognise(raw, format)
    tensors, notes = translate(
        raw, layout, keep_classifier=bool(overrides.get("num_classes")), trained_size=trained_size
    )
    stored = infer_architecture(tensors, layout, raw, {**overrides, "trained_size": trained_size})
    if not overrides.get("num_classes"):
        overrides["num_classes"] = 0
    architecture = {**stored, **overrides}
    with torch.device("meta"):
        model = VisionTransformer(**architecture)
    _refuse_what_is_no_number(tensors, raw.source)
    tensors, adapted = _adapt(tensors, stored, architecture)
    _load_strictly(model, tensors, raw.source)
    model.provenance = _provenance(raw, layout, model)
    log.info(
        "%s: %d tensors (%s, %s, sha256 %s)%s",
        raw.source,
        len(tensors),
        layout.format,
        raw.network or raw.metadata.get("network") or "backbone",
        raw.sha256[:12],
        "".join(f"; {note}" for note in (*notes, *adapted)),
    )
    return model.eval()


def _refuse_what_is_no_number(tensors: Mapping[str, Tensor], source: str) -> None:
    """Refuse tensors that would become other numbers as float32."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            kind = str(tensor.dtype).removeprefix("torch.")
            raise WeightsError(f"{source}: {name} holds {kind}, but weights are floating-point numbers")


def _adapt(
    tensors: dict[str, Tensor], stored: Mapping[str, Any], wanted: Mapping[str, Any]
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors in float32, resampled and inflated to the wanted size and channels, with notes."""
    notes = []
    types = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()} - {"float32"}
    if types:
        notes.append(f"converted {', '.join(sorted(types))} to float32")
    adapted = {name: tensor.to(torch.float32, copy=True).contiguous() for name, tensor in tensors.items()}
    patch = height_width(stored["patch_size"])
    old, new = (_grid(architecture["image_size"], patch) for architecture in (stored, wanted))
    if old != new:
        mode = wanted["position_mode"]
        adapted["pos_embed"] = interpolate_pos_embs(adapted["pos_embed"], new, trained_grid=old, mode=mode)
        notes.append(f"positions resampled from {old[0]} × {old[1]} to {new[0]} × {new[1]} (mode {mode})")
    if stored["channels"] != wanted["channels"] and stored["stem"] == "conv":
        kernel = adapted["patch_embed.proj.weight"]
        adapted["patch_embed.proj.weight"] = inflate_channels(kernel, wanted["channels"])
        notes.append(
            f"patch embedding from {stored['channels']} to {wanted['channels']} channels, each with the mean "
            "kernel, scaled to answer equal channels as before"
        )
    return adapted, notes


def _grid(image_size: int | Grid, patch: Grid) -> Grid:
    height, width = height_width(image_size)
    return height // patch[0], width // patch[1]


def inflate_channels(kernel: Tensor, channels: int) -> Tensor:
    """Return a patch kernel (D, C, p, q) for other channels that answers equal ones as it did before."""
    mean = kernel.mean(dim=1, keepdim=True)
    return (mean * (kernel.shape[1] / channels)).expand(-1, channels, -1, -1).contiguous()


def _load_strictly(model: VisionTransformer, tensors: Mapping[str, Tensor], source: str) -> None:
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    missing = [name for name in expected if name not in tensors]
    surplus = [name for name in tensors if name not in expected]
    unlike = [
        f"{name} {tuple(tensor.shape)} instead of {expected[name]}"
        for name, tensor in tensors.items()
        if name in expected and expected[name] != tuple(tensor.shape)
    ]
    if missing or surplus or unlike:
        faults = [("missing", missing), ("surplus", surplus), ("of another shape", unlike)]
        said = "; ".join(f"{len(names)} {what}: {_some(names)}" for what, names in faults if names)
        raise WeightsError(f"{source} does not fit a backbone of {len(expected)} tensors: {said}")
    model.load_state_dict(dict(tensors), assign=True)


def _some(names: list[str]) -> str:
    rest = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _provenance(raw: RawWeights, layout: Layout, model: VisionTransformer) -> Provenance:
    described = raw.metadata
    mean, std = layout.normalisation or (None, None)
    if described:
        mean, std = (tuple(values) if values else None for values in (described["mean"], described["std"]))
    if mean is not None and len(mean) != model.channels:
        mean = std = None  # statistics of other channels say nothing about these
    return Provenance(
        format=layout.format,
        source=raw.source,
        sha256=raw.sha256,
        mean=mean,
        std=std,
        bits=described.get("bits"),  # files from before there was another depth do not say
        range=tuple(described["range"]) if described.get("range") else None,
        network=raw.network or described.get("network"),
        step=described.get("step"),
        config=described.get("config", {}),
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
    """Write one safetensors file that says what it is; what is not given comes from the provenance."""
    path = Path(path)
    if path.suffix != ".safetensors":
        raise WeightsError(f"{path} would be a safetensors file, so its name must end in .safetensors")
    known = asdict(model.provenance) if model.provenance else {}
    pixels = {"mean": mean, "std": std, "bits": bits, "range": range}
    given = {**pixels, "network": network, "step": step, "config": config}
    described: dict[str, object] = {
        "kind": "backbone",
        "version": FORMAT_VERSION,
        "architecture": model.architecture,
        **{key: known.get(key) if value is None else value for key, value in given.items()},
    }
    for name, values in (("mean", described["mean"]), ("std", described["std"])):
        if isinstance(values, Sequence) and len(values) != model.channels:
            raise WeightsError(f"{name} has {len(values)} values for {model.channels} channels")
    write_tensors(path, model.state_dict(), json.dumps(described, sort_keys=True))
