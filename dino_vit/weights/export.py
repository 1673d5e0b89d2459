"""Export a backbone to another library, and check that the written file gives its features."""

import json
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from dino_vit.core import log
from dino_vit.core.storage import pickled, reason, save_plain, sync
from dino_vit.models.backbone import Backbone
from dino_vit.models.positions import ROTARY_BASE
from dino_vit.models.timm_backbone import TimmBackbone
from dino_vit.models.vit import VisionTransformer
from dino_vit.weights import layouts
from dino_vit.weights.card import is_own_card, model_arguments, model_card, photos_of
from dino_vit.weights.layouts import Layout, split
from dino_vit.weights.loading import load_backbone
from dino_vit.weights.metadata import EXPORT_KEY, WeightsError, describe_export
from dino_vit.weights.onnx import check_graph, open_graph, write_graph
from dino_vit.weights.reading import check_finite, read_weights

FORMATS = ("reference", "timm", "huggingface", "onnx")
LIBRARIES = {"timm": "timm", "huggingface": "transformers", "onnx": "onnxruntime"}
SUFFIXES = (".pth", ".pt", ".safetensors")
HUGGINGFACE_FILES = {"README.md", "config.json", "preprocessor_config.json", "model.safetensors"}
TOLERANCE = 1e-4  # relative to the largest feature: float32 sums in another order


def export_backbone(
    model: Backbone,
    path: str | Path,
    format: str,
    *,
    overwrite: bool = False,
    dynamic: bool = False,
    card: str | None = None,
) -> str:
    """Write a backbone in the format of another library and return a sentence on how it was checked.

    The formats are `reference` (DINO's own) and `timm`, each a .pth or .safetensors file, `huggingface`, a
    folder for `AutoModel.from_pretrained`, and `onnx`, of the trained size or, if `dynamic`, of any. The
    export only appears at `path` if its features equal those of the model. `card` is the text of README.md in
    a Hugging Face folder; by default it states what is known of the model.
    """
    path = Path(path)
    if format not in FORMATS:
        raise WeightsError(f"format={format!r} is not supported; choose from {', '.join(FORMATS)}")
    _check_target(path, format, overwrite)
    if format == "onnx":
        check_graph(model, path, dynamic=dynamic)
    else:
        _check_architecture(model, format)
    check_finite(model.state_dict(), "the model")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
            written = Path(folder) / path.name
            if format == "onnx":
                write_graph(model, written, dynamic=dynamic)
                sync(written)
            else:
                _write_tensors(model, written, format, card)
            summary = _compare_features(model, written, format, larger=dynamic)
            if path.is_dir():
                shutil.rmtree(path)  # _check_target found nothing but an older export in it
            written.replace(path)
            sync(path.parent)
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{path} could not be written: {reason(error)}") from error
    summary += _note_on_other_sizes(model, format)
    log.info("%s: exported to the %s format; %s", path, format, summary)
    return summary


def _check_target(path: Path, format: str, overwrite: bool) -> None:
    if path.exists() and not overwrite:
        raise WeightsError(f"{path} already exists; choose another name or allow overwriting")
    if format in ("reference", "timm") and path.suffix not in SUFFIXES:
        raise WeightsError(f"{path} must end in {', '.join(SUFFIXES)}")
    if path.is_dir():
        others = {entry.name for entry in path.iterdir()} - HUGGINGFACE_FILES
        others |= {entry.name for entry in path.glob("README.md") if not is_own_card(entry)}
        if others or format != "huggingface":
            held = f" with {', '.join(sorted(others)[:5])}" if others else ""
            raise WeightsError(f"{path} is an existing folder{held}; choose another name")


def _check_architecture(model: Backbone, format: str) -> None:
    """Refuse an architecture that the other library does not have."""
    if isinstance(model, TimmBackbone):
        if format != "timm":
            raise WeightsError(f"{model.name} of timm is written as timm or onnx, not as {format}")
        return
    assert isinstance(model, VisionTransformer)
    a, rotary, registers = model.architecture, model.rotary, bool(model.registers)
    square = model.patch_size[0] == model.patch_size[1] and model.image_size[0] == model.image_size[1]
    scaled, gated = a["layer_scale"] is not None, a["mlp"] == "swiglu"
    hidden = round(model.width * a["mlp_ratio"])
    reference, huggingface = format == "reference", format == "huggingface"
    dinov2 = huggingface and scaled and not rotary
    faults = {
        "a stem other than a convolution": a["stem"] != "conv",
        "a custom qk_scale": a["qk_scale"] is not None,
        "non-square images or patches": not square and huggingface,
        "registers": registers and reference,
        "rotary positions": rotary and reference,
        "rotary positions without layer scale": rotary and not scaled and huggingface,
        "registers without layer scale": registers and not scaled and huggingface,
        "layer scale": scaled and reference,
        f"mlp_ratio={a['mlp_ratio']:.3g}": dinov2 and hidden != _dinov2_mlp(model)[1],
        "gated MLPs": gated and not (scaled and huggingface) and not (rotary and format == "timm"),
        "qkv without bias": not a["qkv_bias"] and reference,
        "a precision other than float32 (export model.float())": any(
            parameter.dtype != torch.float32 for parameter in model.parameters()
        ),
        "a LayerNorm eps other than 1e-6": a["norm_eps"] != 1e-6 and not huggingface and not rotary,
    }
    if present := [fault for fault, is_present in faults.items() if is_present]:
        raise WeightsError(f"the {format} format does not support {', '.join(present)}")


def _layout_of(model: Backbone, format: str) -> Layout:
    a, huggingface = model.architecture, format == "huggingface"
    if a.get("positions") == "rotary":
        of_huggingface = layouts.HF_DINOV3_GATED if a["mlp"] == "swiglu" else layouts.HF_DINOV3
        return of_huggingface if huggingface else layouts.TIMM_DINOV3
    if huggingface:
        scaled = layouts.HF_DINOV2_REGISTERS if model.registers else layouts.HF_DINOV2
        return layouts.HF_VIT if a["layer_scale"] is None else scaled
    return layouts.REFERENCE if format == "reference" else layouts.TIMM


def _write_tensors(model: Backbone, path: Path, format: str, card: str | None) -> None:
    """Write the tensors under the names of another library."""
    about = {EXPORT_KEY: describe_export(model, format)}
    if isinstance(model, TimmBackbone):
        tensors = _plain(model.model)
    else:
        tensors = _to_layout(model, _layout_of(model, format))
    if format == "huggingface":
        _write_huggingface(model, tensors, path, about, card or model_card(model))
    elif path.suffix == ".safetensors":
        save_plain(tensors, path, {"format": "pt", **about})
    else:
        plain = OrderedDict(tensors)
        vars(plain).update(about)  # attributes, which others do not look at
        path.write_bytes(pickled(plain))
        sync(path)


def _plain(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}


def _to_layout(model: Backbone, layout: Layout) -> dict[str, Tensor]:
    """Return the tensors of a vision transformer as another library stores them."""
    tensors = _plain(model)
    huggingface, gated = layout.format == "huggingface", model.architecture["mlp"] == "swiglu"
    if layout is layouts.TIMM and model.registers:  # its models with registers have no position for CLS
        tensors["cls_token"] = tensors["cls_token"] + tensors["pos_embed"][:, :1]
        tensors["pos_embed"] = tensors["pos_embed"][:, 1:].contiguous()
    if huggingface or layout.rotary:
        split(tensors, "attn.qkv.bias", ("attn.q.bias", "attn.k.bias", "attn.v.bias"))
    if huggingface:
        split(tensors, "attn.qkv.weight", ("attn.q.weight", "attn.k.weight", "attn.v.weight"))
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("head.")}
    if layout.rotary:
        tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("attn.k.bias")}
    if layout.rotary and gated:
        split(tensors, "mlp.fc1", ("mlp.gate", "mlp.up"))
    mask_token = tensors.pop("mask_token", torch.zeros(1, model.width))  # read by masked training only
    if huggingface and layout is not layouts.HF_VIT:
        tensors["mask_token"] = mask_token[None] if layout.rotary else mask_token
    renamed = {layout.to_theirs(name): tensor for name, tensor in tensors.items()}
    if gated and not layout.rotary:
        for ours, theirs in ((".mlp.fc1.", ".mlp.weights_in."), (".mlp.fc2.", ".mlp.weights_out.")):
            renamed = {name.replace(ours, theirs): tensor for name, tensor in renamed.items()}
    return renamed


def _write_huggingface(
    model: Backbone, tensors: dict[str, Tensor], folder: Path, about: dict[str, str], card: str
) -> None:
    """Write config.json, preprocessor_config.json, model.safetensors and the model card."""
    folder.mkdir()
    save_plain(tensors, folder / "model.safetensors", {"format": "pt", **about})
    files = {"README.md": card, "config.json": _as_json(_huggingface_config(model))}
    if photos := photos_of(model):
        files["preprocessor_config.json"] = _as_json(_processor_config(photos))
    for name, content in files.items():
        (folder / name).write_bytes(content.encode())
        sync(folder / name)


def _as_json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


def _processor_config(photos: dict[str, Any]) -> dict[str, Any]:
    return {
        "image_processor_type": "BitImageProcessor",
        "do_convert_rgb": photos["channels"] == 3,
        "do_resize": True,
        "size": {"shortest_edge": photos["shorter_side"]},
        "resample": 3,
        "do_center_crop": True,
        "crop_size": {"height": photos["size"], "width": photos["size"]},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": photos["mean"],
        "image_std": photos["std"],
    }


def _huggingface_config(model: Backbone) -> dict[str, Any]:
    a, gated = model.architecture, model.architecture["mlp"] == "swiglu"
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
    hidden = {"intermediate_size": round(model.width * a["mlp_ratio"])}
    if a["positions"] == "rotary":
        bias = {f"{name}_bias": a["qkv_bias"] for name in ("query", "value")}
        config |= {**bias, "key_bias": False, "mlp_bias": True, "proj_bias": True, "rope_theta": ROTARY_BASE}
        config |= {**hidden, "use_gated_mlp": gated, "hidden_act": "silu" if gated else "gelu"}
        config |= {"layerscale_value": 1.0, "pos_embed_rescale": a["rotary_rescale"]}
        config |= {"num_register_tokens": model.registers}
        return {**config, "model_type": "dinov3_vit", "architectures": ["DINOv3ViTModel"]}
    if a["layer_scale"] is None:
        return {**config, **hidden, "model_type": "vit", "architectures": ["ViTModel"]}
    config |= {"mlp_ratio": _dinov2_mlp(model)[0], "use_swiglu_ffn": gated, "layerscale_value": 1.0}
    if not model.registers:
        return {**config, "model_type": "dinov2", "architectures": ["Dinov2Model"]}
    names = {"model_type": "dinov2_with_registers", "architectures": ["Dinov2WithRegistersModel"]}
    return {**config, **names, "num_register_tokens": model.registers}


def _dinov2_mlp(model: Backbone) -> tuple[int, int]:
    """Return the integer mlp_ratio of a DINOv2 config, and the hidden width that it means in transformers."""
    ratio: float = model.architecture["mlp_ratio"]
    if model.architecture["mlp"] != "swiglu":
        return round(ratio), model.width * round(ratio)
    stated = round(ratio * 3 / 2)  # gated MLPs use two thirds of it, rounded up to a multiple of 8
    return stated, (model.width * stated * 2 // 3 + 7) // 8 * 8


@torch.no_grad()
def _compare_features(model: Backbone, written: Path, format: str, *, larger: bool) -> str:
    """Compare with the features of the written file, in the library it is for if that is installed."""
    library = LIBRARIES.get(format)
    if library and find_spec(library):
        peer, how = _open_peer(model, written, format), f"with {library}"
    else:
        again = load_backbone(written, format=format, heads=model.heads, verbose=False)
        peer, how = again, "by loading it again"
    was_training, device = model.training, next(model.parameters()).device
    (height, width), (p, q) = model.image_size, model.patch_size
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, model.channels, height + larger * p, width + larger * q, generator=generator)
    ours = model.eval().forward_features(images.to(device))[:, 0].float().cpu()
    model.train(was_training)
    error = ((ours - peer(images)).abs().max() / ours.abs().max()).item()
    if not error <= TOLERANCE:
        raise WeightsError(
            f"the exported features differ by {error:.1e} of the largest (allowed: {TOLERANCE:.0e}); nothing "
            "was written"
        )
    return f"CLS features differ by at most {error:.1e} of the largest, checked {how}"


def _open_peer(model: Backbone, written: Path, format: str) -> Callable[[Tensor], Tensor]:
    """Open the written file in the library it is for; return a function from images to CLS features."""
    if format == "onnx":
        return open_graph(written)
    arguments = model_arguments(model, format)
    if format == "huggingface":
        from transformers import AutoModel
        from transformers.utils import logging as bars

        shown = bars.is_progress_bar_enabled()
        bars.disable_progress_bar()
        try:
            opened = AutoModel.from_pretrained(written, **arguments).eval()
        finally:
            if shown:
                bars.enable_progress_bar()
        return lambda images: opened(images).last_hidden_state[:, 0]
    import timm
    from timm.models.eva import Eva

    if isinstance(model, TimmBackbone):
        features: Callable[[Tensor], Tensor] = timm.create_model(**arguments, checkpoint_path=written).eval()
        return features
    assert isinstance(model, VisionTransformer)
    norm = partial(timm.layers.LayerNorm, eps=model.architecture["norm_eps"])
    peer = (Eva if model.rotary else timm.models.VisionTransformer)(**arguments, norm_layer=norm).eval()
    peer.load_state_dict(read_weights(written, "teacher").tensors)
    return lambda images: peer.forward_features(images)[:, 0]


def _note_on_other_sizes(model: Backbone, format: str) -> str:
    """Return a note if the other library resamples positions differently."""
    if format == "onnx" or not isinstance(model, VisionTransformer) or model.rotary:
        return ""
    # Modes dino and dinov2 are the same rule.
    modes = (_layout_of(model, format).position_mode, model.position_mode)
    theirs, ours = (mode.replace("dinov2", "dino") for mode in modes)
    return "" if theirs == ours else f"; at other sizes positions are resampled in mode {theirs}, not {ours}"
