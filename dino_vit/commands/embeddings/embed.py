"""Write the embeddings of images to a file, with what is needed to compute them again."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

from dino_vit import __version__
from dino_vit.commands import Result
from dino_vit.config.settings import Few, setting
from dino_vit.core.distributed import is_main_process, wait_for_all
from dino_vit.core.text import public
from dino_vit.data.sources.open import Source, open_source
from dino_vit.eval.embeddings import Array, Embeddings, check_suffix, read_embeddings, write_embeddings
from dino_vit.eval.features import FrozenBackbone
from dino_vit.eval.frozen import CachedConfig, cached_features, frozen_backbone
from dino_vit.models.tokens import FeatureSpec, Tokens
from dino_vit.weights.hub import is_name


class EmbedConfig(CachedConfig):
    """Write the embeddings of images to a file."""

    labels: str | None = setting(None, "CSV or JSON file of the images' labels; null: the source's own")
    output: str = setting("embeddings.parquet", "Parquet file to write")
    tokens: Tokens = setting("cls", "CLS token, mean of the patches, both, the patches, or all tokens")
    blocks: Few = setting(1, "last blocks whose tokens are joined")
    precision: Literal["auto", "no", "bf16", "fp16"] = setting(
        "no", "of the forward passes: no is float32, auto is bf16 where it is native"
    )
    dtype: Literal["float32", "float16"] = setting("float32", "of the embeddings in the file")

    examples: ClassVar = ("embed photos weights=runs/pretrain output=photos.parquet",)


@dataclass(frozen=True, kw_only=True)
class EmbeddingFile(Result):
    """A file of embeddings; its contents are read when they are asked for."""

    path: Path

    def __fspath__(self) -> str:
        return str(self.path)

    @cached_property
    def content(self) -> Embeddings:
        """Everything in the file."""
        return read_embeddings(self.path)

    @property
    def values(self) -> Array:
        """The embeddings (n, D); of patches (n, N, D)."""
        return self.content.values

    @property
    def names(self) -> Sequence[str]:
        """The name of the image of each row."""
        return self.content.names

    @property
    def labels(self) -> Sequence[str | None]:
        """The name of the class of each row."""
        return self.content.labels


def run(config: EmbedConfig) -> EmbeddingFile:
    """Write the embeddings of a source to a file."""
    output = Path(config.output)
    check_suffix(output)
    backbone = frozen_backbone(config)
    source = open_source(config.source, config.labels)
    spec = FeatureSpec(tokens=config.tokens, blocks=config.blocks)
    values, indices = cached_features(backbone, source, spec=spec, title=f"embeddings of {config.source}")
    if is_main_process():
        labels = [source.label(i) for i in indices.tolist()]
        embeddings = Embeddings(
            values=values,
            names=[source.name(i) for i in indices.tolist()],
            labels=[None if label is None else source.classes[label] for label in labels],
            indices=indices,
            metadata=provenance(values, source, backbone, config),
        )
        write_embeddings(output, embeddings, dtype=config.dtype)
    wait_for_all()  # the file is complete for all of them
    shape = " × ".join(map(str, values.shape))
    rounded = "" if backbone.autocast is None else f" (computed in {backbone.precision})"
    text = f"{output}: {shape} in {config.dtype}{rounded}, with names, labels and metadata"
    return EmbeddingFile(path=output, text=text)


def provenance(
    values: Array, source: Source, backbone: FrozenBackbone, config: EmbedConfig
) -> dict[str, Any]:
    """Return all that is needed to compute the features again."""
    path, weights = Path(config.source), backbone.describe_weights()
    named = is_name(weights["source"])
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
            "fingerprint": source.fingerprint,
            "images": len(source),
            "unreadable": len(source) - len(values),
        },
        "transform": asdict(backbone.transform),
        "tokens": {"kind": config.tokens, "blocks": config.blocks},
        "precision": backbone.precision,
        "shape": list(values.shape[1:]),
    }
