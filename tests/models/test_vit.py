import subprocess
import sys

import pytest
import torch

from dino_vit.models.vit import VisionTransformer, vit_small, vit_tiny
from tests.support.backbones import KEYWORDS as TINY
from tests.support.close import assert_close_to_scale


def test_attention_of_the_cls_token_alone_is_its_row():
    model, images = VisionTransformer(**TINY).eval(), torch.randn(2, 3, 32, 40)
    last = model.get_attention(images, [-1], queries=slice(0, 1))
    assert torch.allclose(last[0], model.get_attention(images)[2][:, :, :1], atol=1e-7)


def test_intermediate_layers_are_the_normalised_tokens_of_the_named_blocks():
    model = VisionTransformer(**TINY).eval()
    images = torch.randn(2, 3, 32, 32)
    tokens, after = model.embed_patches(images), []
    for layer in model.blocks:
        tokens = layer(tokens)
        after.append(model.norm(tokens))
    for blocks, expected in ((2, after[1:]), ([0, -1], [after[0], after[2]]), ([2, 0], [after[2], after[0]])):
        layers = model.get_intermediate_layers(images, blocks)
        assert all(torch.equal(a, b) for a, b in zip(layers, expected, strict=True))
    with pytest.raises(ValueError, match="blocks 0 to 2"):
        model.get_intermediate_layers(images, [3])


def test_initial_weights():
    assert len(vit_small().state_dict()) == 150, "the tensors of the released ViT-S file"
    model = vit_tiny(num_classes=10)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") and "patch_embed" not in name:
            assert not parameter.any(), name
        elif parameter.ndim == 2 or name in ("cls_token", "pos_embed"):
            assert parameter.std().item() == pytest.approx(0.02, rel=0.2), name
            assert parameter.abs().max() <= 2.0
    bound = (3 * 16 * 16) ** -0.5  # PyTorch's default for a convolution is uniform within 1/sqrt(fan in)
    kernel = model.patch_embed.proj.weight
    assert bound * 0.98 < kernel.abs().max() <= bound


@pytest.mark.slow
def test_it_compiles_in_one_graph_at_two_sizes():
    model = VisionTransformer(**{**TINY, "depth": 2}, registers=3).eval()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for size in (32, 48):
        images = torch.randn(2, 3, size, 32)
        assert_close_to_scale(compiled(images), model(images))


def test_invalid_images_and_shapes_are_rejected():
    model = VisionTransformer(**TINY)
    with pytest.raises(ValueError, match=r"33 × 32 .* resize, crop or pad"):
        model(torch.randn(1, 3, 33, 32))
    with pytest.raises(ValueError, match=r"\(batch, 3, height, width\), but got \(1, 4, 32, 32\)"):
        model(torch.randn(1, 4, 32, 32))
    with pytest.raises(ValueError, match="width=30 is not divisible by heads=4"):
        VisionTransformer(width=30, heads=4)
    with pytest.raises(ValueError, match="needs a multiple of 4 channels in a head, not 6"):
        VisionTransformer(width=30, heads=5, positions="rotary")


def test_importing_the_library_is_silent_and_cheap():
    """No seed drawn or set, no default changed, nothing heavier than torch loaded."""
    code = (
        "import torch, sys; state = torch.get_rng_state(); before = set(sys.modules);"
        "threads = torch.get_num_threads();"
        "import dino_vit; dino_vit.VisionTransformer; dino_vit.load_backbone;"
        "assert torch.equal(state, torch.get_rng_state()) and threads == torch.get_num_threads();"
        "assert torch.get_default_dtype() == torch.float32 and torch.is_grad_enabled();"
        "heavy = {'transformers', 'timm', 'torchvision', 'matplotlib', 'pyarrow', 'accelerate', 'faiss'};"
        "assert not heavy & (set(sys.modules) - before), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def masked_images(**changes):
    """Return a model, images and a mask: of image 0 nothing, of the others some patches."""
    torch.manual_seed(0)
    model = VisionTransformer(**{**TINY, **changes}, mask_token=True)
    torch.nn.init.normal_(model.mask_token)
    mask = torch.rand(4, 24) < 0.3
    mask[0] = False
    return model, torch.randn(4, 3, 32, 48), mask


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
    assert_close_to_scale(tokens, expected)
    weights = torch.randn_like(tokens)
    gradients = [torch.autograd.grad((t * weights).sum(), model.parameters()) for t in (tokens, expected)]
    assert_close_to_scale(*gradients)
    assert not torch.allclose(tokens[1:], model.forward_features(images)[1:])


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_tokens_are_in_float32_under_autocast(positions: str) -> None:
    """As the sums of residuals are; DINOv3's are too."""
    model = VisionTransformer(image_size=16, patch_size=8, width=32, depth=1, heads=2, positions=positions)
    with torch.autocast("cpu", torch.bfloat16):
        assert model.embed_patches(torch.randn(2, 3, 16, 16)).dtype == torch.float32
        assert model.forward_features(torch.randn(2, 3, 16, 16)).dtype == torch.float32
