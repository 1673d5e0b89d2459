"""A small backbone, images for it that are not of its trained size, and the features of images."""

import torch

from dino_vit import VisionTransformer
from dino_vit.eval import cross_validation, linear
from dino_vit.features.frozen import FrozenBackbone
from dino_vit.models.backbone import CLS
from dino_vit.views.eval_transform import eval_transform_of

KEYWORDS = {"image_size": 32, "patch_size": 8, "width": 32, "depth": 3, "heads": 2}
IMAGES = torch.randn(2, 3, 32, 48, generator=torch.Generator().manual_seed(5))


def backbone(**changes) -> VisionTransformer:
    return VisionTransformer(**{**KEYWORDS, **changes}).eval()


def extracted(model, source, indices=None, spec=CLS, transform=None, **settings) -> torch.Tensor:
    """Return the features of images, by default of all and prepared as the weights say."""
    frozen = FrozenBackbone(model=model, transform=transform or eval_transform_of(model), **settings)
    return frozen.extract(source, range(len(source)) if indices is None else indices, spec).values


def use_few_penalties(setattr=setattr):
    """Have logistic regressions choose between two penalties; with all thirteen they take most of a test."""
    setattr(linear, "STANDARD_CS", (0.001, 0.1))
    setattr(cross_validation, "CS", (0.001, 0.1))
