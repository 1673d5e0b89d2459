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
from dino_vit.models.vit import VisionTransformer
from dino_vit.weights.card import describe_backbone, model_card
from dino_vit.weights.classifier import ImageClassifier
from dino_vit.weights.formats.builders import (
    huggingface_config,
    is_folder,
    model_arguments,
    processor_config,
    timm_config,
    timm_name,
)
from dino_vit.weights.formats.stems import build_timm_stem
from dino_vit.weights.formats.tensors import check_architecture, contiguous_state_dict, layout_of, to_layout
from dino_vit.weights.loading import load_backbone
from dino_vit.weights.metadata import WeightsError
from dino_vit.weights.read_file import CLASSIFIER, EXPORT_KEY, PROVENANCE_FACTS

FORMATS = ("reference", "timm", "huggingface", "onnx")
_SUFFIXES = (".pth", ".pt", ".safetensors")
SUFFIXES = {"reference": _SUFFIXES, "timm": _SUFFIXES, "onnx": (".onnx",)}
LIBRARIES = {"timm": "timm", "huggingface": "transformers", "onnx": "onnxruntime"}
TOLERANCE = 1e-4  # of a feature, relative to the largest: float32 sums in another order
LARGEST_GRAPH = 2e9  # bytes of weights in an ONNX file
INPUT, OUTPUTS, CLASSIFIER_OUTPUTS = "images", ("cls", "patches"), ("probabilities",)
METADATA_KEY = "dino_vit"
FOLDERS = ("timm", "huggingface")  # formats of which one may write a folder
FOLDER_FILES = {"README.md", "config.json", "preprocessor_config.json", "model.safetensors"}


def export_backbone(
    model: Backbone | ImageClassifier,
    path: str | Path,
    format: str,
    *,
    overwrite: bool = False,
) -> str:
    """Write a backbone in the format of another library and return a sentence on how it was checked.

    The formats are `reference` (DINO's own), a .pth or .safetensors file, `timm`, such a file or, without
    a suffix, a folder for `timm.create_model`, `huggingface`, a folder for `AutoModel.from_pretrained`, and
    `onnx`. The export only appears at `path` if it gives the features of the model, for random images of the
    trained size: of all tokens by Hugging Face's class and ONNX Runtime, else of the CLS token. A classifier,
    which `load_classifier` returns, is written as onnx only; its graph gives probabilities.
    """
    path = Path(path)
    if format not in FORMATS:
        raise WeightsError(f"format={format!r} is not supported; choose from {', '.join(FORMATS)}")
    _check_target(path, format, overwrite)
    if format == "onnx":
        _check_graph(model)
    elif isinstance(model, ImageClassifier):
        raise WeightsError(f"format={format} holds no classifier; choose onnx, or export its .backbone")
    else:
        check_architecture(model, format)
        if format == "timm" and is_folder(path, format):
            timm_name(model)  # raises for what it cannot build
    model = copy.deepcopy(model).cpu().float().eval()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
            written = Path(folder) / path.name
            if format == "onnx":
                _write_graph(model, written, _describe_export(model, format))
            else:
                _write_tensors(_backbone_of(model), written, format)
            summary = _compare_features(model, written, format)
            if path.is_dir():
                shutil.rmtree(path)  # _check_target found nothing but such an export in it
            written.replace(path)
            sync(path.parent)
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{path} could not be written: {reason(error)}") from error
    log.info("%s: exported to the %s format; %s", path, format, summary)
    return summary


def _check_target(path: Path, format: str, overwrite: bool) -> None:
    if path.exists() and not overwrite:
        raise WeightsError(f"{path} already exists; give overwrite=true to replace it, or another name")
    if not is_folder(path, format) and path.suffix not in (suffixes := SUFFIXES[format]):
        more = ", or have no suffix, as the name of a folder" if format in FOLDERS else ""
        raise WeightsError(f"{path} must end in {', '.join(suffixes)}{more}")
    if path.is_dir():
        others = {entry.name for entry in path.iterdir()} - FOLDER_FILES
        if others or not is_folder(path, format):
            held = f" with {', '.join(sorted(others)[:5])}" if others else ""
            raise WeightsError(f"{path} is an existing folder{held}; choose another name")


def _backbone_of(exported: Backbone | ImageClassifier) -> Backbone:
    return exported.backbone if isinstance(exported, ImageClassifier) else exported


def _size_of(exported: Backbone | ImageClassifier) -> Size:
    """Return the size of images, which for a classifier is that of those it learned from."""
    size: Size = exported.transform.size if isinstance(exported, ImageClassifier) else exported.image_size
    return size


def _describe_export(exported: Backbone | ImageClassifier, format: str) -> str:
    """Return what the tensors of an export do not show, as JSON."""
    model = _backbone_of(exported)
    facts = describe_backbone(model) if format == "onnx" else {}
    facts = {name: value for name, value in facts.items() if name not in ("file", "config")}
    facts |= {name: getattr(model.provenance, name) for name in PROVENANCE_FACTS}
    facts |= {name: getattr(model, name) for name in ("heads", "image_size", "channels")}
    names = ("positions", "name", "norm_eps")
    facts |= {name: value for name, value in model.architecture.items() if name in names}
    if facts.get("positions") == "rotary":
        facts["rotary_rescale"] = model.architecture["rotary_rescale"] or 0  # null would be no fact
    if isinstance(exported, ImageClassifier):
        facts[CLASSIFIER] = exported.facts.model_dump(mode="json")
    return json.dumps({**facts, "format": format})


def _write_tensors(model: Backbone, path: Path, format: str) -> None:
    """Write the tensors under the names of another library."""
    about = {EXPORT_KEY: _describe_export(model, format)}
    if isinstance(model, TimmBackbone):
        tensors = contiguous_state_dict(model.model)
    else:
        tensors = to_layout(model, layout_of(model, format))
    if is_folder(path, format):
        _write_folder(model, tensors, path, format, about)
    elif path.suffix == ".safetensors":
        save_plain(tensors, path, {"format": "pt", **about})
    else:
        named = OrderedDict(tensors)
        vars(named).update(about)  # attributes, which others do not look at
        path.write_bytes(pickled(named))
        sync(path)


def _write_folder(
    model: Backbone, tensors: dict[str, Tensor], folder: Path, format: str, about: dict[str, str]
) -> None:
    """Write config.json, model.safetensors and the model card, and what else the format has."""
    folder.mkdir()
    save_plain(tensors, folder / "model.safetensors", {"format": "pt", **about})
    configs = {"config.json": timm_config(model) if format == "timm" else huggingface_config(model)}
    if format == "huggingface" and (processor := processor_config(model)):
        configs["preprocessor_config.json"] = processor
    texts = {name: json.dumps(config, indent=2, sort_keys=True) + "\n" for name, config in configs.items()}
    for name, text in {"README.md": model_card(model, format), **texts}.items():
        (folder / name).write_bytes(text.encode())
        sync(folder / name)


@torch.no_grad()
def _compare_features(exported: Backbone | ImageClassifier, written: Path, format: str) -> str:
    """Compare with the features, or the probabilities, that the library of the format computes."""
    model = _backbone_of(exported)
    shape = 2, model.channels, *_size_of(exported)
    images = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    what, ours = "CLS features", model.forward_cls(images)
    library = LIBRARIES.get(format)
    if library and find_spec(library):
        how, theirs = f"with {library}", _features_elsewhere(model, str(written), format, images)
        if isinstance(exported, ImageClassifier):
            what, ours = "outputs of the classifier", exported(images)
        elif format == "timm" and isinstance(model, VisionTransformer):  # which may have a classifier
            ours = model(images)
        elif format != "timm":
            what, tokens = "CLS and patch features", model.forward_features(images)
            ours = torch.cat([tokens[:, :1], tokens[:, model.first_patch :]], dim=1)
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
    """Open a written file by another library, as `usage` tells users to, and return its features."""
    if format == "onnx":
        import onnxruntime

        outputs = onnxruntime.InferenceSession(path).run(None, {INPUT: images.numpy()})
        cls, *patches = map(torch.from_numpy, outputs)
        return torch.cat([cls[:, None], *patches], dim=1) if patches else cls
    arguments = model_arguments(model, format)
    if format == "huggingface":
        from transformers import AutoModel

        theirs: Any = AutoModel.from_pretrained(path, **arguments).eval()
        tokens: Tensor = theirs(images).last_hidden_state
        return torch.cat([tokens[:, :1], tokens[:, model.first_patch :]], dim=1)
    import timm

    if is_folder(Path(path), format):
        return timm.create_model(f"local-dir:{path}", pretrained=True).eval()(images)
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
def _write_graph(exported: Backbone | ImageClassifier, path: Path, about: str) -> None:
    """Write a graph for any number of images of the trained size, and what is known of the model, as JSON."""
    model = _backbone_of(exported)
    graph = exported if isinstance(exported, ImageClassifier) else _Graph(model).eval()
    outputs = CLASSIFIER_OUTPUTS if isinstance(exported, ImageClassifier) else OUTPUTS
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
