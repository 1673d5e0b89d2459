"""A small backbone, and images for it that are not of its trained size."""

import torch

from dino_vit import VisionTransformer

KEYWORDS = {"image_size": 32, "patch_size": 8, "width": 32, "depth": 3, "heads": 2}
IMAGES = torch.randn(2, 3, 32, 48, generator=torch.Generator().manual_seed(5))


def backbone(**changes) -> VisionTransformer:
    return VisionTransformer(**{**KEYWORDS, **changes}).eval()
