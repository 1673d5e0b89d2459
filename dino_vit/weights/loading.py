"""Load a backbone: strictly, and logging in one line what was loaded and converted."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from inspect import signature
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor

from dino_vit.core import VIT_SIZES, height_width, log
from dino_vit.core.text import plural
from dino_vit.models.backbone import Provenance
from dino_vit.models.positions import Grid, interpolate_pos_embs
from dino_vit.models.stems import REDUCTION
from dino_vit.models.vit import VisionTransformer
from dino_vit.weights.backbone import LoadedBackbone, LoadedTransformer
from dino_vit.weights.layouts import HYBRID_ROOT, OURS, TIMM, Layout, merge
from dino_vit.weights.metadata import WeightsError
from dino_vit.weights.of_timm import is_timm, load_timm
from dino_vit.weights.reading import RawWeights, check_finite, read_weights
from dino_vit.weights.recognition import recognise, stated_normalisation

HEADS_OF_WIDTH = {**{size["width"]: size["heads"] for size in VIT_SIZES.values()}, 1536: 24}

HEADS_OF_DINOV3 = {1280: 20, 4096: 32}
TRAINED_SIDE = 224  # pixels, of weights that show no size
ROTARY_RESCALE = 2.0  # in DINOv3's training


def load_backbone(
    source: str | Path | Mapping[str, Any],
    *,
    network: str = "teacher",
    format: str | None = None,
    trained_size: int | Grid | None = None,
    verbose: bool = True,
    **overrides: Any,
) -> LoadedBackbone:
    """Return the backbone of a run folder, a hub folder, a file or a dict, in evaluation mode.

    Names work too: `hf:OWNER/NAME` of the Hugging Face Hub, `timm:NAME` of timm's models there.
    `network` selects the teacher or the student of a training checkpoint; `format` decides where files of
    DINO and of timm look alike; `trained_size` is for files whose positions do not form a square; `verbose`
    logs what was loaded and converted. Any keyword of `VisionTransformer` overrides what the tensors show:
    another `image_size` resamples the positions, other `channels` inflate the patch embedding, `num_classes`
    keeps the classifier.
    """
    parameters = signature(VisionTransformer).parameters
    if unknown := [name for name in overrides if name not in parameters]:
        raise TypeError(f"load_backbone() has no argument {unknown[0]!r}; there are {', '.join(parameters)}")
    raw = read_weights(source, network)
    if is_timm(raw):
        timm = load_timm(raw, overrides)
        layout = OURS if raw.metadata else replace(TIMM, normalisation=stated_normalisation(raw))
        timm.provenance = _provenance(raw, layout, timm)
        if verbose:
            log.info("%s: loaded %s of timm (%s)", raw.source, timm.name, _facts(timm.provenance))
        return timm.eval()
    layout = recognise(raw, format)
    keep_classifier = bool(overrides.get("num_classes"))
    asked = {"num_classes": "classifier", "mask_token": "mask token"}
    tensors, notes = _translate(raw, layout, {part for key, part in asked.items() if overrides.get(key)})
    stored = _infer_architecture(tensors, layout, raw, trained_size, overrides)
    wanted = {**stored, **overrides}
    if not keep_classifier:
        wanted["num_classes"] = 0
    try:
        with torch.device("meta"):
            model = LoadedTransformer(**wanted)
    except (TypeError, ValueError, RuntimeError, ArithmeticError) as error:
        raise WeightsError(f"{raw.source} describes a network that cannot be built: {error}") from error
    tensors = _adapt(tensors, stored, wanted, raw.source, notes)
    try:
        model.load_state_dict(tensors, assign=True)
    except RuntimeError as error:
        # torch has a line for all that is missing, one for all that is unexpected, one for each other shape.
        facts = " ".join(shorten(line, 200, placeholder=" ...") for line in str(error).splitlines()[1:5])
        raise WeightsError(f"{raw.source} does not fit the inferred architecture: {facts}") from error
    model.provenance = _provenance(raw, layout, model)
    if verbose:
        loaded = f"loaded {len(tensors)} tensors ({_facts(model.provenance)})"
        log.info("%s: %s", raw.source, "; ".join([loaded, *notes]))
    return model.eval()


def _facts(origin: Provenance) -> str:
    return f"{origin.format}, {origin.network or 'backbone'}, sha256 {origin.sha256[:12]}"


def _adapt(
    tensors: Mapping[str, Tensor],
    stored: Mapping[str, Any],
    wanted: Mapping[str, Any],
    source: str,
    notes: list[str],
) -> dict[str, Tensor]:
    """Return the tensors in float32, resampled and inflated to the wanted size and channels; add notes."""
    types = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise WeightsError(f"{source}: {name} is {types[name]}; weights must be floating-point numbers")
    if converted := set(types.values()) - {"float32"}:
        notes.append(f"converted {', '.join(sorted(converted))} to float32")
    adapted = {name: tensor.to(torch.float32, copy=True).contiguous() for name, tensor in tensors.items()}
    check_finite(adapted, source)
    patch = height_width(stored["patch_size"])
    old, new = (_patch_grid(architecture["image_size"], patch) for architecture in (stored, wanted))
    positions = adapted.get("pos_embed")
    if positions is not None and positions.shape[1] == math.prod(old):
        adapted["pos_embed"] = torch.cat([torch.zeros_like(positions[:, :1]), positions], dim=1)
        notes.append("added a zero position for the CLS token, which already includes its own")
    if positions is not None and old != new:
        mode = wanted["position_mode"]
        adapted["pos_embed"] = interpolate_pos_embs(adapted["pos_embed"], new, trained_grid=old, mode=mode)
        notes.append(f"resampled positions from {old[0]} × {old[1]} to {new[0]} × {new[1]} (mode {mode})")
    if not wanted.get("mask_token"):
        adapted.pop("mask_token", None)
    elif "mask_token" in adapted:
        adapted["mask_token"] = adapted["mask_token"].reshape(1, -1)
    else:
        adapted["mask_token"] = torch.zeros(1, wanted["width"])
        notes.append("added a mask token of zeros")
    before, channels = stored["channels"], wanted["channels"]
    if before != channels and stored["stem"] == "conv":
        # Every channel gets the mean kernel, scaled so that equal channels give the same output as before.
        mean = adapted["patch_embed.proj.weight"].mean(dim=1, keepdim=True) * (before / channels)
        adapted["patch_embed.proj.weight"] = mean.expand(-1, channels, -1, -1).contiguous()
        notes.append(
            f"inflated patch embedding from {before} to {channels} channels (mean kernel × "
            f"{before}/{channels})"
        )
    return adapted


def _provenance(raw: RawWeights, layout: Layout, model: LoadedBackbone) -> Provenance:
    mean, std = layout.normalisation or (None, None)
    facts = raw.metadata or {"mean": mean, "std": std} | {
        k: v for k, v in raw.export.items() if v is not None
    }
    mean, std, range = (tuple(facts[key]) if facts.get(key) else None for key in ("mean", "std", "range"))
    if mean is not None and len(mean) != model.channels:
        mean = std = None  # the statistics are those of other channels
    return Provenance(
        format=layout.format,
        source=raw.source,
        sha256=raw.sha256,
        mean=mean,
        std=std,
        bits=facts.get("bits"),  # missing in files from when there was only one depth
        range=range,
        network=raw.network or facts.get("network"),
        step=facts.get("step"),
        config=facts.get("config") or {},
    )


def _translate(raw: RawWeights, layout: Layout, asked: set[str]) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors under our names, and notes on what was dropped or merged."""
    dropped: Counter[str] = Counter()
    kept: dict[str, Tensor] = {}
    for theirs, tensor in raw.tensors.items():
        name = layout.to_ours(theirs)
        if name in kept:
            raise WeightsError(f"{raw.source} holds {name} twice, the second time as {theirs}")
        part = next((part for pattern, part in layout.dropped.items() if re.fullmatch(pattern, name)), None)
        if part is None or part in asked:
            kept[name] = tensor
        else:
            dropped[part] += 1
    ours = merge(kept, key_bias=not layout.rotary)
    notes = [f"dropped {part} ({count} tensor{'s' * (count > 1)})" for part, count in dropped.items()]
    merged = {name.split(".")[-2] for name in ours.keys() - kept.keys()}
    if "qkv" in merged:
        notes.append("merged separate q, k, v into qkv")
    if "fc1" in merged:
        notes.append("merged separate gate and up projections into fc1")
    return ours, notes


def _infer_architecture(
    tensors: Mapping[str, Tensor],
    layout: Layout,
    raw: RawWeights,
    trained_size: int | Grid | None,
    overrides: Mapping[str, Any],
) -> dict[str, Any]:
    """Infer the model's arguments from the shapes, and from what else is known if no shape shows them."""
    # Count the blocks instead of taking the highest number: strict loading then names a gap, however large.
    depth = len({match[1] for name in tensors if (match := re.match(r"blocks\.(\d+)\.", name))})
    if raw.metadata:
        defaults = {
            name: parameter.default for name, parameter in signature(VisionTransformer).parameters.items()
        }
        stated: dict[str, Any] = {**defaults, "depth": depth, **raw.metadata["architecture"]}
        if stated["depth"] != depth:
            raise WeightsError(f"{raw.source} has {plural(depth, 'block')}, but says {stated['depth']}")
        return stated
    try:
        width = tensors["cls_token"].shape[-1]
        stem = _infer_stem(tensors, overrides)
        hidden = tensors["blocks.0.mlp.fc2.weight"].shape[1]
        gated = tensors["blocks.0.mlp.fc1.weight"].shape[0] == 2 * hidden
        positions = 0 if layout.rotary else tensors["pos_embed"].shape[1]
    except KeyError as error:
        raise WeightsError(f"{raw.source} lacks {error}, which every vision transformer has") from error
    except (IndexError, ValueError, ZeroDivisionError) as error:
        raise WeightsError(f"{raw.source} has a tensor of an impossible shape: {error}") from error
    patch = height_width(stem["patch_size"])
    if 0 in (width, hidden, *patch, stem["channels"]):
        raise WeightsError(f"{raw.source} has an empty tensor in its first block or its patch embedding")
    if layout.rotary:
        size = trained_size or _stated_size(raw) or TRAINED_SIDE
        grid = _patch_grid(size, patch)
    else:
        grid = _infer_grid(positions, patch, raw, layout, trained_size)
    rescale = raw.hub_config.get("pos_embed_rescale", ROTARY_RESCALE) if layout.rotary else None
    return {
        "positions": "rotary" if layout.rotary else "learned",
        "rotary_rescale": rescale,
        **stem,
        "image_size": (grid[0] * patch[0], grid[1] * patch[1]),
        "width": width,
        "depth": depth,
        "heads": _infer_heads(width, raw, layout, overrides),
        "mlp": "swiglu" if gated else "gelu",
        "mlp_ratio": hidden / width,
        "num_classes": len(tensors["head.weight"]) if "head.weight" in tensors else 0,
        "position_mode": layout.position_mode,
        "registers": tensors["register_tokens"].shape[1] if "register_tokens" in tensors else 0,
        "qkv_bias": "blocks.0.attn.qkv.bias" in tensors,
        "layer_scale": 1.0 if "blocks.0.ls1.gamma" in tensors else None,
        "norm_eps": layout.norm_eps,
    }


def _infer_stem(tensors: Mapping[str, Tensor], overrides: Mapping[str, Any]) -> dict[str, Any]:
    kernel = tensors["patch_embed.proj.weight"]
    if HYBRID_ROOT in tensors:
        root = tensors[HYBRID_ROOT]
        matches = [
            re.match(r"patch_embed\.backbone\.stages\.(\d)\.blocks\.(\d+)\.", name) for name in tensors
        ]
        layers = [max(int(m[2]) for m in matches if m and int(m[1]) == stage) + 1 for stage in range(3)]
        patch = (kernel.shape[2] * REDUCTION, kernel.shape[3] * REDUCTION)
        resnet = {"resnet_layers": tuple(layers), "resnet_width": root.shape[0]}
        return {"stem": "hybrid", "channels": root.shape[1], "patch_size": patch, **resnet}
    if kernel.ndim == 4:
        return {"stem": "conv", "channels": kernel.shape[1], "patch_size": tuple(kernel.shape[2:])}
    channels = overrides.get("channels", 3)
    side = math.isqrt(kernel.shape[1] // channels)
    return {"stem": "unfold", "channels": channels, "patch_size": overrides.get("patch_size", (side, side))}


def _infer_grid(
    positions: int, patch: Grid, raw: RawWeights, layout: Layout, trained_size: int | Grid | None
) -> Grid:
    """Return the grid of the positions: the one of the training images if known and if it fits, or a square.

    In timm's files the CLS token may have no position.
    """
    size = trained_size if trained_size is not None else _stated_size(raw)
    known = _patch_grid(size, patch) if size is not None else None
    cells = positions - 1
    fits = known is not None and math.prod(known) == cells
    if layout.format == "timm" and not fits and _find_grid(positions, known):
        cells = positions
    grid = _find_grid(cells, known)
    if trained_size is not None and known is not None and grid != known:
        raise WeightsError(
            f"{raw.source} has {cells} positions, but trained_size={trained_size} means "
            f"{known[0]} × {known[1]} patches"
        )
    if grid is None:
        raise WeightsError(
            f"{raw.source} has {cells} positions, which do not form a square; give "
            "trained_size=(height, width) of the training images"
        )
    return grid


def _find_grid(count: int, known: Grid | None) -> Grid | None:
    if known and math.prod(known) == count:
        return known
    side = math.isqrt(max(count, 0))
    return (side, side) if side * side == count > 0 else None


def _patch_grid(size: int | Grid, patch: Sequence[int]) -> Grid:
    """Return the rows and columns of patches in an image."""
    height, width = height_width(size)
    return height // patch[0], width // patch[1]


def _stated_size(raw: RawWeights) -> Grid | None:
    """Return the image size that an export or a config.json states, or None if it is missing or malformed."""
    timm = raw.hub_config.get("pretrained_cfg") or {}
    size = (
        raw.export.get("image_size") or raw.hub_config.get("image_size") or (timm.get("input_size") or ())[1:]
    )
    try:
        height, width = map(int, height_width(size))
    except (TypeError, ValueError):
        return None
    return height, width


def _infer_heads(width: int, raw: RawWeights, layout: Layout, overrides: Mapping[str, Any]) -> int:
    config, usual = raw.hub_config, HEADS_OF_WIDTH | (HEADS_OF_DINOV3 if layout.rotary else {})
    stated = config.get("num_attention_heads") or (config.get("model_args") or {}).get("num_heads")
    stated = raw.export.get("heads") or stated
    heads = overrides.get("heads") or stated or usual.get(width)
    if heads is None:
        raise WeightsError(
            f"{raw.source}: no tensor shows the number of heads (width {width}); give heads=N (to pretrain: "
            "init.heads=N). `dino-vit export FILE NEW.pth --format reference --heads N` writes it into a file"
        )
    return int(heads)
