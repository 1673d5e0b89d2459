"""Embeddings of a source's images in one file that says how they were made."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from dino_vit import __version__
from dino_vit.config.settings import Count, setting
from dino_vit.core.distributed import is_main_process
from dino_vit.core.storage import replacing, sync
from dino_vit.data.sources.open import open_source
from dino_vit.eval.embeddings.files import (
    Array,
    Embeddings,
    blocks,
    check_suffix,
    normalised,
    printable,
    write_embeddings,
)
from dino_vit.eval.features.extraction import FeatureSpec
from dino_vit.eval.features.frozen import EvaluationConfig, FrozenBackbone, frozen_backbone
from dino_vit.eval.features.store import StoredFeatures

log = logging.getLogger("dino_vit")


class EmbedConfig(EvaluationConfig):
    """Write the embeddings of images to a file."""

    output: str = setting("embeddings.parquet", "file to write: .parquet, .npy or .safetensors")
    tokens: Literal["cls", "cls+mean", "patches"] = setting(
        "cls", "CLS token, the mean patch token behind it, or all patch tokens"
    )
    blocks: Count = setting(1, "last blocks whose CLS tokens are joined")
    dtype: Literal["float32", "float16"] = setting("float32", "of the file")
    normalise: bool = setting(False, "scale each embedding to length 1")
    index: Literal["flat"] | None = setting(None, "flat: an exact FAISS index of cosines beside the file")

    positional: ClassVar = ("source",)
    also_known_as: ClassVar = {**EvaluationConfig.also_known_as, "output": "out", "normalise": "normalize"}


def run(config: EmbedConfig) -> int:
    """Write the file, and say what is in it."""
    output = Path(config.output)
    check_suffix(output)
    if config.index and config.tokens == "patches":
        raise ValueError(
            "index=flat holds one embedding an image, but tokens=patches are many; leave one out"
        )
    with frozen_backbone(config) as backbone:
        source = open_source(config.source, config.labels)
        spec = FeatureSpec(tokens=config.tokens, blocks=config.blocks)
        stored = backbone.features(source, spec=spec, title=f"embeddings of {config.source}")
        if is_main_process():
            embeddings = _described(stored, backbone, config)
            transform = normalised if config.normalise else np.asarray
            write_embeddings(output, embeddings, dtype=config.dtype, transform=transform)
            shape = " × ".join(map(str, stored.values.shape))
            print(f"{output}: {shape} in {config.dtype}, with names, labels and provenance")
            if config.index:
                print(f"{write_index(output, stored.values)}: FAISS index of their cosines")
    return 0


def _described(stored: StoredFeatures, backbone: FrozenBackbone, config: EmbedConfig) -> Embeddings:
    classes = stored.source.classes
    return Embeddings(
        values=stored.values,
        names=[printable(stored.name(row)) for row in range(len(stored))],
        labels=[classes[label] if label >= 0 else None for label in stored.labels.tolist()],
        indices=stored.indices,
        metadata=_about(stored, backbone, config),
    )


def _about(stored: StoredFeatures, backbone: FrozenBackbone, config: EmbedConfig) -> dict[str, Any]:
    """Return what makes these embeddings again."""
    known = backbone.model.provenance
    assert known is not None
    return {
        "format": 1,
        "dino_vit": __version__,
        "weights": {
            "path": str(Path(known.source).absolute()),
            "file_sha256": known.sha256,
            "sha256": stored.metadata["weights"],
            "network": config.network,
            "step": known.step,
        },
        "source": {
            "spec": _absolute(config.source),
            "fingerprint": stored.metadata["source"],
            "images": len(stored.source),
            "unreadable": len(stored.unreadable),
        },
        "preparation": asdict(backbone.preparation),
        "tokens": {"kind": config.tokens, "blocks": config.blocks},
        "precision": stored.metadata["precision"],
        "normalised": config.normalise,
        "shape": list(stored.values.shape[1:]),
    }


def _absolute(spec: str) -> str:
    """Return a source that is a path so that it holds from any folder."""
    return str(Path(spec).absolute()) if Path(spec).exists() else spec


def write_index(output: Path, values: Array) -> Path:
    """Write an exact FAISS index whose inner products are the cosines of the embeddings."""
    logging.getLogger("faiss").setLevel(logging.WARNING)  # it tells which of its builds it looks for
    import faiss

    index = faiss.IndexFlatIP(values.shape[1])
    for rows in blocks(len(values), 4 * values.shape[1]):
        index.add(normalised(values[rows]))
    path = output.with_suffix(".faiss")
    with replacing(path) as partial:
        faiss.write_index(index, str(partial))
        sync(partial)
    return path
