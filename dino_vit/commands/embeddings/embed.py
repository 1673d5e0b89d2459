"""Write the embeddings of images to a file, with what is needed to compute them again."""

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dino_vit import __version__
from dino_vit.commands import Result
from dino_vit.config.embeddings import EmbedConfig
from dino_vit.core.distributed import is_main_process, wait_for_all
from dino_vit.core.outputs import claim
from dino_vit.core.text import public
from dino_vit.data.image_set import ImageSet
from dino_vit.data.sources.files import is_url
from dino_vit.data.sources.open import open_source
from dino_vit.eval.embeddings import Array, Embeddings, write_embeddings
from dino_vit.eval.features import FrozenBackbone
from dino_vit.eval.frozen import cached_features, frozen_backbone
from dino_vit.models.backbone import FeatureSpec
from dino_vit.weights.hub import is_name


@dataclass(frozen=True, kw_only=True, repr=False)
class ImageEmbeddings(Embeddings, Result):
    """The embeddings of images."""

    path: Path | None  # of the file, if one was written


def run(config: EmbedConfig) -> ImageEmbeddings:
    """Compute the embeddings of a source, and write them to a file if there is an output."""
    output = None if config.output is None else Path(config.output)
    if output:
        claim(output)
    backbone = frozen_backbone(config)
    source = open_source(config.source, config.labels)
    spec = FeatureSpec(tokens=config.tokens, blocks=config.blocks)
    values, indices = cached_features(
        backbone, source, spec=spec, title=f"embeddings of {public(config.source)}"
    )
    labels = [source.label(i) for i in indices.tolist()]
    rounded = "" if backbone.autocast is None else f" (computed in {backbone.precision})"
    shape = " × ".join(map(str, values.shape))
    has_labels = any(label is not None for label in labels)
    named = "names, labels and metadata" if has_labels else "names and metadata"
    text = f"{shape} in float32{rounded}, with {named}"
    embeddings = ImageEmbeddings(
        values=values,
        names=[source.name(i) for i in indices.tolist()],
        labels=[None if label is None else source.classes[label] for label in labels],
        indices=indices,
        metadata=provenance(values, source, backbone, config),
        path=output,
        text=f"{output}: {text}" if output else text,
    )
    if output and is_main_process():
        write_embeddings(output, embeddings)
    wait_for_all()  # the file is complete for all of them
    return embeddings


def provenance(
    values: Array, source: ImageSet, backbone: FrozenBackbone, config: EmbedConfig
) -> dict[str, Any]:
    """Return all that is needed to compute the features again."""
    path, weights = Path(config.source), backbone.describe_weights()
    named, root = is_name(weights["source"]), source.store.root
    local = root is not None and not (is_url(root) or is_url(config.source))
    return {
        "format": 1,
        "dino_vit": __version__,
        "weights": {
            "path": weights["source"] if named else str(Path(weights["source"]).absolute()),
            "file_sha256": weights["sha256"],
            "sha256": backbone.weights_digest,
            "network": config.network,
            "step": weights["step"],
        },
        "source": {
            "spec": str(path.absolute()) if path.exists() else public(config.source),
            "root": os.path.abspath(str(root)) if local else None,  # of names that are paths of files
            "fingerprint": source.fingerprint,
            "images": len(source),
            "unreadable": len(source) - len(values),
        },
        "transform": asdict(backbone.transform),
        "tokens": {"kind": config.tokens, "blocks": config.blocks},
        "precision": backbone.precision,
        "shape": list(values.shape[1:]),
    }
