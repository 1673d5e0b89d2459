"""The images of an embeddings file that are nearest to given ones."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from dino_vit.config.settings import Count, Settings, setting
from dino_vit.core.runtime import start_processes
from dino_vit.core.storage import write_bytes
from dino_vit.data.images.pixels import Pixels
from dino_vit.eval.embeddings.files import Embeddings, printable, read_embeddings
from dino_vit.eval.embeddings.gallery import Cell, Images, picture_of, write_gallery
from dino_vit.eval.features.extraction import FeatureSpec, extract_features
from dino_vit.eval.features.store import weights_digest
from dino_vit.eval.knn.neighbours import nearest
from dino_vit.models.vit import VisionTransformer
from dino_vit.views.preparation import Preparation
from dino_vit.weights import load_backbone

log = logging.getLogger("dino_vit")

_BATCH = 32


class SearchConfig(Settings):
    """Find the images nearest to given ones among those that were embedded."""

    embeddings: str = Field(description="file that `dino-vit embed` wrote")
    images: tuple[str, ...] = Field(description="image files to find the like of")
    weights: str | None = setting(
        None, "run folder or weights file; null: where the embeddings' weights were"
    )
    k: Count = setting(8, "nearest images to show")
    output: str = setting("search.png", "PNG to write; the same as JSON goes beside it")

    positional: ClassVar = ("embeddings", "images")
    also_known_as: ClassVar = {"embeddings": "index", "images": "query queries", "output": "out", "k": "top"}


class ImageFiles:
    """Image files by name, as a source."""

    classes: Sequence[str] = ()
    fingerprint = ""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, index: int) -> bytes | Tensor:
        return Path(self.paths[index]).read_bytes()

    def label(self, index: int) -> int | None:
        return None

    def name(self, index: int) -> str:
        return self.paths[index]


def run(config: SearchConfig) -> int:
    """Write the sheet and its JSON, and list what was found."""
    output = Path(config.output)
    if output.suffix != ".png":
        raise ValueError(f"output={output} would be a PNG, so its name must end in .png")
    embeddings = read_embeddings(Path(config.embeddings))
    if embeddings.values.ndim != 2:
        raise ValueError(f"{config.embeddings} holds patch tokens; search needs one embedding an image")
    cosines, rows = nearest(embeddings.values, _features_of(config, embeddings.metadata), k=config.k)
    found = [
        [_described(embeddings, *one) for one in zip(*both, strict=True)]
        for both in zip(cosines.tolist(), rows.tolist(), strict=True)
    ]
    _draw(config, embeddings, found, output)
    results = [
        {"image": printable(image), "nearest": near} for image, near in zip(config.images, found, strict=True)
    ]
    whole = {"embeddings": str(Path(config.embeddings).absolute()), "results": results}
    write_bytes(output.with_suffix(".json"), json.dumps(whole, indent=1).encode())
    for image, near in zip(config.images, found, strict=True):
        print(f"{printable(image)}:")
        for one in near:
            print(f"  {one['cosine']:.4f}  {one['name']}" + (f"  {one['label']}" if one["label"] else ""))
    print(f"{output} shows them; {output.with_suffix('.json')} has the same as data")
    return 0


def _draw(
    config: SearchConfig, embeddings: Embeddings, found: Sequence[Sequence[dict[str, Any]]], output: Path
) -> None:
    """Draw a row an image: the image, then the nearest ones with their cosine and label or name."""
    images = Images(embeddings)
    if images.missing:
        log.warning("the sheet shows no found images: %s", images.missing)
    asked = ImageFiles(config.images)
    lines = []
    for place, near in enumerate(found):
        first = Cell(picture_of(asked, place, images.pixels), printable(Path(config.images[place]).name))
        others = [
            Cell(images.picture(one["row"]), f"{one['cosine']:.3f}  {one['label'] or one['name']}")
            for one in near
        ]
        lines.append([first, *others])
    write_gallery(lines, output)


def _described(embeddings: Embeddings, cosine: float, row: int) -> dict[str, Any]:
    return {
        "name": embeddings.names[row],
        "label": embeddings.labels[row],
        "cosine": round(cosine, 6),
        "index": int(embeddings.indices[row]),
        "row": row,
    }


def _features_of(config: SearchConfig, metadata: dict[str, Any]) -> Tensor:
    """Return the features of the asked images, made just as the embeddings were."""
    device = start_processes(trackers=(), folder=Path()).device
    model = _load(config.weights or metadata["weights"]["path"], metadata).to(device)
    autocast = getattr(torch, metadata["precision"])
    features = extract_features(
        model,
        ImageFiles(config.images),
        range(len(config.images)),
        preparation=_preparation(metadata["preparation"]),
        batch_size=_BATCH,
        spec=FeatureSpec(tokens=metadata["tokens"]["kind"], blocks=metadata["tokens"]["blocks"]),
        autocast=None if autocast == torch.float32 else autocast,
    )
    if features.unreadable:
        raise ValueError(f"an image to search for cannot be read: {features.unreadable[0]}")
    return features.values


def _load(weights: str, metadata: dict[str, Any]) -> VisionTransformer:
    """Load the weights that the embeddings were made with, and no others."""
    try:
        model = load_backbone(weights, network=metadata["weights"]["network"])
    except (ValueError, OSError) as error:
        raise ValueError(
            f"the weights that made the embeddings are needed for the images to search for: {error}. "
            "Say with weights= where they are now"
        ) from error
    if weights_digest(model) != metadata["weights"]["sha256"]:
        raise ValueError(
            f"{weights} are not the weights that made the embeddings (step {metadata['weights']['step']} of "
            f"{metadata['weights']['path']}): give those with weights=, or embed the images again"
        )
    return model


def _preparation(known: dict[str, Any]) -> Preparation:
    tuples = {name: tuple(known[name]) for name in ("size", "mean", "std")}
    return Preparation(**tuples, fit=known["fit"], pixels=Pixels(**known["pixels"]))
