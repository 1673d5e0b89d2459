"""A loaded backbone, with the preparation of images that belongs to it."""

from collections.abc import Iterable
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dino_vit.models.vit import VisionTransformer

if TYPE_CHECKING:
    from dino_vit.views.preparation import Transform


class Backbone(VisionTransformer):
    """A vision transformer from a file or a run."""

    @cached_property
    def transform(self) -> "Transform":
        """What evaluations do with an image before this backbone: resize, crop, normalise."""
        from dino_vit.views.preparation import Transform, preparation_of  # imports torchvision, and more

        return Transform(preparation_of(self))

    @torch.no_grad()
    def embed(self, images: object, *, batch_size: int = 64) -> Tensor:
        """Return the CLS token (D,) of an image, or (n, D) of several, on the CPU.

        An image is what `transform` takes; several are an iterable of them, or a tensor or array (n, ...).
        They are read and sent through the backbone `batch_size` at a time.
        """
        if isinstance(images, str) or not isinstance(images, Iterable) or getattr(images, "ndim", 4) < 4:
            return self.embed([images])[0]
        training, device, waiting = self.training, self.cls_token.device, iter(images)
        self.eval()
        try:
            found = [torch.empty(0, self.width)]
            while batch := [self.transform(image) for image in islice(waiting, batch_size)]:
                found.append(self.forward_cls(torch.stack(batch).to(device)).float().cpu())
        finally:
            self.train(training)
        return torch.cat(found)
