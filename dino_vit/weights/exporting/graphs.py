"""Write a backbone as a graph that runs without this library: ONNX, or a program of torch.export.

A graph takes `images` (B, C, H, W), prepared as for the backbone, and returns `cls` (B, D) and `patches`
(B, N, D).
"""

import copy
import json
import logging
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dino_vit.models.backbone import Backbone
from dino_vit.models.vit import VisionTransformer
from dino_vit.weights.metadata import WeightsError, describe_export

SUFFIXES = {"onnx": ".onnx", "pt2": ".pt2"}
LARGEST_ONNX = 2e9  # bytes of weights in a single file
INPUT, OUTPUTS = "images", ("cls", "patches")
ABOUT = "dino_vit"  # what the file holds as metadata beside the graph
Graph = Callable[[Tensor], Any]


class Features(nn.Module):
    """A backbone that returns the CLS token and the patches."""

    def __init__(self, model: Backbone) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        tokens = self.model.forward_features(images)
        return tokens[:, 0], tokens[:, self.model.first_patch :]


def check_graph(model: Backbone, path: Path, format: str, *, dynamic: bool) -> None:
    """Refuse what a graph cannot hold."""
    if path.suffix != SUFFIXES[format]:
        raise WeightsError(f"{path} must end in {SUFFIXES[format]}")
    if format == "onnx" and not (find_spec("onnxscript") and find_spec("onnxruntime")):
        raise WeightsError("to write ONNX, install its libraries: pip install 'dino-vit[onnx]'")
    size = sum(parameter.numel() * 4 for parameter in model.parameters())
    if format == "onnx" and size > LARGEST_ONNX:
        text = f"an ONNX file holds {LARGEST_ONNX / 1e9:g} GB, but these weights have {size / 1e9:.1f}"
        raise WeightsError(f"{text}: use --format pt2")
    if not dynamic:
        return
    if not isinstance(model, VisionTransformer):
        name = model.architecture["name"]
        raise WeightsError(f"{name} of timm is written as a graph for one size: leave out --dynamic")
    if not model.rotary and model.position_mode in ("dino", "dinov2"):
        raise WeightsError(
            f"positions in mode {model.position_mode} are resampled by constant factors: leave out "
            "--dynamic, or load the weights with position_mode='hf', which is equal at the trained size, and "
            "save them"
        )


@torch.no_grad()
def write_graph(model: Backbone, path: Path, format: str, *, dynamic: bool) -> None:
    """Write a graph for any number of images, of the trained size or of any of two patches a side or more."""
    graph = Features(copy.deepcopy(model).cpu().float()).eval()
    (height, width), (p, q) = model.image_size, model.patch_size
    # Another size than a power of two, and of unequal sides, so that nothing is taken for constant.
    images = torch.zeros(2, model.channels, *((height + p, width + 2 * q) if dynamic else (height, width)))
    sizes: dict[int, Any] = {0: torch.export.Dim("batch")}
    if dynamic:
        rows, columns = (torch.export.Dim(name, min=2, max=1024) for name in ("rows", "columns"))
        sizes |= {2: p * rows, 3: q * columns}
    about = json.dumps({**json.loads(describe_export(model, format)), "input": INPUT, "outputs": OUTPUTS})
    level = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporters' own dependencies warn of many things
        logging.disable(logging.WARNING)
        try:
            program = torch.export.export(graph, (images,), dynamic_shapes=(sizes,))
            if format == "pt2":
                torch.export.save(program, path, extra_files={ABOUT: about})
                return
            onnx = torch.onnx.export(
                program, input_names=[INPUT], output_names=list(OUTPUTS), dynamo=True, verbose=False
            )
        finally:
            logging.disable(level)
        assert onnx is not None
        onnx.model.metadata_props[ABOUT] = about
        onnx.save(path, external_data=False)


def open_graph(path: Path, format: str) -> Graph:
    """Return a function from images to the CLS tokens that a written graph computes."""
    if format == "pt2":
        program = torch.export.load(path).module()
        return lambda images: program(images)[0]
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(["cls"], {INPUT: images.numpy()})[0])
