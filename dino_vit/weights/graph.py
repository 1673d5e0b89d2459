"""Write a backbone as an ONNX graph."""

import logging
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dino_vit.core.storage import sync
from dino_vit.models.backbone import Backbone
from dino_vit.weights.reading import WeightsError

LARGEST = 2e9  # bytes of weights in an ONNX file
INPUT, OUTPUTS = "images", ("cls", "patches")
METADATA_KEY = "dino_vit"


def check_graph(model: Backbone) -> None:
    """Raise WeightsError for what a graph cannot hold."""
    if not (find_spec("onnxscript") and find_spec("onnxruntime")):
        raise WeightsError("to write ONNX, install its libraries: pip install 'dino-vit[onnx]'")
    size = sum(parameter.numel() * 4 for parameter in model.parameters())
    if size > LARGEST:
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
def write_graph(model: Backbone, path: Path, about: str) -> None:
    """Write a graph for any number of images of the trained size, and what is known of the model, as JSON."""
    images = torch.zeros(2, model.channels, *model.image_size)
    sizes: dict[int, Any] = {0: torch.export.Dim("batch")}
    level = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporters' own dependencies warn of many things
        logging.disable(logging.WARNING)
        try:
            program = torch.export.export(_Graph(model).eval(), (images,), dynamic_shapes=(sizes,))
            names: dict[str, Any] = {"input_names": [INPUT], "output_names": list(OUTPUTS)}
            onnx = torch.onnx.export(program, **names, dynamo=True, verbose=False)
        finally:
            logging.disable(level)
    assert onnx is not None
    onnx.model.metadata_props[METADATA_KEY] = about
    onnx.save(path)
    sync(path)
