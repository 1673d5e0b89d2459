"""A frozen backbone in every process of a launch, shared by the commands that evaluate features."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field

from dino_vit.config.sections import Side
from dino_vit.config.settings import Dimension, Few, Settings, setting
from dino_vit.core.distributed import world_size
from dino_vit.core.runtime import DTYPES, choose_precision, cores_of_a_process, start_processes
from dino_vit.core.sizes import height_width
from dino_vit.data.sources.index import cache_folder
from dino_vit.data.sources.open import Source
from dino_vit.eval.features.extraction import CLS, Extraction, FeatureSpec
from dino_vit.eval.features.store import Dtype, StoredFeatures, stored_features
from dino_vit.models.backbone import Backbone
from dino_vit.views.preparation import Fit, Preparation, preparation_of
from dino_vit.weights import load_backbone


class BackboneConfig(Settings):
    """Send images through a frozen backbone."""

    source: str = Field(description="the images: a folder, a list, archives, Parquet, ... or `synthetic`")
    weights: str = Field(description="run folder or weights file")
    network: Literal["teacher", "student"] = setting("teacher", "network of a checkpoint")
    size: Side | None = setting(None, "side in pixels, or [height, width]; null: that of the weights")
    fit: Fit = setting("crop", "crop: resize and centre-crop; whole: resize the whole image to the size")
    batch_size: Dimension = setting(128, "images per process and forward pass")
    readers: Few | None = setting(None, "threads that read images; null: one per core, at most 16")
    precision: Literal["auto", "no", "bf16", "fp16"] = setting("auto", "auto: bf16 where it is native")

    positional: ClassVar = ("source",)


class CachedConfig(BackboneConfig):
    """Evaluate a frozen backbone on the features of images, which are computed once and cached."""

    cache: str | None = setting(None, "folder that caches features; null: features/ in DINO_VIT_CACHE")


class EvaluationConfig(CachedConfig):
    """Evaluate a frozen backbone on the features of images that may have labels."""

    labels: str | None = setting(None, "CSV or JSON file of the images' labels; null: the source's own")


@dataclass(frozen=True, kw_only=True)
class FrozenBackbone:
    """A backbone on this process's device, and how images are prepared for it."""

    config: BackboneConfig
    model: Backbone
    preparation: Preparation
    autocast: torch.dtype | None

    @property
    def device(self) -> torch.device:
        return self.model.device

    def describe_weights(self) -> dict[str, Any]:
        """Return where the weights come from, for a results file."""
        return describe_weights(self.model)

    def extraction(self, source: Source, spec: FeatureSpec) -> Extraction:
        """Return what computes features of a source with the settings of the config."""
        return Extraction(
            self.model,
            source,
            preparation=self.preparation,
            spec=spec,
            autocast=self.autocast,
            threads=self.config.readers or min(cores_of_a_process(world_size()), 16),
        )

    def features(
        self,
        source: Source,
        *,
        spec: FeatureSpec = CLS,
        indices: Sequence[int] | None = None,
        dtype: Dtype = "float32",
        title: str = "features",
    ) -> StoredFeatures:
        """Return the features of a source or of some of its images; all processes must call it."""
        return self.cached(self.extraction(source, spec), indices=indices, dtype=dtype, title=title)

    def cached(
        self,
        extraction: Extraction,
        *,
        title: str,
        indices: Sequence[int] | None = None,
        dtype: Dtype = "float32",
    ) -> StoredFeatures:
        """Return the features of an extraction from the cache, or compute them into it."""
        cache = self.config.cache if isinstance(self.config, CachedConfig) else None
        return stored_features(
            extraction,
            folder=Path(cache) if cache else cache_folder() / "features",
            batch_size=self.config.batch_size,
            indices=indices,
            dtype=dtype,
            title=title,
        )


def describe_weights(model: Backbone) -> dict[str, Any]:
    """Return where the weights of a loaded backbone come from, for a results file."""
    known = model.provenance
    assert known is not None, "load_backbone sets the provenance"
    return {name: getattr(known, name) for name in ("source", "sha256", "network", "step")}


def frozen_backbone(config: BackboneConfig) -> FrozenBackbone:
    """Join the processes of the launch, and load the backbone of the config in each."""
    accelerator = start_processes()
    model = load_backbone(config.weights, network=config.network).to(accelerator.device)
    precision = choose_precision(config.precision, accelerator.device)
    size = None if config.size is None else height_width(config.size)
    return FrozenBackbone(
        config=config,
        model=model,
        preparation=preparation_of(model, size=size, fit=config.fit),
        autocast=DTYPES[precision] if precision != "no" else None,
    )
