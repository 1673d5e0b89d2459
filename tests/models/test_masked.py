"""The tokens of masked images: the mask token written into the patches by hand is the naive twin."""

import pytest
import torch

from dino_vit.models.student_teacher import Masks
from dino_vit.models.vit import VisionTransformer
from tests.support.backbones import KEYWORDS as TINY

IMAGES = 4


def masked_images(**changes):
    """Return a model, images and a mask: of image 0 nothing, of the others some patches."""
    torch.manual_seed(0)
    model = VisionTransformer(**{**TINY, **changes}, mask_token=True)
    torch.nn.init.normal_(model.mask_token)
    mask = torch.rand(IMAGES, 24) < 0.3
    mask[0] = False
    return model, torch.randn(IMAGES, 3, 32, 48), mask


def all_tokens(model, images, mask):
    """Return all tokens after the last LayerNorm, with the mask token written into the patches by hand."""
    patches = model.patch_embed(images)
    for image, row in enumerate(mask):
        for index in row.nonzero()[:, 0]:
            patches[image, index] = model.mask_token[0]
    positions = model.interpolate_pos_embs(model.grid_of(*images.shape[-2:]))
    parts = [(model.cls_token + positions[:, :1]).expand(len(images), -1, -1), patches + positions[:, 1:]]
    if model.register_tokens is not None:
        parts.insert(1, model.register_tokens.expand(len(images), -1, -1))
    tokens = torch.cat(parts, dim=1)
    for block in model.blocks:
        tokens = block(tokens)
    return model.norm(tokens)


@pytest.mark.parametrize("registers", [0, 3])
@pytest.mark.parametrize("recomputed", [False, True])
def test_the_mask_token_replaces_the_masked_patches(registers, recomputed):
    model, images, mask = masked_images(registers=registers, layer_scale=0.5)
    model.grad_checkpointing = recomputed
    tokens, expected = model.forward_features(images, mask), all_tokens(model, images, mask)
    torch.testing.assert_close(tokens, expected)
    weights = torch.randn_like(tokens)
    gradients = [torch.autograd.grad((t * weights).sum(), model.parameters()) for t in (tokens, expected)]
    for mine, exact in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, exact, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(tokens[1:], model.forward_features(images)[1:])


def test_indices_and_weights_of_masks():
    masks = Masks.of(torch.tensor([[True, False, True], [False, False, False], [False, True, False]]))
    assert masks.mask_indices.tolist() == [0, 2, 7]
    assert masks.weights.tolist() == [0.5, 0.5, 1.0]
