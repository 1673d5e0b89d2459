"""Write a backbone as others store theirs, and check that what was written gives the same features."""

from __future__ import annotations

import importlib.util
import json
import logging
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dino_vit.core.storage import save_plain, sync
from dino_vit.models.vit import VisionTransformer
from dino_vit.weights import layouts
from dino_vit.weights.layouts import Layout
from dino_vit.weights.loading import load_backbone
from dino_vit.weights.reading import WeightsError, read_weights

log = logging.getLogger("dino_vit")

EXPORTS = ("reference", "timm", "torchvision", "huggingface")
HUGGINGFACE_FILES = {"config.json", "preprocessor_config.json", "model.safetensors"}
TOLERANCE = 1e-4  # of the largest feature: float32 sums in another order


def export_backbone(
    model: VisionTransformer, path: str | Path, format: str, *, overwrite: bool = False
) -> str:
    """Write the layout of another library and return a sentence on how its features were checked.

    The formats are `reference`, `timm` and `torchvision`, each a .pth or .safetensors file, and
    `huggingface`, a folder for `AutoModel.from_pretrained`. Nothing is put in place before its features are
    those of the model.
    """
    path = Path(path)
    if format not in EXPORTS:
        raise WeightsError(f"format={format!r} is none of {', '.join(EXPORTS)}")
    if path.exists() and not overwrite:
        raise WeightsError(f"{path} exists already; choose another name or allow it to be overwritten")
    kept = {entry.name for entry in path.iterdir()} - HUGGINGFACE_FILES if path.is_dir() else set()
    if kept or (path.is_dir() and format != "huggingface"):
        raise WeightsError(
            f"{path} is a folder that an export would replace, with "
            f"{', '.join(sorted(kept)[:5]) or 'all it holds'} in it; choose another name"
        )
    if format != "huggingface" and path.suffix not in (".pth", ".pt", ".safetensors"):
        raise WeightsError(f"{path} must end in .pth, .pt or .safetensors")
    _refuse_what_does_not_fit(model, format)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as place:
        written = Path(place) / path.name
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
        if format == "huggingface":
            _write_huggingface(model, tensors, written)
        else:
            _write_file(_to_layout(model, tensors, format), written)
        said = _check(model, written, format) + _other_sizes(model, format)
        if path.is_dir():
            shutil.rmtree(path)  # it held an export and nothing else
        written.replace(path)
        sync(path.parent)
    log.info("%s: written for %s; %s", path, format, said)
    return said


def _refuse_what_does_not_fit(model: VisionTransformer, format: str) -> None:
    """Say what of this architecture the other library has no place for."""
    a = model.architecture
    square = model.patch_size[0] == model.patch_size[1] and model.image_size[0] == model.image_size[1]
    scaled, gated = a["layer_scale"] is not None, a["mlp"] == "swiglu"
    faults = {
        "a stem other than a convolution": a["stem"] != "conv",
        "a qk_scale of its own": a["qk_scale"] is not None,
        "images or patches that are not square": not square and format in ("torchvision", "huggingface"),
        "registers": bool(model.registers) and format in ("torchvision", "reference"),
        "registers without layer scale": bool(model.registers) and not scaled and format == "huggingface",
        "layer scale": scaled and format in ("torchvision", "reference"),
        f"an mlp_ratio of {a['mlp_ratio']:.3g}": scaled
        and format == "huggingface"
        and round(model.width * a["mlp_ratio"]) != _dinov2_hidden(model),
        "gated MLPs": gated and not (scaled and format == "huggingface"),
        "qkv without bias": not a["qkv_bias"] and format in ("torchvision", "reference"),
        "channels other than 3": model.channels != 3 and format == "torchvision",
        "a precision other than float32 (export model.float())": any(
            parameter.dtype != torch.float32 for parameter in model.parameters()
        ),
        "a LayerNorm eps other than 1e-6": a["norm_eps"] != 1e-6 and format != "huggingface",
    }
    found = [what for what, present in faults.items() if present]
    if found:
        raise WeightsError(f"the {format} format has no place for {', '.join(found)}")


def _to_layout(model: VisionTransformer, tensors: dict[str, Tensor], format: str) -> dict[str, Tensor]:
    if format == "reference":
        return tensors
    if format == "torchvision":
        return {layouts.TORCHVISION.to_theirs(name): tensor for name, tensor in tensors.items()}
    if model.registers:
        tensors["cls_token"] = tensors["cls_token"] + tensors["pos_embed"][:, :1]
        tensors["pos_embed"] = tensors["pos_embed"][:, 1:].contiguous()
    return {layouts.TIMM.to_theirs(name): tensor for name, tensor in tensors.items()}


def _write_file(tensors: dict[str, Tensor], path: Path) -> None:
    if path.suffix == ".safetensors":
        save_plain(tensors, path, {"format": "pt"})
    else:
        torch.save(tensors, path)
        sync(path)


def _write_huggingface(model: VisionTransformer, tensors: dict[str, Tensor], folder: Path) -> None:
    """Write config.json, preprocessor_config.json and model.safetensors under the names that files carry."""
    layout, config = _huggingface_config(model)
    parts = {layout.to_theirs(name): tensor for name, tensor in layouts.split_qkv(tensors).items()}
    parts = {name: tensor for name, tensor in parts.items() if not name.startswith("classifier.")}
    if layout is not layouts.HF_VIT:
        parts["embeddings.mask_token"] = torch.zeros(1, model.width)  # only masked training reads it
    if model.architecture["mlp"] == "swiglu":
        gated = {".mlp.fc1.": ".mlp.weights_in.", ".mlp.fc2.": ".mlp.weights_out."}
        for plain, theirs in gated.items():
            parts = {name.replace(plain, theirs): tensor for name, tensor in parts.items()}
    folder.mkdir()
    _write_file(parts, folder / "model.safetensors")
    _write_json(config, folder / "config.json")
    known = model.provenance
    if known is not None and known.mean is not None and known.std is not None:
        size = {"height": model.image_size[0], "width": model.image_size[1]}
        statistics = {"image_mean": known.mean, "image_std": known.std}
        processor = {"image_processor_type": "ViTImageProcessor", "size": size, "resample": 3, **statistics}
        _write_json(processor, folder / "preprocessor_config.json")


def _huggingface_config(model: VisionTransformer) -> tuple[Layout, dict[str, Any]]:
    a = model.architecture
    config = {
        "hidden_size": model.width,
        "num_hidden_layers": model.depth,
        "num_attention_heads": model.heads,
        "image_size": model.image_size[0],
        "patch_size": model.patch_size[0],
        "num_channels": model.channels,
        "qkv_bias": a["qkv_bias"],
        "layer_norm_eps": a["norm_eps"],
        "hidden_act": "gelu",
        "torch_dtype": "float32",
    }
    if a["layer_scale"] is None:
        hidden = round(model.width * a["mlp_ratio"])
        vit = {"model_type": "vit", "architectures": ["ViTModel"], "intermediate_size": hidden}
        return layouts.HF_VIT, {**config, **vit}
    dinov2 = {
        "mlp_ratio": _dinov2_ratio(model),
        "use_swiglu_ffn": a["mlp"] == "swiglu",
        "layerscale_value": 1.0,
    }
    if model.registers:
        names = {"model_type": "dinov2_with_registers", "architectures": ["Dinov2WithRegistersModel"]}
        return layouts.HF_DINOV2_REGISTERS, {
            **config, **dinov2, **names, "num_register_tokens": model.registers
        }  # fmt: skip
    return layouts.HF_DINOV2, {**config, **dinov2, "model_type": "dinov2", "architectures": ["Dinov2Model"]}


def _dinov2_ratio(model: VisionTransformer) -> int:
    """Return the whole mlp_ratio of a DINOv2 configuration, of which gated MLPs take two thirds."""
    ratio: float = model.architecture["mlp_ratio"]
    return round(ratio * 3 / 2) if model.architecture["mlp"] == "swiglu" else round(ratio)


def _dinov2_hidden(model: VisionTransformer) -> int:
    """Return the hidden width that transformers derives from that ratio, rounded up to a multiple of 8."""
    hidden = model.width * _dinov2_ratio(model)
    return (hidden * 2 // 3 + 7) // 8 * 8 if model.architecture["mlp"] == "swiglu" else hidden


def _write_json(content: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    sync(path)


@torch.no_grad()
def _check(model: VisionTransformer, written: Path, format: str) -> str:
    """Compare the features of what was written, in the library that it is for if that is installed."""
    library, open_peer = _OPENERS.get(format, (None, None))
    if library and open_peer and importlib.util.find_spec(library):
        peer, witness = open_peer(model, written), f"with {library}"
    else:
        peer, witness = load_backbone(written, format=format, heads=model.heads), "by reading it back"
    was_training = model.training
    device = next(model.parameters()).device
    images = torch.randn(2, model.channels, *model.image_size, generator=torch.Generator().manual_seed(0))
    ours = model.eval().forward_features(images.to(device))[:, 0].float().cpu()
    model.train(was_training)
    theirs = peer(images)
    error = ((ours - theirs).abs().max() / ours.abs().max()).item()
    if not error <= TOLERANCE:
        raise WeightsError(
            f"the exported features differ by {error:.1e} of the largest, where {TOLERANCE:.0e} is allowed; "
            "nothing was kept"
        )
    return f"CLS features differ by at most {error:.1e} of the largest, checked {witness}"


def _other_sizes(model: VisionTransformer, format: str) -> str:
    """Say it where the other library resamples positions by another rule than the model."""
    if format == "torchvision":
        return ", which takes images of the trained size alone"
    layout = {"reference": layouts.REFERENCE, "timm": layouts.TIMM}.get(format) or _huggingface_config(model)[
        0
    ]
    theirs, ours = (mode.replace("dinov2", "dino") for mode in (layout.position_mode, model.position_mode))
    return "" if theirs == ours else f"; at other sizes positions are resampled in mode {theirs}, not {ours}"


def _open_timm(model: VisionTransformer, written: Path) -> Callable[[Tensor], Tensor]:
    from timm.models import load_checkpoint
    from timm.models.vision_transformer import VisionTransformer as TimmTransformer

    a = model.architecture
    peer = TimmTransformer(
        img_size=model.image_size,
        patch_size=model.patch_size,
        in_chans=model.channels,
        num_classes=a["num_classes"],
        embed_dim=model.width,
        depth=model.depth,
        num_heads=model.heads,
        mlp_ratio=a["mlp_ratio"],
        qkv_bias=a["qkv_bias"],
        init_values=a["layer_scale"],
        reg_tokens=model.registers,
        no_embed_class=bool(model.registers),
    )
    load_checkpoint(peer, str(written), strict=True)
    return lambda images: peer.eval().forward_features(images)[:, 0]


def _open_torchvision(model: VisionTransformer, written: Path) -> Callable[[Tensor], Tensor]:
    from torchvision.models import VisionTransformer as TorchvisionTransformer

    peer = TorchvisionTransformer(
        image_size=model.image_size[0],
        patch_size=model.patch_size[0],
        num_layers=model.depth,
        num_heads=model.heads,
        hidden_dim=model.width,
        mlp_dim=round(model.width * model.architecture["mlp_ratio"]),
    )
    tensors = read_weights(written, "teacher").tensors
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("heads.")}
    peer.heads = nn.Identity()
    peer.load_state_dict(tensors)
    return peer.eval()


def _open_huggingface(model: VisionTransformer, written: Path) -> Callable[[Tensor], Tensor]:
    from transformers import AutoModel

    without_pooler = {} if model.architecture["layer_scale"] is not None else {"add_pooling_layer": False}
    peer = AutoModel.from_pretrained(written, **without_pooler).eval()
    return lambda images: peer(images).last_hidden_state[:, 0]


_OPENERS = {
    "timm": ("timm", _open_timm),
    "torchvision": ("torchvision", _open_torchvision),
    "huggingface": ("transformers", _open_huggingface),
}
