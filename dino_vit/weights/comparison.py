"""Compare an export with its backbone, by the lines of Python that a user is given to open it."""

import tempfile
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from PIL import Image
from torch import Tensor

from dino_vit.data.sources.synthetic import SyntheticSource
from dino_vit.models.backbone import Backbone
from dino_vit.models.vit import VisionTransformer
from dino_vit.views.eval_transform import eval_transform_of, resize
from dino_vit.weights.card import MODES, processor_config, usage
from dino_vit.weights.loading import load_backbone
from dino_vit.weights.reading import WeightsError

LIBRARIES = {"timm": "timm", "huggingface": "transformers", "onnx": "onnxruntime"}
TOLERANCE = 1e-4  # relative to the largest feature: float32 sums in another order
LEVELS = 2  # of 255, between the pixels of two libraries that round each to whole levels


@torch.no_grad()
def compare_features(model: Backbone, written: Path, format: str, *, larger: bool) -> str:
    """Compare with the features of the written file, by the lines that a user is given to open it."""
    (height, width), (p, q) = model.image_size, model.patch_size
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, model.channels, height + larger * p, width + larger * q, generator=generator)
    library, errors = LIBRARIES.get(format), list[float]()
    if not (library and find_spec(library)):
        peer = load_backbone(written, format=format, heads=model.heads, verbose=False)
        errors.append(_difference(model.forward_cls(images), peer.forward_cls(images)))
    else:
        names = _run(usage(model, written, format, photo=None), given=images)
        output = names["output"] if format != "onnx" else torch.from_numpy(names["cls"])
        has_classifier = format == "timm" and isinstance(model, VisionTransformer)
        errors.append(_difference(model(images) if has_classifier else model.forward_cls(images), output))
        if format == "huggingface" and (processor := processor_config(model)):
            errors += _compare_photos(model, written, processor)
    error, how = max(errors), f"with {library}" if library and find_spec(library) else "by loading it again"
    if not error <= TOLERANCE:
        raise WeightsError(
            f"largest relative difference of the CLS features: {error:.1e} (allowed: {TOLERANCE:.0e}); "
            "nothing was written"
        )
    return f"largest relative difference of the CLS features: {error:.1g}, checked {how}"


def _difference(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).abs().max() / ours.abs().max()).item()


def _run(lines: str, **names: object) -> dict[str, Any]:
    """Run the lines that open an export, and return what they compute."""
    exec(lines.replace("images = ...", "images = given"), names)
    return names


def _compare_photos(model: Backbone, written: Path, processor: Mapping[str, Any]) -> Iterator[float]:
    """Check that photos are prepared alike, and yield how far the features of each differ.

    They are small, large, and with an odd number of pixels beside the crop. At another size than that of the
    weights each library resamples positions in its own way, so features are not compared.
    """
    crop, transform = processor["crop_size"]["height"], eval_transform_of(model, verbose=False)
    side, longer = processor["size"].get("shortest_edge", crop), crop + 4 * (crop // 4) + 3
    sizes = [(side, longer), (2 * longer, 2 * side), (crop // 2, crop), (crop, crop)]
    for index, (height, width) in enumerate(sizes):
        picture = resize(SyntheticSource(size=64).read(index), (height, width))
        levels = rearrange(picture, "c h w -> h w c").numpy()
        with tempfile.NamedTemporaryFile(suffix=".png") as photo:
            Image.fromarray(levels).convert(MODES[model.channels]).save(photo)
            names = _run(usage(model, written, "huggingface", photo=photo.name))
            ours = transform(photo.name)
        error = 255 * max(transform.std) * (names["images"][0] - ours).abs().max().item()
        if not error <= LEVELS:
            raise WeightsError(
                f"the exported processor prepares a photo of {height} × {width} pixels differently, by up to "
                f"{error:.0f} of 255 levels; nothing was written"
            )
        if transform.size == model.image_size:
            yield _difference(model.forward_cls(names["images"]), names["output"])
