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
from torch import Tensor

from dino_vit.core import log
from dino_vit.core.storage import pickled, reason, save_plain, sync, utf8_path
from dino_vit.models.backbone import Backbone
from dino_vit.models.positions import ROTARY_BASE
from dino_vit.models.timm_backbone import TimmBackbone
from dino_vit.models.vit import VisionTransformer
from dino_vit.weights import layouts
from dino_vit.weights.exporting.card import is_own_card, model_card
from dino_vit.weights.exporting.onnx import check_graph, open_graph, write_graph
from dino_vit.weights.exporting.usage import model_arguments, photos_of
from dino_vit.weights.layouts import Layout
from dino_vit.weights.loading import read_backbone
from dino_vit.weights.metadata import EXPORT_KEY, WeightsError, describe_export
from dino_vit.weights.of_timm import open_in_timm, timm_tensors
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
    try:
        summary = _write(model, path, format, dynamic, card)
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{path} could not be written: {reason(error)}") from error
    log.info("%s: exported to the %s format; %s", path, format, summary)
    return summary


def _layout_of(model: Backbone, format: str) -> Layout:
    a, huggingface = model.architecture, format == "huggingface"
    if isinstance(model, VisionTransformer) and model.rotary:
        of_huggingface = layouts.HF_DINOV3_GATED if a["mlp"] == "swiglu" else layouts.HF_DINOV3
        return of_huggingface if huggingface else layouts.TIMM_DINOV3
    if huggingface:
        scaled = layouts.HF_DINOV2_REGISTERS if model.registers else layouts.HF_DINOV2
        return layouts.HF_VIT if a["layer_scale"] is None else scaled
    return layouts.REFERENCE if format == "reference" else layouts.TIMM


def _write(model: Backbone, path: Path, format: str, dynamic: bool, card: str | None) -> str:
    """Write an export beside `path`, compare its features, and move it there."""
    check_finite(model.state_dict(), "the model")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        written = Path(folder) / path.name
        if format == "onnx":
            write_graph(model, written, dynamic=dynamic)
            sync(written)
            summary = _compare_features(model, written, format, dynamic)
        else:
            layout = _layout_of(model, format)
            _write_tensors(model, layout, written, format)
            if format == "huggingface":
                (written / "README.md").write_bytes((card or model_card(model)).encode())
                sync(written / "README.md")
            summary = _compare_features(model, written, format) + _note_on_other_sizes(model, layout)
        if path.is_dir():
            shutil.rmtree(path)  # _check_target found nothing but an older export in it
        written.replace(path)
        sync(path.parent)
    return summary


def _write_tensors(model: Backbone, layout: Layout, path: Path, format: str) -> None:
    """Write the tensors under the names of another library."""
    about = {EXPORT_KEY: describe_export(model, format)}
    tensors = timm_tensors(model) if isinstance(model, TimmBackbone) else _to_layout(model, layout)
    if format == "huggingface":
        _write_huggingface(model, layout, tensors, path, about)
    elif path.suffix == ".safetensors":
        save_plain(tensors, path, {"format": "pt", **about})
    else:
        plain = OrderedDict(tensors)
        vars(plain).update(about)  # attributes, which others do not look at
        path.write_bytes(pickled(plain))
        sync(path)


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
    a = model.architecture
    square = model.patch_size[0] == model.patch_size[1] and model.image_size[0] == model.image_size[1]
    scaled, gated, registers = a["layer_scale"] is not None, a["mlp"] == "swiglu", bool(model.registers)
    hidden = round(model.width * a["mlp_ratio"])
    reference, huggingface = format == "reference", format == "huggingface"
    faults = {
        "a stem other than a convolution": a["stem"] != "conv",
        "a custom qk_scale": a["qk_scale"] is not None,
        "non-square images or patches": not square and huggingface,
        "registers": registers and reference,
        "rotary positions": model.rotary and reference,
        "rotary positions without layer scale": model.rotary and not scaled and huggingface,
        "registers without layer scale": registers and not scaled and huggingface,
        "layer scale": scaled and reference,
        f"mlp_ratio={a['mlp_ratio']:.3g}": scaled
        and huggingface
        and not model.rotary
        and hidden != _dinov2_mlp(model)[1],
        "gated MLPs": gated and not (scaled and huggingface) and not (model.rotary and format == "timm"),
        "qkv without bias": not a["qkv_bias"] and reference,
        "a precision other than float32 (export model.float())": any(
            parameter.dtype != torch.float32 for parameter in model.parameters()
        ),
        "a LayerNorm eps other than 1e-6": a["norm_eps"] != 1e-6 and not huggingface and not model.rotary,
    }
    if present := [fault for fault, is_present in faults.items() if is_present]:
        raise WeightsError(f"the {format} format does not support {', '.join(present)}")


def _to_layout(model: Backbone, layout: Layout) -> dict[str, Tensor]:
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    if layout is layouts.TIMM and model.registers:  # its models with registers have no position for CLS
        tensors["cls_token"] = tensors["cls_token"] + tensors["pos_embed"][:, :1]
        tensors["pos_embed"] = tensors["pos_embed"][:, 1:].contiguous()
    huggingface, gated = layout.format == "huggingface", model.architecture["mlp"] == "swiglu"
    if huggingface:
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("head.")}
    separate = [".attn.qkv."] if huggingface else [".attn.qkv.bias"] if layout.rotary else []
    for name in [name for name in tensors if any(part in name for part in separate)]:
        for third, rows in zip("qkv", tensors.pop(name).chunk(3), strict=True):
            if not (layout.rotary and third == "k" and name.endswith("bias")):
                tensors[name.replace("qkv", third)] = rows.clone()
    if layout.rotary and gated:
        for name in [name for name in tensors if ".mlp.fc1." in name]:
            for part, rows in zip(("gate", "up"), tensors.pop(name).chunk(2), strict=True):
                tensors[name.replace("fc1", part)] = rows.clone()
    mask_token = tensors.pop("mask_token", torch.zeros(1, model.width))  # read by masked training only
    if huggingface and layout is not layouts.HF_VIT:
        tensors["mask_token"] = mask_token[None] if layout.rotary else mask_token
    renamed = {layout.to_theirs(name): tensor for name, tensor in tensors.items()}
    if gated and not layout.rotary:
        for ours, theirs in ((".mlp.fc1.", ".mlp.weights_in."), (".mlp.fc2.", ".mlp.weights_out.")):
            renamed = {name.replace(ours, theirs): tensor for name, tensor in renamed.items()}
    return renamed


def _write_huggingface(
    model: Backbone, layout: Layout, tensors: dict[str, Tensor], folder: Path, about: dict[str, str]
) -> None:
    """Write config.json, preprocessor_config.json and model.safetensors."""
    folder.mkdir()
    save_plain(tensors, folder / "model.safetensors", {"format": "pt", **about})
    contents = {"config.json": _huggingface_config(model, layout)}
    if photos := photos_of(model):
        contents["preprocessor_config.json"] = _processor_config(photos)
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
        sync(folder / name)


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


def _huggingface_config(model: Backbone, layout: Layout) -> dict[str, Any]:
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
    hidden = round(model.width * a["mlp_ratio"])
    if layout.rotary:
        bias = {f"{name}_bias": a["qkv_bias"] for name in ("query", "value")}
        config |= {**bias, "key_bias": False, "mlp_bias": True, "proj_bias": True, "rope_theta": ROTARY_BASE}
        config |= {"use_gated_mlp": a["mlp"] == "swiglu", "intermediate_size": hidden}
        config |= {"hidden_act": "silu" if a["mlp"] == "swiglu" else "gelu", "layerscale_value": 1.0}
        config |= {"num_register_tokens": model.registers, "pos_embed_rescale": a["rotary_rescale"]}
        return {**config, "model_type": "dinov3_vit", "architectures": ["DINOv3ViTModel"]}
    if layout is layouts.HF_VIT:
        return {**config, "model_type": "vit", "architectures": ["ViTModel"], "intermediate_size": hidden}
    config |= {
        "mlp_ratio": _dinov2_mlp(model)[0],
        "use_swiglu_ffn": a["mlp"] == "swiglu",
        "layerscale_value": 1.0,
    }
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
def _compare_features(model: Backbone, written: Path, format: str, larger: bool = False) -> str:
    """Compare with the features of the written file, in the library it is for if that is installed."""
    library = LIBRARIES.get(format)
    peer: Callable[[Tensor], Tensor]
    if library and find_spec(library):
        with utf8_path(written) as path:
            peer, how = _open_peer(model, Path(path), format), f"with {library}"
    else:
        again, _ = read_backbone(written, format=format, heads=model.heads)  # unlogged: its name is temporary
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


def _note_on_other_sizes(model: Backbone, layout: Layout) -> str:
    """Return a note if the other library resamples positions differently."""
    if layout.rotary or not isinstance(model, VisionTransformer):
        return ""
    # Modes dino and dinov2 are the same rule.
    theirs, ours = (mode.replace("dinov2", "dino") for mode in (layout.position_mode, model.position_mode))
    return "" if theirs == ours else f"; at other sizes positions are resampled in mode {theirs}, not {ours}"


def _open_peer(model: Backbone, written: Path, format: str) -> Callable[[Tensor], Tensor]:
    """Open the written file in the library it is for; return a function from images to CLS features."""
    if format == "onnx":
        return open_graph(written)
    if isinstance(model, TimmBackbone):
        return open_in_timm(model, written)
    arguments = model_arguments(model, format)
    if format == "huggingface":
        from transformers import AutoModel
        from transformers.utils import logging as bars

        shown = bars.is_progress_bar_enabled()
        bars.disable_progress_bar()  # a bar of its own, also where nothing is to be printed
        try:
            opened = AutoModel.from_pretrained(written, **arguments).eval()
        finally:
            if shown:
                bars.enable_progress_bar()
        return lambda images: opened(images).last_hidden_state[:, 0]
    from timm.layers import LayerNorm
    from timm.models import VisionTransformer as TimmTransformer
    from timm.models.eva import Eva

    assert isinstance(model, VisionTransformer)
    norm = partial(LayerNorm, eps=model.architecture["norm_eps"])
    peer = Eva(**arguments, norm_layer=norm) if model.rotary else TimmTransformer(**arguments)
    peer.load_state_dict(read_weights(written, "teacher").tensors)
    return lambda images: peer.eval().forward_features(images)[:, 0]
