"""Export a backbone to another library or as an ONNX graph; the written file must give its features."""

import copy
import json
import logging
import shutil
import tempfile
import warnings
from collections import OrderedDict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from dino_vit.core import Size, log
from dino_vit.core.storage import pickled, reason, save_plain, sync
from dino_vit.models.backbone import Backbone
from dino_vit.models.timm_backbone import TimmBackbone
from dino_vit.models.vit import VisionTransformer, ViTConfig
from dino_vit.weights import layouts
from dino_vit.weights.card import (
    CARD_MARK,
    describe,
    dinov2_mlp,
    huggingface_config,
    model_arguments,
    model_card,
    processor_config,
)
from dino_vit.weights.classifier import Classifier
from dino_vit.weights.layouts import Layout, split
from dino_vit.weights.loading import load_backbone
from dino_vit.weights.metadata import WeightsError
from dino_vit.weights.reading import CLASSIFIER, EXPORT_KEY, PROVENANCE_FACTS
from dino_vit.weights.stems import build_timm_stem

FORMATS = ("reference", "timm", "huggingface", "onnx")
_SUFFIXES = (".pth", ".pt", ".safetensors")
SUFFIXES = {"reference": _SUFFIXES, "timm": _SUFFIXES, "onnx": (".onnx",)}
LIBRARIES = {"timm": "timm", "huggingface": "transformers", "onnx": "onnxruntime"}
TOLERANCE = 1e-4  # of a feature, relative to the largest: float32 sums in another order
LARGEST_GRAPH = 2e9  # bytes of weights in an ONNX file
INPUT, OUTPUTS, CLASSIFIER_OUTPUTS = "images", ("cls", "patches"), ("probabilities",)
METADATA_KEY = "dino_vit"
HUGGINGFACE_FILES = {"README.md", "config.json", "preprocessor_config.json", "model.safetensors"}


def export_backbone(
    model: Backbone | Classifier,
    path: str | Path,
    format: str,
    *,
    overwrite: bool = False,
    card: str | None = None,
) -> str:
    """Write a backbone in the format of another library and return a sentence on how it was checked.

    The formats are `reference` (DINO's own) and `timm`, each a .pth or .safetensors file, `huggingface`, a
    folder for `AutoModel.from_pretrained`, and `onnx`. The export only appears at `path` if its features
    equal those of the model. A classifier, which `load_classifier` returns, is written as onnx only; its
    graph gives probabilities, or numbers. `card` is the text of README.md in a Hugging Face folder; by
    default it states what is known of the model.
    """
    path = Path(path)
    if format not in FORMATS:
        raise WeightsError(f"format={format!r} is not supported; choose from {', '.join(FORMATS)}")
    _check_target(path, format, overwrite)
    if format == "onnx":
        _check_graph(model)
    elif isinstance(model, Classifier):
        raise WeightsError(f"format={format} holds no classifier; choose onnx, or export its .backbone")
    else:
        _check_architecture(model, format)
    model = copy.deepcopy(model).cpu().float().eval()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
            written = Path(folder) / path.name
            if format == "onnx":
                _write_graph(model, written, _describe(model, format))
            else:
                _write_tensors(_backbone_of(model), written, format, card)
            summary = _compare_features(model, written, format)
            if path.is_dir():
                shutil.rmtree(path)  # _check_target found nothing but an older export in it
            written.replace(path)
            sync(path.parent)
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{path} could not be written: {reason(error)}") from error
    log.info("%s: exported to the %s format; %s", path, format, summary)
    return summary


def _check_target(path: Path, format: str, overwrite: bool) -> None:
    if path.exists() and not overwrite:
        raise WeightsError(
            f"{path} already exists; choose another name, or give --overwrite (overwrite=True)"
        )
    if (suffixes := SUFFIXES.get(format)) and path.suffix not in suffixes:
        raise WeightsError(f"{path} must end in {', '.join(suffixes)}")
    if path.is_dir():
        others = {entry.name for entry in path.iterdir()} - HUGGINGFACE_FILES
        others |= {
            entry.name for entry in path.glob("README.md") if CARD_MARK.encode() not in entry.read_bytes()
        }
        if others or format != "huggingface":
            held = f" with {', '.join(sorted(others)[:5])}" if others else ""
            raise WeightsError(f"{path} is an existing folder{held}; choose another name")


def _check_architecture(model: Backbone, format: str) -> None:
    """Refuse an architecture that the other library does not have."""
    if isinstance(model, TimmBackbone):
        if format != "timm":
            raise WeightsError(f"{model.name} of timm is written as timm or onnx, not as {format}")
        return
    a, layout = model.architecture, _layout_of(model, format)
    faults = [f"{key}={a[key]}" for key in layout.lacks if a[key] != getattr(ViTConfig, key)]
    if a["stem"] == "conv" and len({*model.patch_size}) > 1:
        faults.append("stem=conv with patches that are not square")
    if a["positions"] == "rotary" and not layout.rotary:
        faults.append("positions=rotary")
    if a["positions"] == "rotary" and a["key_bias"]:
        faults.append("key_bias=True")
    is_square = len({*model.patch_size}) == len({*model.image_size}) == 1
    if format in ("huggingface", "reference") and not is_square:
        faults.append("non-square images or patches")
    if format == "huggingface":
        if layout.rotary and a["layer_scale"] is None:
            faults.append("positions=rotary without layer_scale")
        dinov2 = layout in (layouts.HF_DINOV2, layouts.HF_DINOV2_REGISTERS)
        if dinov2 and round(model.width * a["mlp_ratio"]) != dinov2_mlp(model)[1]:
            faults.append(f"mlp_ratio={a['mlp_ratio']:.3g}")
    if faults:
        text = f"the {format} format does not support {', '.join(faults)}"
        if "stem=conv" in faults:
            text += "; export to timm or onnx, or train with model.stem=patch (recipe=auto may choose conv)"
        raise WeightsError(text)


def _layout_of(model: Backbone, format: str) -> Layout:
    a = model.architecture
    rotary, gated = a["positions"] == "rotary", a["mlp"] == "swiglu"
    if format == "reference":
        return layouts.REFERENCE
    if format == "timm":
        return layouts.TIMM_DINOV3 if rotary else layouts.TIMM
    if rotary:
        return layouts.HF_DINOV3_GATED if gated else layouts.HF_DINOV3
    if a["layer_scale"] is None:
        return layouts.HF_VIT
    return layouts.HF_DINOV2_REGISTERS if model.registers else layouts.HF_DINOV2


def _backbone_of(exported: Backbone | Classifier) -> Backbone:
    return exported.backbone if isinstance(exported, Classifier) else exported


def _size_of(exported: Backbone | Classifier) -> Size:
    """Return the size of images, which for a classifier is that of those it learned from."""
    size: Size = exported.transform.size if isinstance(exported, Classifier) else exported.image_size
    return size


def _describe(exported: Backbone | Classifier, format: str) -> str:
    """Return what the tensors of an export do not show, as JSON."""
    model = _backbone_of(exported)
    facts = describe(model) if format == "onnx" else {}
    facts = {name: value for name, value in facts.items() if name not in ("file", "config")}
    facts |= {name: getattr(model.provenance, name) for name in PROVENANCE_FACTS}
    facts |= {name: getattr(model, name) for name in ("heads", "image_size", "channels")}
    names = ("positions", "name", "norm_eps")
    facts |= {name: value for name, value in model.architecture.items() if name in names}
    if facts.get("positions") == "rotary":
        facts["rotary_rescale"] = model.architecture["rotary_rescale"] or 0  # null would be no fact
    if isinstance(exported, Classifier):
        facts[CLASSIFIER] = exported.facts.model_dump(mode="json")
    return json.dumps({**facts, "format": format})


def _write_tensors(model: Backbone, path: Path, format: str, card: str | None) -> None:
    """Write the tensors under the names of another library."""
    about = {EXPORT_KEY: _describe(model, format)}
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
    return {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}


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
    if huggingface and layout.rotary:  # an empty tensor where there are none
        tensors.setdefault("register_tokens", torch.zeros(1, 0, model.width))
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
    configs = {"config.json": huggingface_config(model)}
    if processor := processor_config(model):
        configs["preprocessor_config.json"] = processor
    texts = {name: json.dumps(config, indent=2, sort_keys=True) + "\n" for name, config in configs.items()}
    for name, text in {"README.md": card, **texts}.items():
        (folder / name).write_bytes(text.encode())
        sync(folder / name)


@torch.no_grad()
def _compare_features(exported: Backbone | Classifier, written: Path, format: str) -> str:
    """Compare with the features, or the probabilities, that the library of the format computes."""
    model = _backbone_of(exported)
    shape = 2, model.channels, *_size_of(exported)
    images = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    what = "outputs of the classifier" if isinstance(exported, Classifier) else "CLS features"
    library = LIBRARIES.get(format)
    ours = exported(images) if isinstance(exported, Classifier) else model.forward_cls(images)
    if library and find_spec(library):
        how, theirs = f"with {library}", _features_elsewhere(model, str(written), format, images)
        if format == "timm" and isinstance(model, VisionTransformer):  # which may have a classifier
            ours = model(images)
    else:
        how = "by loading it again"
        theirs = load_backbone(written, format=format, heads=model.heads, verbose=False).forward_cls(images)
    error = ((ours - theirs).abs().max() / ours.abs().max()).item()
    if not error <= TOLERANCE:
        raise WeightsError(
            f"largest relative difference of the {what}: {error:.1e} (allowed: {TOLERANCE:.0e}); "
            "nothing was written"
        )
    return f"largest relative difference of the {what}: {error:.1g}, checked {how}"


def _features_elsewhere(model: Backbone, path: str, format: str, images: Tensor) -> Tensor:
    """Open a written file by another library, as `card.usage` tells users to, and return its features."""
    if format == "onnx":
        import onnxruntime

        return torch.from_numpy(onnxruntime.InferenceSession(path).run(None, {INPUT: images.numpy()})[0])
    arguments = model_arguments(model, format)
    if format == "huggingface":
        from transformers import AutoModel

        theirs: Any = AutoModel.from_pretrained(path, **arguments).eval()
        features: Tensor = theirs(images).last_hidden_state[:, 0]
        return features
    import timm

    if isinstance(model, TimmBackbone):
        return timm.create_model(**arguments, checkpoint_path=path).eval()(images)
    rotary = model.architecture["positions"] == "rotary"
    kind = timm.models.eva.Eva if rotary else timm.models.VisionTransformer
    layers = {"norm_layer": partial(timm.layers.LayerNorm, eps=model.architecture["norm_eps"])}
    if model.architecture["stem"] != "patch":
        assert isinstance(model, VisionTransformer)
        layers["embed_layer"] = build_timm_stem(model)
    theirs = kind(**arguments, **layers).eval()
    timm.models.load_checkpoint(theirs, path)
    return theirs(images)


def _check_graph(model: nn.Module) -> None:
    """Raise WeightsError for what a graph cannot hold."""
    if not (find_spec("onnxscript") and find_spec("onnxruntime")):
        raise WeightsError("to write ONNX, install its libraries: pip install onnxruntime onnxscript")
    size = sum(tensor.numel() * 4 for tensor in model.state_dict().values())
    if size > LARGEST_GRAPH:
        raise WeightsError(f"an ONNX file holds weights of up to 2 GB, but these are {size / 1e9:.1f} GB")


class _Graph(nn.Module):
    """A backbone that returns the CLS token and the patches."""

    def __init__(self, model: Backbone) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        tokens = self.model.forward_features(images)
        return tokens[:, 0], tokens[:, self.model.first_patch :]


@torch.no_grad()
def _write_graph(exported: Backbone | Classifier, path: Path, about: str) -> None:
    """Write a graph for any number of images of the trained size, and what is known of the model, as JSON."""
    model = _backbone_of(exported)
    graph = exported if isinstance(exported, Classifier) else _Graph(model).eval()
    outputs = CLASSIFIER_OUTPUTS if isinstance(exported, Classifier) else OUTPUTS
    images = torch.zeros(2, model.channels, *_size_of(exported))
    sizes: dict[int, Any] = {0: torch.export.Dim("batch")}
    level = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporters' own dependencies warn of many things
        logging.disable(logging.WARNING)
        try:
            program = torch.export.export(graph, (images,), dynamic_shapes=(sizes,))
            names: dict[str, Any] = {"input_names": [INPUT], "output_names": list(outputs)}
            onnx = torch.onnx.export(program, **names, dynamo=True, verbose=False)
        finally:
            logging.disable(level)
    assert onnx is not None
    onnx.model.metadata_props[METADATA_KEY] = about
    onnx.save(path)
    sync(path)
