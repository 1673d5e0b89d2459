"""The five descriptions of a vision transformer that founded the project: a test for each of their lines.

Whatever else changes, none of these may leave. That each goes wherever a network goes is tested in
tests/training/test_descriptions_in_runs.py.
"""

import math
from functools import partial

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import GroupNorm1, HybridEmbed, StdConv2dSame
from timm.models.resnetv2 import ResNetV2
from timm.models.vision_transformer import VisionTransformer as TimmTransformer
from timm.models.vision_transformer_hybrid import ConvStem
from torch import nn
from torchvision import models as torchvision_models

from dino_vit import load_backbone, save_backbone, vit_base
from dino_vit.models.block import attend
from dino_vit.models.vit import ViTConfig
from tests.support.close import assert_close_to_scale
from tests.support.descriptions import RESNET, build, each_part, each_stem
from tests.support.naive import attention_weights

# First: positions that are interpolated, and CLS features of images of any size.


def test_positions_are_interpolated_and_cls_features_come_at_any_size():
    """Multi-crop needs it: one network takes views of several sizes."""
    model = build().eval()
    for height, width in ((32, 32), (16, 16), (48, 24), (8, 64)):
        grid = height // 8, width // 8
        embs, images = model.interpolate_pos_embs(grid), torch.randn(2, 3, height, width)
        field = model.pos_embed[:, 1:].unflatten(1, (4, 4)).permute(0, 3, 1, 2)
        resized = F.interpolate(field, size=grid, mode="bicubic").flatten(2).mT
        assert_close_to_scale(embs, torch.cat([model.pos_embed[:, :1], resized], dim=1))
        assert model(images).shape == (2, 32)
        assert_close_to_scale(model(images), model.forward_features(images)[:, 0])


# Second: the attention of all blocks, dropouts, a hybrid ResNetV2 stem.


def test_the_attention_of_all_blocks_can_be_looked_at():
    """Self-attention maps are what DINO is known for."""
    model = build().eval()
    images = torch.randn(2, 3, 32, 40)
    maps, tokens = model.get_attention(images), model.embed_patches(images)
    assert len(maps) == model.depth
    for block, weights in zip(model.blocks, maps, strict=True):
        assert torch.allclose(weights.double(), attention_weights(block, tokens), atol=1e-6)
        tokens = block(tokens)


def test_dropout_acts_after_positions_projections_and_in_the_mlp(monkeypatch):
    """And nowhere else: with dropouts that only count, there are one, and three in each block."""
    model, shapes = build(dropout=0.5).train(), []

    def counted(x, rate):
        shapes.append((rate, tuple(x.shape)))
        return x

    images = torch.randn(2, 3, 32, 32)
    monkeypatch.setattr(F, "dropout", counted)
    model.forward_features(images)
    block = [(0.5, (2, 17, 32)), (0.5, (2, 17, 128)), (0.5, (2, 17, 32))]
    assert shapes == [(0.5, (2, 17, 32)), *block, *block]
    shapes.clear()
    model.eval()(images)
    assert not shapes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_of_attention_keeps_the_expectation(dtype):
    """It drops weights after the softmax, and scales the others up."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 6, 6).to(dtype)
    v = torch.eye(6).expand(1, 1, 6, 6).to(dtype)  # so the output are the weights
    weights = attend(q, k, v, scale=0.5).float()
    drawn = torch.stack([attend(q, k, v, scale=0.5, dropout=0.25).float() for _ in range(2000)])
    kept = drawn > 0
    assert kept.float().mean().item() == pytest.approx(0.75, abs=0.02)
    torch.testing.assert_close(drawn[kept], (weights / 0.75).expand_as(drawn)[kept], rtol=2e-2, atol=1e-3)
    torch.testing.assert_close(drawn.mean(0), weights, rtol=0, atol=3e-2)


@pytest.mark.parametrize("rate", ["dropout", "attention_dropout", "drop_path"])
def test_each_rate_acts_in_training_and_rests_in_evaluation(rate):
    """A network with a rate gives the features of the one without it, once it is in evaluation mode."""
    model, plain, images = build(**{rate: 0.5}), build(), torch.randn(4, 3, 32, 32)
    plain.load_state_dict(model.state_dict())
    assert not torch.equal(model.train()(images), model(images))
    assert torch.equal(model.eval()(images), plain.eval()(images))


def with_stem_of_timm(stem, *, patch_size=1, **options):
    """Return timm's transformer on the feature map of a stem."""
    model = TimmTransformer(
        img_size=64,
        patch_size=patch_size,
        embed_dim=32,
        depth=2,
        num_heads=2,
        num_classes=0,
        dynamic_img_size=True,
        embed_layer=partial(HybridEmbed, backbone=stem, **options),
    )
    for name, parameter in model.named_parameters():
        if "norm" in name or "bn" in name:  # ones and zeros, in which a swap would not show
            nn.init.normal_(parameter, mean=1.0, std=0.2)
    return model.eval()


@pytest.mark.parametrize("patch", [1, 2])
def test_the_hybrid_stem_is_timms_resnet_v2(patch):
    """With the names of its tensors, so that the hybrid weights of timm load."""
    conv = partial(StdConv2dSame, eps=1e-8)
    resnet = ResNetV2(
        layers=(1, 2, 1),
        channels=(128, 256, 512),
        stem_chs=32,
        num_classes=0,
        global_pool="",
        preact=False,
        stem_type="same",
        conv_layer=conv,
    )
    peer = with_stem_of_timm(resnet, patch_size=patch)
    model = load_backbone(peer.state_dict(), heads=2, verbose=False)
    expected = {**RESNET, "patch_size": (16 * patch, 16 * patch), "channels": 3}
    assert {name: getattr(model.config, name) for name in expected} == expected
    for size in ((64, 64), (96, 96), (32, 96)):
        images = torch.randn(2, 3, *size)
        assert_close_to_scale(model(images), peer(images), 1e-5)


def test_the_hybrid_weights_of_timm_load():
    """The model that timm itself calls a hybrid, of the published shape."""
    peer = timm.create_model("vit_base_r50_s16_224", num_classes=0, depth=1, dynamic_img_size=True).eval()
    model = load_backbone(peer.state_dict(), verbose=False)
    shape = model.config.stem, model.config.resnet_layers, model.config.resnet_width, model.patch_size
    assert shape == ("hybrid", ViTConfig.resnet_layers, ViTConfig.resnet_width, (16, 16))
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        assert_close_to_scale(model(images), peer(images), 1e-5)


@pytest.mark.parametrize(("patch", "width"), [(2, 32), (8, 32), (8, 16)])
def test_the_stem_of_early_convolutions_is_timms(patch, width):
    """Its ConvStem with GroupNorm1: convolutions of stride 2, as the patch needs, then one of 1 x 1."""
    count = int(math.log2(patch))
    stem = ConvStem(
        depth=count + 1,
        channels=(*(width >> number for number in reversed(range(count))), 32),
        kernel_size=(*[3] * count, 1),
        stride=(*[2] * count, 1),
        norm_layer=GroupNorm1,
        act_layer=nn.GELU,
    )
    peer = with_stem_of_timm(stem, proj=False)
    model = load_backbone(peer.state_dict(), heads=2, verbose=False)
    assert (model.config.stem, model.patch_size) == ("conv", (patch, patch))
    assert model.config.stem_width == (None if width == 32 else width)
    for size in ((64, 64), (32, 48)):
        images = torch.randn(2, 3, *size)
        assert_close_to_scale(model(images), peer(images), 1e-5)


# Third: the parameter counts of torchvision.


@pytest.mark.parametrize("name", ["vit_base", "vit_large", "vit_huge"])
def test_named_sizes_have_as_many_parameters_as_torchvisions(name):
    """With a classifier of 1,000 classes."""
    theirs = {"vit_base": "vit_b_16", "vit_large": "vit_l_16", "vit_huge": "vit_h_14"}[name]
    with torch.device("meta"):
        ours = getattr(__import__("dino_vit"), name)(num_classes=1000)
        peer = getattr(torchvision_models, theirs)()
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in peer.parameters())


# Fourth: stochastic depth, qk_scale, a classifier head.


def test_stochastic_depth_drops_branches_of_images():
    """What is dropped of an image in a block is a whole branch, and the others are scaled up."""
    model = build(drop_path=0.5, drop_path_schedule="uniform", depth=1).train()
    tokens = model.embed_patches(torch.randn(64, 3, 32, 32))
    block = model.blocks[0]
    _, sequences, drop = next(model._passes(tokens, torch.zeros(64, 3, 32, 32)))
    assert {*drop.flatten().tolist()} == {0.0, 2.0}
    attended = tokens + drop[0] * block.attn(block.norm1(tokens), sequences)
    expected = attended + drop[1] * block.mlp(block.norm2(attended))
    assert_close_to_scale(block(tokens, sequences, drop), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_qk_scale_takes_the_place_of_one_by_the_root_of_the_head(dtype):
    """In the features, and in the maps that are shown."""
    scaled, plain = build(qk_scale=0.5).eval().to(dtype), build().eval().to(dtype)
    for model in (scaled, plain):
        model.load_state_dict(plain.state_dict())
    with torch.no_grad():
        for block in plain.blocks:  # heads have 16 channels, so the usual scale is 1/4
            block.attn.qkv.weight[:32] *= 2
            block.attn.qkv.bias[:32] *= 2
    images = torch.randn(2, 3, 32, 32, dtype=dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert_close_to_scale(scaled(images), plain(images), tolerance)
    assert_close_to_scale(scaled.get_attention(images), plain.get_attention(images), tolerance)


def test_a_classifier_head_gives_logits():
    """Or none, which gives the CLS features."""
    model, images = build(num_classes=7), torch.randn(2, 3, 32, 32)
    logits = F.linear(model.forward_cls(images), model.head.weight, model.head.bias)
    assert_close_to_scale(model(images), logits)
    assert isinstance(build().head, nn.Identity)
    assert vit_base(num_classes=10, depth=1).head.out_features == 10


# Fifth: unfolded patches, images that are not square, any channels, sinusoidal positions.


@pytest.mark.parametrize("patch", [(8, 8), (4, 16)])
def test_unfolded_patches_are_the_convolution_whose_weights_they_have(patch):
    """So every published file of a patch convolution loads."""
    model = build(patch_size=patch)
    proj = model.patch_embed.proj
    assert proj.weight.shape == (32, 3, *patch)
    images = torch.randn(2, 3, 32, 48)
    patches = images.unfold(2, patch[0], patch[0]).unfold(3, patch[1], patch[1])  # (b, c, h, w, p, q)
    by_hand = torch.einsum("bchwpq,dcpq->bhwd", patches, proj.weight) + proj.bias
    found = model.patch_embed(images)
    assert_close_to_scale(found, by_hand.flatten(1, 2))
    assert_close_to_scale(found, F.conv2d(images, proj.weight, proj.bias, stride=patch).flatten(2).mT)
    called = []
    proj.register_forward_hook(lambda *_: called.append(True))  # as offloading and pruning do
    model(images)
    assert called == [True]


def test_sinusoidal_positions_are_fixed_sines_and_cosines():
    """sin and cos of i / 10000^(2⌊j/2⌋/D); no gradient, no drawing, interpolated as learned ones are."""
    model = build(positions="sinusoidal", width=6)
    for i in range(17):
        for j in range(6):
            angle = i / 10000 ** (2 * (j // 2) / 6)
            expected = math.cos(angle) if j % 2 else math.sin(angle)
            assert model.pos_embed[0, i, j].item() == pytest.approx(expected, abs=1e-6)
    assert not model.pos_embed.requires_grad
    model(torch.randn(2, 3, 48, 32)).sum().backward()
    assert model.pos_embed.grad is None


@each_part
@pytest.mark.parametrize("channels", [1, 3, 13])
def test_any_channels_and_images_that_are_not_square(part, channels):
    """Of all parts, at the trained size and at another."""
    model = build(**{**part, "image_size": (32, 64), "channels": channels})
    p, q = model.patch_size
    assert model.trained_grid == (32 // p, 64 // q)
    for height, width in ((32, 64), (64, 32), (48, 80)):
        images = torch.randn(2, channels, height, width)
        assert model.forward_features(images).shape == (2, 1 + (height // p) * (width // q), 32)


@each_stem
def test_patches_may_be_oblong(stem):
    """As in each stem: strides of its convolutions, or cells of a feature map."""
    model = build(**{**stem, "patch_size": (16, 32), "image_size": (64, 64)})
    assert model.forward_features(torch.randn(2, 3, 32, 64)).shape == (2, 1 + 2 * 2, 32)
    images = torch.randn(1, 3, 64, 64)
    changed = images.clone()
    changed[..., 48:, 32:] += 1  # the last patch of the right column
    before, after = (model.patch_embed(x) for x in (images, changed))
    moved = (before - after).abs().amax(2)[0]
    assert moved[-1] == moved.max() > 0


@each_stem
def test_rgb_weights_inflate_to_other_channels(stem, tmp_path):
    """By the rule of each stem, so that grey images give the features that they gave as RGB."""
    model, path = build(**stem).eval(), tmp_path / "rgb.safetensors"
    save_backbone(model, path)
    grey = torch.randn(2, 1, 32, 32)
    for channels in (1, 5):
        other = load_backbone(path, channels=channels, verbose=False)
        assert other.channels == channels
        assert_close_to_scale(
            other(grey.expand(-1, channels, -1, -1)), model(grey.expand(-1, 3, -1, -1)), 1e-4
        )
