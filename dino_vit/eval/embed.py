"""Write the embeddings of images to a file, with what is needed to compute them again.

It is Parquet with the columns name, label, index and embedding, and the provenance as metadata. A label is
the name of a class; an index is the image's index in the source.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from pyarrow import parquet

from dino_vit import __version__
from dino_vit.config.commands import EmbedConfig
from dino_vit.config.outputs import check_outputs
from dino_vit.core.distributed import any_process, is_main_process
from dino_vit.core.storage import OWN_KEY, replacing
from dino_vit.core.text import Result, public
from dino_vit.data.image_set import ImageSet
from dino_vit.data.labels import Labels
from dino_vit.data.open import open_source
from dino_vit.data.remote import is_url
from dino_vit.features.frozen import FrozenBackbone, frozen_backbones
from dino_vit.features.readings import fit_reading, joined_features
from dino_vit.models.backbone import FeatureSpec
from dino_vit.weights.hub import is_name

Array = NDArray[Any]
FORMAT = 1  # of embedding files
_GROUP_BYTES = 64 * 2**20  # of rows that readers may read at a time


@dataclass(frozen=True, kw_only=True, repr=False)
class ImageEmbeddings(Result):
    """The embeddings of images, row by row."""

    values: Array  # (n, D); of patches (n, N, D)
    names: Sequence[str]  # of the images
    labels: Sequence[str | list[str] | None]  # a class, or several labels; None: no label
    indices: NDArray[np.int64]  # of the images in the source
    metadata: dict[str, Any]
    path: Path | None  # of the file, if one was written


def write_embeddings(path: Path, embeddings: ImageEmbeddings) -> None:
    """Write an embedding file."""
    width = int(np.prod(embeddings.values.shape[1:]))
    flat = pa.array(embeddings.values.ravel())
    several = any(isinstance(label, list) for label in embeddings.labels)
    columns = {
        "name": pa.array(embeddings.names, pa.string()),
        "label": pa.array(embeddings.labels, pa.list_(pa.string()) if several else pa.string()),
        "index": pa.array(embeddings.indices, pa.int64()),
        "embedding": pa.FixedSizeListArray.from_arrays(flat, width),
    }
    table = pa.table(columns, metadata={OWN_KEY: json.dumps(embeddings.metadata)})
    # Floating-point noise neither compresses nor repeats.
    options: dict[str, Any] = {
        "compression": "none",
        "use_dictionary": ["label.list.element" if several else "label"],
    }
    with replacing(path) as partial, partial.open("wb") as file:
        parquet.write_table(table, file, row_group_size=max(_GROUP_BYTES // (4 * width), 1), **options)


def run(config: EmbedConfig) -> ImageEmbeddings:
    """Compute the embeddings of a source, and write them to a file if there is an output."""
    output = None if config.output is None else Path(config.output)
    if output:
        check_outputs(config, output)
    backbone = frozen_backbones(config)
    source = open_source(config.source, config.labels, several=config.several)
    names = source.distinct_names(range(len(source)))  # before the work
    spec = FeatureSpec(tokens=config.tokens, blocks=config.blocks)
    values, indices = joined_features(
        backbone, source, spec=spec, title=f"embeddings of {public(config.source)}"
    )
    features = torch.from_numpy(values)
    values = fit_reading(backbone, features, spec, config.whiten)(features).numpy()
    codes = source.codes(indices).tolist()
    rounded = "" if backbone.autocast is None else f" (computed in {backbone.precision})"
    shape = " × ".join(map(str, values.shape))
    has_labels = any(code >= 0 for code in codes)
    named = "names, labels and metadata" if has_labels else "names and metadata"
    text = f"{shape} in float32{rounded}, with {named}"
    embeddings = ImageEmbeddings(
        values=values,
        names=[names[index] for index in indices.tolist()],
        labels=[_label(source.labels, code) for code in codes],
        indices=indices,
        metadata=provenance(values, source, backbone, config),
        path=output,
        text=f"{output}: {text}" if output else text,
    )
    if output and is_main_process():
        write_embeddings(output, embeddings)
    any_process(False)  # waits for all: the file is complete for all of them
    return embeddings


def _label(labels: Labels, code: int) -> str | list[str] | None:
    names = labels.names_of(code) if code >= 0 else None
    return names[0] if names and labels.sets is None else names


def provenance(
    values: Array, source: ImageSet, backbone: FrozenBackbone, config: EmbedConfig
) -> dict[str, Any]:
    """Return all that is needed to compute the features again."""
    path, weights = Path(config.source), backbone.describe_weights()
    named, root = is_name(weights["source"]), source.store.root
    local = root is not None and not (is_url(root) or is_url(config.source))
    return {
        "format": FORMAT,
        "dino_vit": __version__,
        "weights": {
            "path": weights["source"] if named else str(Path(weights["source"]).absolute()),
            "file_sha256": weights["sha256"],
            "sha256": backbone.weights_digest,
            "network": config.network,
            "step": weights["step"],
        },
        "beside": weights.get("beside", []),
        "source": {
            "spec": str(path.absolute()) if path.exists() else public(config.source),
            "root": os.path.abspath(str(root)) if local else None,  # of names that are paths of files
            "fingerprint": source.fingerprint,
            "images": len(source),
            "unreadable": len(source) - len(values),
        },
        "transform": asdict(backbone.transform),
        "tokens": {"kind": config.tokens, "blocks": config.blocks},
        "whiten": config.whiten,
        "precision": backbone.precision,
        "shape": list(values.shape[1:]),
    }
