"""Write a backbone as an ONNX graph, which runs without this library.

It takes `images` (B, C, H, W), prepared as for the backbone, and returns `cls` (B, D) and `patches`
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

LARGEST = 2e9  # bytes of weights in a single file
INPUT, OUTPUTS = "images", ("cls", "patches")
METADATA_KEY = "dino_vit"


class Features(nn.Module):
    """A backbone that returns the CLS token and the patches."""

    def __init__(self, model: Backbone) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        tokens = self.model.forward_features(images)
        return tokens[:, 0], tokens[:, self.model.first_patch :]


def check_graph(model: Backbone, path: Path, *, dynamic: bool) -> None:
    """Raise WeightsError for what a graph cannot hold."""
    if path.suffix != ".onnx":
        raise WeightsError(f"{path} must end in .onnx")
    if not (find_spec("onnxscript") and find_spec("onnxruntime")):
        raise WeightsError("to write ONNX, install its libraries: pip install 'dino-vit[onnx]'")
    size = sum(parameter.numel() * 4 for parameter in model.parameters())
    if size > LARGEST:
        text = f"an ONNX file holds {LARGEST / 1e9:g} GB, but these weights have {size / 1e9:.1f}"
        raise WeightsError(f"{text}: use another --format")
    if dynamic and not isinstance(model, VisionTransformer):
        name = model.architecture["name"]
        raise WeightsError(f"{name} of timm is written as a graph for one size: leave out --dynamic")
    if dynamic and not model.rotary and model.position_mode in ("dino", "dinov2"):
        raise WeightsError(
            f"positions in mode {model.position_mode} are resampled by constant factors: leave out "
            "--dynamic, or load the weights with position_mode='hf', which is equal at the trained size, and "
            "save them"
        )


@torch.no_grad()
def write_graph(model: Backbone, path: Path, *, dynamic: bool) -> None:
    """Write a graph for any number of images, of the trained size or of any of two patches a side or more."""
    graph = Features(copy.deepcopy(model).cpu().float()).eval()
    (height, width), (p, q) = model.image_size, model.patch_size
    # Another size than a power of two, and of unequal sides, so that nothing is taken for constant.
    images = torch.zeros(2, model.channels, *((height + p, width + 2 * q) if dynamic else (height, width)))
    sizes: dict[int, Any] = {0: torch.export.Dim("batch")}
    if dynamic:
        rows, columns = (torch.export.Dim(name, min=2, max=1024) for name in ("rows", "columns"))
        sizes |= {2: p * rows, 3: q * columns}
    level = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporters' own dependencies warn of many things
        logging.disable(logging.WARNING)
        try:
            program = torch.export.export(graph, (images,), dynamic_shapes=(sizes,))
            names: dict[str, Any] = {"input_names": [INPUT], "output_names": list(OUTPUTS)}
            onnx = torch.onnx.export(program, **names, dynamo=True, verbose=False)
        finally:
            logging.disable(level)
    assert onnx is not None
    metadata = {**json.loads(describe_export(model, "onnx")), "input": INPUT, "outputs": OUTPUTS}
    onnx.model.metadata_props[METADATA_KEY] = json.dumps(metadata)
    onnx.save(path, external_data=False)


def open_graph(path: Path) -> Callable[[Tensor], Tensor]:
    """Return a function from images to the CLS tokens that a written graph computes."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(["cls"], {INPUT: images.numpy()})[0])
