"""Write the embeddings of images to a file, with what is needed to compute them again, and read such files.

They are Parquet with the columns name, label, index and embedding, and the provenance as metadata. A label is
the name of a class; an index is the image's index in the source.
"""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from pyarrow import parquet
from pydantic import TypeAdapter

from dino_vit import __version__
from dino_vit.config.embeddings import EmbedConfig
from dino_vit.config.objects import find, is_object
from dino_vit.config.outputs import check_outputs
from dino_vit.core import log
from dino_vit.core.distributed import is_main_process, wait_for_all
from dino_vit.core.runtime import start_processes
from dino_vit.core.storage import OWN_KEY, replacing
from dino_vit.core.text import Result, brief, did_you_mean, plural, public
from dino_vit.data.image_set import ImageSet
from dino_vit.data.sources.files import SourceLost, is_url
from dino_vit.data.sources.open import open_source
from dino_vit.eval.features import FrozenBackbone, cached_features, frozen_backbone
from dino_vit.eval.maps.pictures import EMPTY, Panel, thumbnail
from dino_vit.models.backbone import Backbone, FeatureSpec
from dino_vit.views.eval_transform import EvalTransform
from dino_vit.weights.hub import is_name

Array = NDArray[Any]
PRECISIONS = {
    str(each).removeprefix("torch."): each for each in (torch.float32, torch.bfloat16, torch.float16)
}
FORMAT = 1  # of embedding files
_GROUP_BYTES = 64 * 2**20  # of rows that readers may read at a time


@dataclass
class _Weights:
    """What must be said of the weights."""

    path: str
    sha256: str
    network: str | None
    step: int | None


@dataclass(frozen=True, kw_only=True, repr=False)
class Embeddings:
    """The contents of an embedding file, row by row."""

    values: Array  # (n, D); of patches (n, N, D)
    names: Sequence[str]  # of the images
    labels: Sequence[str | None]  # names of classes
    indices: NDArray[np.int64]  # of the images in the source
    metadata: dict[str, Any]

    def __repr__(self) -> str:
        """Return what they are of, as "Embeddings(528 images × 96, CLS of runs/hands; no labels)"."""
        shape = " × ".join(f"{side:,}" for side in self.values.shape[1:])
        tokens, weights = self.metadata.get("tokens", {}), self.metadata.get("weights", {})
        kind, blocks = tokens.get("kind", "features"), tokens.get("blocks", 1)
        what = kind.replace("cls", "CLS") + (f" of the last {blocks} blocks" if blocks != 1 else "")
        path = Path(weights.get("path", "unknown weights"))
        if path.parent.name == "checkpoints":
            path = path.parent.parent
        step = "" if weights.get("step") is None else f" at step {weights['step']:,}"
        labels = sorted({label for label in self.labels if label is not None})
        named = f"{plural(len(labels), 'label')}: {brief(', '.join(labels), 60)}" if labels else "no labels"
        return f"Embeddings({plural(len(self.values), 'image')} × {shape}, {what} of {path}{step}; {named})"

    @property
    def transform(self) -> EvalTransform:
        """The transform of the images."""
        return TypeAdapter(EvalTransform).validate_python(self.metadata["transform"])

    def open_source(self) -> ImageSet:
        """Open the images that were embedded."""
        return open_source(self.metadata["source"]["spec"])

    @property
    def spec(self) -> FeatureSpec:
        """The tokens that were embedded."""
        tokens = self.metadata["tokens"]
        return FeatureSpec(tokens=tokens["kind"], blocks=tokens["blocks"])

    def freeze(self, model: Backbone) -> FrozenBackbone:
        """Return a backbone that computes features as these were; raise if it has other weights."""
        recorded, stated = self.metadata["weights"], self.metadata["precision"]
        precision = PRECISIONS.get(stated) if isinstance(stated, str) else None
        if precision is None:
            raise ValueError(f"the file states precision={brief(stated)}, which is none of embeddings")
        frozen = FrozenBackbone(
            model=model.to(start_processes().device),
            transform=self.transform,
            autocast=None if precision == torch.float32 else precision,
        )
        if frozen.weights_digest != recorded["sha256"]:
            text = f"{model.provenance.source} are not the weights that computed the embeddings"
            text = f"{text}: those are {recorded['path']}, step {recorded['step']}"
            raise ValueError(f"{text}. Embed again, or give them to search with weights=")
        return frozen

    def indices_in(self, source: ImageSet, rows: Iterable[int]) -> dict[int, int]:
        """Return where the images of rows are in the source now, unless they are gone."""
        found, places = dict[int, int](), dict[str, int]()
        for row in rows:
            name, index = self.names[row], int(self.indices[row])
            if not (index < len(source) and source.name(index) == name):  # others came or went since
                places = places or {source.name(place): place for place in range(len(source))}
                index = places.get(name, -1)
            if index >= 0:
                found[row] = index
        return found


def write_embeddings(path: Path, embeddings: Embeddings) -> None:
    """Write an embedding file."""
    width = int(np.prod(embeddings.values.shape[1:]))
    flat = pa.array(embeddings.values.ravel())
    columns = {
        "name": pa.array(embeddings.names, pa.string()),
        "label": pa.array(embeddings.labels, pa.string()),
        "index": pa.array(embeddings.indices, pa.int64()),
        "embedding": pa.FixedSizeListArray.from_arrays(flat, width),
    }
    table = pa.table(columns, metadata={OWN_KEY: json.dumps(embeddings.metadata)})
    # Floating-point noise neither compresses nor repeats.
    options: dict[str, Any] = {"compression": "none", "use_dictionary": ["label"]}
    with replacing(path) as partial, partial.open("wb") as file:
        parquet.write_table(table, file, row_group_size=max(_GROUP_BYTES // (4 * width), 1), **options)


def read_embeddings(path: Path) -> Embeddings:
    """Read an embedding file."""
    if not path.is_file():
        if path.exists():
            advice = f"`dino-vit embed {path} WEIGHTS output=FILE.parquet` writes one"
            raise ValueError(f"{path} is not an embedding file; {advice}")
        advice = did_you_mean(str(path), f"; `dino-vit embed SOURCE WEIGHTS output={path}` writes it")
        raise ValueError(f"{path} does not exist{advice}")
    try:
        with path.open("rb") as file:  # Arrow itself opens UTF-8 names only
            table = parquet.read_table(file)
        metadata = json.loads(table.schema.metadata[OWN_KEY.encode()])
        if metadata["format"] != FORMAT:
            raise ValueError(f"it has format {metadata['format']}, but this dino-vit reads {FORMAT}")
        blocks = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in table["embedding"].chunks]
        embeddings = Embeddings(
            values=np.concatenate(blocks).reshape(-1, *metadata["shape"]),
            names=table["name"].to_pylist(),
            labels=table["label"].to_pylist(),
            indices=table["index"].to_numpy(),
            metadata=metadata,
        )
        TypeAdapter(str).validate_python(metadata["source"]["spec"]), embeddings.transform  # must be there
        TypeAdapter(_Weights).validate_python(metadata["weights"]), embeddings.spec
    except Exception as error:  # Arrow has errors of its own
        # "'NoneType' object is not subscriptable" means nothing to a user.
        why = "" if isinstance(error, LookupError | TypeError) else f": {brief(error, 200)}"
        raise ValueError(f"{path} is damaged or not an embedding file of `dino-vit embed`{why}") from error
    return embeddings


def read_image_embeddings(path: str) -> Embeddings:
    """Read embeddings, of a file or passed by a program, that have one for each image."""
    embeddings = find(path) if is_object(path) else read_embeddings(Path(path))
    assert isinstance(embeddings, Embeddings)
    if embeddings.values.ndim != 2:
        raise ValueError(f"{path} has several tokens of each image, but needs one: embed with tokens=cls")
    return embeddings


def embedded_panels(embeddings: Embeddings, captions: Iterable[tuple[int, str]]) -> list[Panel]:
    """Return embedded images by their rows as small pictures with captions; empty ones if they are gone."""
    try:
        source = embeddings.open_source()
    except (ValueError, OSError, SourceLost) as error:
        log.warning("the sheet does not show the embedded images: %s", error)
        return [(EMPTY, caption) for _, caption in captions]
    captions, pixels = list(captions), embeddings.transform.pixels
    places = embeddings.indices_in(source, (row for row, _ in captions))
    return [
        (thumbnail(source, places[row], pixels) if row in places else EMPTY, caption)
        for row, caption in captions
    ]


@dataclass(frozen=True, kw_only=True, repr=False)
class ImageEmbeddings(Embeddings, Result):
    """The embeddings of images."""

    path: Path | None  # of the file, if one was written


def run(config: EmbedConfig) -> ImageEmbeddings:
    """Compute the embeddings of a source, and write them to a file if there is an output."""
    output = None if config.output is None else Path(config.output)
    if output:
        check_outputs(config, output)
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
        "format": FORMAT,
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
