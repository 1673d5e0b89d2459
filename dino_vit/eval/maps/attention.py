"""Maps of what a backbone attends to: CLS attention, masks, PCA colours of patch tokens.

b images, h heads, y x rows and columns of patches, n tokens, d channels
"""

from collections.abc import Sequence

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from dino_vit.core import Size
from dino_vit.eval.maps.pictures import resize_sides
from dino_vit.models.backbone import Backbone, eval_mode
from dino_vit.models.vit import VisionTransformer
from dino_vit.views.eval_transform import EvalTransform

MASS = 0.6  # of the attention, in the mask of a head


def pad(images: Tensor, patch: Size) -> Tensor:
    """Repeat the last row and column of images (b, c, H, W) up to a whole number of patches."""
    height, width = images.shape[-2:]
    return F.pad(images, (0, -width % patch[1], 0, -height % patch[0]), mode="replicate")


def whole_image(
    model: Backbone, image: Tensor, transform: EvalTransform, *, shorter: int, longest: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return a whole image (C, H, W) at some size, and the same normalised and padded to whole patches.

    Positions are interpolated where that size is not the one of training.
    """
    image = resize_sides(image, shorter, longest)
    return image, pad(transform.normaliser(model.device)(image[None]), model.patch_size)


def with_attention(model: Backbone) -> VisionTransformer:
    """Return a backbone whose attention can be shown, or raise."""
    if isinstance(model, VisionTransformer):
        return model
    name = model.architecture["name"]
    raise ValueError(f"timm:{name} does not support attention maps; `dino-vit dense` judges its feature map")


def cls_attention(model: VisionTransformer, images: Tensor, block: int = -1) -> Tensor:
    """Return the attention of the CLS token to each patch in one block, (b, h, y, x)."""
    with eval_mode(model):
        (weights,) = model.get_attention(images, [block], queries=slice(0, 1))
    of_patches = weights[:, :, 0, model.first_patch :]  # without the CLS token and the registers
    return rearrange(of_patches, "b h (y x) -> b h y x", y=model.grid_of(*images.shape[-2:])[0])


def mass_mask(maps: Tensor, share: float) -> Tensor:
    """Mark the fewest patches of each map (..., y, x) that hold at least a share of its mass."""
    flat = maps.flatten(-2).double()
    values, indices = flat.sort(dim=-1, descending=True, stable=True)
    mass_before = values.cumsum(-1) - values
    marked = mass_before < share * flat.sum(-1, keepdim=True)
    return torch.zeros_like(marked).scatter(-1, indices, marked).reshape(maps.shape)


def patch_tokens(model: Backbone, images: Tensor) -> Tensor:
    """Return the patch tokens after the final LayerNorm, (b, y, x, d)."""
    with eval_mode(model):
        tokens = model.forward_features(images)[:, model.first_patch :]
    return rearrange(tokens, "b (y x) d -> b y x d", y=model.grid_of(*images.shape[-2:])[0])


def principal_components(values: Tensor, count: int) -> Tensor:
    """Return the first principal components (n, count) of rows (n, d).

    Each is in the direction in which its largest entry is positive, so that it is the same on every machine.
    """
    values = values.double()
    centred = values - values.mean(0)
    _, vectors = torch.linalg.eigh(centred.T @ centred)
    axes = vectors.flip(1)[:, :count]
    return centred @ (axes * axes.gather(0, axes.abs().argmax(0, keepdim=True)).sign())


def principal_colours(tokens: Sequence[Tensor]) -> list[Tensor]:
    """Turn the patch tokens (y, x, d) of some images into colours (y, x, 3) from 0 to 1.

    Red, green and blue are the first three principal components over all patches of all images, so that a
    colour means the same in each. Each component runs from its 1st to its 99th percentile.
    """
    values = principal_components(torch.cat([image.flatten(0, 1) for image in tokens]), 3)
    sample = values[:: 1 + len(values) // 1_000_000]  # torch.quantile takes at most 2**24 values
    low, high = torch.quantile(sample, torch.tensor([0.01, 0.99]).double(), dim=0)
    colours = ((values - low) / (high - low).clamp_min(1e-12)).clamp(0, 1).float()
    of_images = colours.split([image.shape[0] * image.shape[1] for image in tokens])
    return [part.reshape(*image.shape[:2], 3) for part, image in zip(of_images, tokens, strict=True)]
