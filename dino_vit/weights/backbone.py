"""A loaded backbone, with the transform of images that belongs to it."""

from collections.abc import Iterable
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dino_vit.models.backbone import Backbone
from dino_vit.models.timm_backbone import TimmBackbone
from dino_vit.models.vit import VisionTransformer

if TYPE_CHECKING:
    from dino_vit.views.eval_transform import Transform


class LoadedBackbone(Backbone):
    """A backbone from a file or a run."""

    @cached_property
    def transform(self) -> "Transform":
        """What evaluations do with an image before this backbone: resize, crop, normalise."""
        from dino_vit.views.eval_transform import (  # imports torchvision, and more
            Transform,
            eval_transform_of,
        )

        return Transform(eval_transform_of(self))

    @torch.no_grad()
    def embed(self, images: object, *, batch_size: int = 64) -> Tensor:
        """Return the CLS token (D,) of an image, or (n, D) of several, on the CPU.

        An image is what `transform` takes; several are an iterable of them, a tensor (n, C, H, W) or an array
        (n, H, W, C). They are read and sent through the backbone `batch_size` at a time.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1")
        single = isinstance(images, str | bytes) or getattr(images, "ndim", 4) in (2, 3)
        if single or not isinstance(images, Iterable):
            return self.embed([images])[0]
        training, weight, remaining = self.training, next(self.parameters()), iter(images)
        self.eval()
        try:
            features = [torch.empty(0, self.width)]
            while batch := [self.transform(image) for image in islice(remaining, batch_size)]:
                inputs = torch.stack(batch).to(weight.device, weight.dtype)
                features.append(self.forward_cls(inputs).float().cpu())
        finally:
            self.train(training)
        return torch.cat(features)


class LoadedTransformer(LoadedBackbone, VisionTransformer):
    """A vision transformer from a file or a run."""


class LoadedTimmBackbone(LoadedBackbone, TimmBackbone):
    """A model of timm from a file or a run."""
