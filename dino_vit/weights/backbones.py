"""A backbone from a file or a run: it prepares images, and embeds them, as the evaluations do."""

from collections.abc import Iterable
from functools import cached_property
from itertools import chain, islice
from typing import TYPE_CHECKING, get_args

import torch
from einops import rearrange
from torch import Tensor

from dino_vit.config.sections import Tokens
from dino_vit.models.backbone import Backbone, FeatureSpec, eval_mode
from dino_vit.models.timm_backbone import TimmBackbone
from dino_vit.models.vit import VisionTransformer
from dino_vit.weights.baselines import Baseline

if TYPE_CHECKING:
    from dino_vit.views.eval_transform import EvalTransform


class LoadedBackbone(Backbone):
    """A backbone from a file or a run."""

    @cached_property
    def transform(self) -> "EvalTransform":
        """What evaluations do with an image before this backbone: resize, crop, normalise."""
        from dino_vit.views.eval_transform import eval_transform_of  # imports Pillow, and more

        return eval_transform_of(self)

    @torch.no_grad()
    def embed(
        self,
        images: object,
        *,
        tokens: Tokens = "cls",
        blocks: int = 1,
        reshape: bool = False,
        batch_size: int = 64,
    ) -> Tensor:
        """Return the features of an image, or (n, ...) of several, on the CPU, in float32.

        An image is what `transform` takes; several are an iterable of them, a tensor (n, C, H, W) or an array
        (n, H, W, C). They are read and sent through the backbone `batch_size` at a time.

        The features are the CLS token (D,), the `mean` of the patches (D,), that of each of 3 × 3 `cells`
        (9 D,), CLS with them as `cls+mean` or `cls+cells`, the `patches` (N, D), or `all` tokens, CLS and
        registers first; of several last `blocks` they are joined along the channels. `reshape` gives patches
        as a map (D, rows, columns).
        """
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1")
        if tokens not in get_args(Tokens):
            raise ValueError(f"tokens={tokens!r} must be one of {', '.join(get_args(Tokens))}")
        if reshape and tokens != "patches":
            raise ValueError(f"reshape=True makes a map: it needs tokens='patches', not {tokens!r}")
        features = self.read(images, FeatureSpec(tokens=tokens, blocks=blocks), batch_size)
        rows, _ = self.grid_of(*self.transform.size)
        return rearrange(features, "... (y x) d -> ... d y x", y=rows) if reshape else features

    def read(self, images: object, spec: FeatureSpec, batch_size: int = 64) -> Tensor:
        """Return the same of any parts."""
        single = isinstance(images, str | bytes) or getattr(images, "ndim", 4) in (2, 3)
        if single or not isinstance(images, Iterable):
            return self.read([images], spec)[0]
        remaining = iter(images)
        weight = next(chain(self.parameters(), self.buffers()))  # a baseline has no parameters
        parts = [torch.empty(0, *spec.shape(self, self.transform.size))]
        with eval_mode(self):
            while batch := [self.transform(image) for image in islice(remaining, batch_size)]:
                inputs = torch.stack(batch).to(weight.device, weight.dtype)
                parts.append(spec.extract(self, inputs).float().cpu())
        return torch.cat(parts)


class LoadedTransformer(LoadedBackbone, VisionTransformer):
    """A vision transformer from a file or a run."""


class LoadedTimmBackbone(LoadedBackbone, TimmBackbone):
    """A model of timm from a file or a run."""


class LoadedBaseline(LoadedBackbone, Baseline):
    """Pixels or edges, which have no weights."""
