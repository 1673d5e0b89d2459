"""Compare an export with its backbone, by the lines of Python that a user is given to open it."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from dino_vit.models.backbone import Backbone
from dino_vit.models.vit import VisionTransformer
from dino_vit.weights.card import usage
from dino_vit.weights.loading import load_backbone
from dino_vit.weights.reading import WeightsError

LIBRARIES = {"timm": "timm", "huggingface": "transformers", "onnx": "onnxruntime"}
TOLERANCE = 1e-4  # relative to the largest feature: float32 sums in another order


@torch.no_grad()
def compare_features(model: Backbone, written: Path, format: str) -> str:
    """Compare with the features of the written file, by the lines that a user is given to open it."""
    images = torch.randn(2, model.channels, *model.image_size, generator=torch.Generator().manual_seed(0))
    library, ours = LIBRARIES.get(format), model.forward_cls(images)
    if not (library and find_spec(library)):
        how = "by loading it again"
        theirs = load_backbone(written, format=format, heads=model.heads, verbose=False).forward_cls(images)
    else:
        how, names = f"with {library}", dict[str, Any](given=images)
        exec(usage(model, written, format, photo=None).replace("images = ...", "images = given"), names)
        theirs = names["output"] if format != "onnx" else torch.from_numpy(names["cls"])
        if format == "timm" and isinstance(model, VisionTransformer):  # which may have a classifier
            ours = model(images)
    error = ((ours - theirs).abs().max() / ours.abs().max()).item()
    if not error <= TOLERANCE:
        raise WeightsError(
            f"largest relative difference of the CLS features: {error:.1e} (allowed: {TOLERANCE:.0e}); "
            "nothing was written"
        )
    return f"largest relative difference of the CLS features: {error:.1g}, checked {how}"
