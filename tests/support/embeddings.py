"""A small embedding file, without a network that would have computed it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dino_vit.eval.embeddings.embed import Embeddings, write_embeddings

METADATA: dict[str, Any] = {
    "format": 1,
    "weights": {"path": "w.safetensors", "sha256": "0", "network": "teacher", "step": None},
    "source": {"spec": "synthetic:4:16"},
    "transform": {
        "size": [16, 16],
        "mean": [0.5, 0.5, 0.5],
        "std": [0.25, 0.25, 0.25],
        "fit": "crop",
        "pixels": {"channels": 3, "bits": 8, "range": None, "max_pixels": 200_000_000},
    },
    "tokens": {"kind": "cls", "blocks": 1},
    "precision": "float32",
}


def write(path: Path, metadata: Mapping[str, Any] = METADATA, width: int = 3) -> None:
    """Write the embeddings of four images, which have a cosine of more than 0.8."""
    embeddings = Embeddings(
        values=np.arange(1, 4 * width + 1, dtype=np.float32).reshape(4, width),
        names=list("abcd"),
        labels=["cat", "dog", None, "cat"],
        indices=np.arange(4),
        metadata={"shape": [width], **metadata},
    )
    write_embeddings(path, embeddings)
