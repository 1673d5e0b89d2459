"""The tokens of masked images: every token of all blocks, computed in full, is the naive twin."""

import pytest
import torch

from dino_vit.models.vit import VisionTransformer
from tests.support.backbones import KEYWORDS as TINY

IMAGES = 4


def masked_images(**changes):
    """Return a model, images and hidden patches: of image 0 none, of the others some."""
    torch.manual_seed(0)
    model = VisionTransformer(**{**TINY, **changes}, mask_token=True)
    torch.nn.init.normal_(model.mask_token)
    images = torch.randn(IMAGES, 3, 32, 48)
    hidden = torch.rand(IMAGES, model.grid_of(32, 48)[0] * model.grid_of(32, 48)[1]) < 0.3
    hidden[0] = False
    return model, images, hidden


def all_tokens(model, images, hidden):
    """Return all tokens after the last LayerNorm, with the mask token written into the patches by hand."""
    patches = model.patch_embed(images)
    for image, row in enumerate(hidden):
        for place in row.nonzero()[:, 0]:
            patches[image, place] = model.mask_token[0]
    positions = model.interpolate_pos_embs(model.grid_of(*images.shape[-2:]))
    cls = (model.cls_token + positions[:, :1]).expand(len(images), -1, -1)
    parts = [cls, patches + positions[:, 1:]]
    if model.register_tokens is not None:
        parts.insert(1, model.register_tokens.expand(len(images), -1, -1))
    tokens = torch.cat(parts, dim=1)
    for block in model.blocks:
        tokens = block(tokens)
    return model.norm(tokens)


@pytest.mark.parametrize("registers", [0, 3])
@pytest.mark.parametrize("recomputed", [False, True])
def test_cls_and_the_patches_that_are_asked_for(registers, recomputed):
    model, images, hidden = masked_images(registers=registers, layer_scale=0.5)
    model.checkpoint_blocks = recomputed
    places = hidden.flatten().nonzero()[:, 0]
    cls, patches = model.forward_masked(images, hidden, places)
    expected = all_tokens(model, images, hidden)
    torch.testing.assert_close(cls, expected[:, 0])
    torch.testing.assert_close(patches, expected[:, 1 + registers :][hidden])
    weights = [torch.randn_like(cls), torch.randn_like(patches)]
    found = torch.autograd.grad((cls * weights[0]).sum() + (patches * weights[1]).sum(), model.parameters())
    loss = (expected[:, 0] * weights[0]).sum() + (expected[:, 1 + registers :][hidden] * weights[1]).sum()
    gradients = torch.autograd.grad(loss, model.parameters())
    for mine, exact in zip(found, gradients, strict=True):
        torch.testing.assert_close(mine, exact, atol=1e-4, rtol=1e-4)


def test_the_teacher_sees_all_patches():
    model, images, hidden = masked_images()
    places = hidden.flatten().nonzero()[:, 0]
    cls, patches = model.forward_masked(images, None, places)
    whole = model.forward_features(images)
    torch.testing.assert_close(cls, whole[:, 0])
    torch.testing.assert_close(patches, whole[:, 1:][hidden])
    assert not torch.allclose(cls, model.forward_masked(images, hidden, places)[0])


def test_the_last_block_computes_nothing_else():
    model, images, hidden = masked_images()
    seen = []
    model.blocks[-1].mlp.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape))
    model.forward_masked(images, hidden, hidden.flatten().nonzero()[:, 0])
    assert seen == [(IMAGES + int(hidden.sum()), model.width)]


def test_an_image_is_dropped_as_a_whole():
    """Stochastic depth: the CLS token and all patches of an image keep or lose a branch together."""
    model, images, hidden = masked_images()
    model.blocks[-1].drop_path.rate = 0.5
    places = hidden.flatten().nonzero()[:, 0]
    of_image = places // hidden.shape[1]
    block = model.blocks[-1].train()
    torch.nn.init.zeros_(block.mlp.fc2.weight)  # only the attention's branch is left to be dropped
    torch.nn.init.zeros_(block.mlp.fc2.bias)
    dropped = set()
    for seed in range(8):
        torch.manual_seed(seed)
        tokens = model.embed_patches(images, hidden)
        for one in model.blocks[:-1]:
            tokens = one(tokens)
        cls, patches = model.forward_masked(images, hidden, places)
        same_cls = [torch.allclose(cls[i], model.norm(tokens[i, 0]), atol=1e-6) for i in range(IMAGES)]
        same = [
            torch.allclose(p, model.norm(tokens[i, 1 + places[n] % hidden.shape[1]]), atol=1e-6)
            for n, (i, p) in enumerate(zip(of_image, patches, strict=True))
        ]
        assert same == [same_cls[i] for i in of_image]
        dropped |= set(same_cls)
    assert dropped == {True, False}


def test_without_a_mask_token_nothing_can_be_hidden():
    model, images, hidden = masked_images()
    model.mask_token = None
    with pytest.raises(AssertionError, match="mask_token=True"):
        model.embed_patches(images, hidden)
