"""The five descriptions of a vision transformer that founded the project: a test for each of their lines.

Whatever else changes, none of these may leave. Beside them: that each works in a run that is interrupted, in
files, on a GPU as far as a rehearsal shows it, with any channels, and with images that are not square.
"""

import math
from functools import partial
from inspect import signature

import onnxruntime
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

from benchmarks.rehearsal import rehearsed_run
from dino_vit import VisionTransformer, WeightsError, export_backbone, load_backbone, save_backbone, vit_base
from dino_vit.cli import main
from dino_vit.config.settings import ConfigError
from dino_vit.models.block import attend
from dino_vit.models.multicrop import call_with_cast_weights
from dino_vit.models.vit import ViTConfig
from dino_vit.training.loop import take_step
from dino_vit.weights.card import usage
from tests.support.close import assert_close_to_scale
from tests.support.naive import attention_weights
from tests.support.runs import steps
from tests.support.training import assert_resumes_exactly, configured, opened, trained

TINY = {"image_size": 32, "patch_size": 8, "width": 32, "depth": 2, "heads": 2}
RESNET = {"stem": "hybrid", "patch_size": 16, "resnet_layers": (1, 2, 1), "resnet_width": 32}
# What the descriptions have beside the ViT that all of them share, as keywords.
PARTS = {
    "patches": {},
    "early convolutions": {"stem": "conv"},
    "a ResNet": RESNET,
    "sinusoidal positions": {"positions": "sinusoidal"},
    "another scale": {"qk_scale": 0.7},
    "dropouts": {"dropout": 0.2, "attention_dropout": 0.1},
    "stochastic depth": {"drop_path": 0.4},
}
each_part = pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
STEMS = {"patch": {}, "conv": {"stem": "conv"}, "hybrid": RESNET}
each_stem = pytest.mark.parametrize("stem", STEMS.values(), ids=STEMS)
OTHERS = {name: part for name, part in PARTS.items() if name != "patches"}
each_setting = pytest.mark.parametrize("part", OTHERS.values(), ids=OTHERS)


def build(**changes):
    return VisionTransformer(**{**TINY, **changes})


def as_settings(part):
    """Return keywords as settings of a run whose images suit all of them."""
    texts = {f"model.{name}": list(v) if isinstance(v, tuple) else v for name, v in part.items()}
    return {"data.source": "synthetic:64:64", "views.global_size": 64, "views.local_size": 32, **texts}


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
    model = load_backbone(peer.state_dict(), heads=2, trained_size=64, verbose=False)
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


@pytest.mark.parametrize("patch", [2, 8])
def test_the_stem_of_early_convolutions_is_timms(patch):
    """Its ConvStem with GroupNorm1: convolutions of stride 2, as the patch needs, then one of 1 x 1."""
    count = int(math.log2(patch))
    stem = ConvStem(
        depth=count + 1,
        channels=(*(32 >> number for number in reversed(range(count))), 32),
        kernel_size=(*[3] * count, 1),
        stride=(*[2] * count, 1),
        norm_layer=GroupNorm1,
        act_layer=nn.GELU,
    )
    peer = with_stem_of_timm(stem, proj=False)
    model = load_backbone(peer.state_dict(), heads=2, trained_size=64, verbose=False)
    assert (model.config.stem, model.patch_size) == ("conv", (patch, patch))
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


# All of them, wherever a network goes.


def test_every_part_is_a_keyword_and_a_setting_of_the_same_default():
    """So that a run, a file and Python say the same."""
    from dino_vit.config.sections import Model

    keywords = {name for part in PARTS.values() for name in part}
    assert keywords <= signature(VisionTransformer).parameters.keys()
    for name in keywords - {"drop_path"}:  # that of a run is DINO's
        assert getattr(Model(), name) == getattr(ViTConfig, name)


@each_setting
def test_a_run_resumes_bit_for_bit(part, tmp_path):
    """Whatever is drawn is a function of the seed, the step and the part of the batch."""
    assert_resumes_exactly(tmp_path, {**as_settings(part), "budget.steps": 20})
    model = load_backbone(tmp_path / "run", network="student", verbose=False)
    dropping = ("drop_path", "dropout", "attention_dropout")  # of which what is saved has none
    stated = {name: value for name, value in part.items() if name not in (*dropping, "patch_size")}
    assert {name: getattr(model.config, name) for name in stated} == stated


@each_part
def test_files_hold_it(part, tmp_path):
    """And what is loaded gives the same features."""
    model = build(**part).eval()
    save_backbone(model, tmp_path / "vit.safetensors")
    loaded = load_backbone(tmp_path / "vit.safetensors", verbose=False)
    assert loaded.config == model.config
    assert loaded.pos_embed.requires_grad == model.pos_embed.requires_grad
    images = torch.randn(2, 3, 32, 48)
    assert torch.equal(loaded(images), model(images))


@each_part
def test_another_file_gives_the_features_or_is_refused_by_name(part, tmp_path):
    """timm holds every stem, DINO's own format only patches; no other library has qk_scale."""
    torch.manual_seed(0)
    model = build(**part, image_size=64).eval() if "image_size" not in part else build(**part)
    scaled, stem = "qk_scale" in part, part.get("stem", "patch")
    refused = {"timm": "qk_scale" if scaled else None}
    for format in ("reference", "huggingface"):
        refused[format] = "qk_scale" if scaled else f"stem={stem}" if stem != "patch" else None
    images = torch.randn(2, 3, 64, 64)
    for format, fault in refused.items():
        path = tmp_path / (format if format == "huggingface" else f"{format}.safetensors")
        if fault:
            with pytest.raises(WeightsError, match=f"the {format} format does not support .*{fault}"):
                export_backbone(model, path, format)
        else:
            export_backbone(model, path, format)
            again = load_backbone(path, heads=2, verbose=False)
            assert_close_to_scale(again(images), model(images))
            assert again.config.positions == model.config.positions
    if not scaled:  # the lines that a user is given to open the file
        names = {"given": images}
        exec(
            usage(model, tmp_path / "timm.safetensors", "timm").replace("images = ...", "images = given"),
            names,
        )
        assert_close_to_scale(names["output"], model(images))


@each_part
def test_a_graph_holds_it(part, tmp_path):
    """ONNX has all parts, and ONNX Runtime computes them."""
    model = build(**part, image_size=64).eval()
    export_backbone(model, tmp_path / "vit.onnx", "onnx")
    images = torch.randn(3, 3, 64, 64)
    cls, _ = onnxruntime.InferenceSession(tmp_path / "vit.onnx").run(None, {"images": images.numpy()})
    with torch.no_grad():
        assert_close_to_scale(torch.from_numpy(cls), model(images), 1e-4)


@each_setting
def test_a_step_on_a_gpu_waits_for_nothing(part, tmp_path):
    """As far as a rehearsal shows it: it raises where the host would wait, or where devices mix."""
    settings = {**as_settings(part), "run.precision": "bf16", "run.log_every": 1000, "budget.steps": 100}
    with rehearsed_run(configured(tmp_path, settings)) as (rehearsal, state):
        rehearsal.restart()
        take_step(state, state.loader.batches())
        assert rehearsal.by_part["backward"] > 100


@each_part
def test_the_weights_of_a_block_may_be_cast_together(part):
    """Under autocast, as training does."""
    model = build(**part).eval()
    x = model.embed_patches(torch.randn(2, 3, 32, 32))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(call_with_cast_weights(model.blocks[0], x), model.blocks[0](x))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"stem": "conv", "patch_size": 12}, r"stem=conv .*2, 4, 8, \.\.\., not (model\.)?patch_size=12"),
        ({"stem": "hybrid", "patch_size": 8}, r"stem=hybrid needs patches of 16, 32, \.\.\., not"),
        ({**RESNET, "resnet_width": 48}, "resnet_width=48 must be a multiple of 32"),
    ],
)
def test_what_no_stem_has_is_a_sentence(settings, said, tmp_path):
    """From the constructor and from the settings."""
    with pytest.raises(ValueError, match=said):
        build(**settings)
    with pytest.raises(ConfigError, match=said):
        configured(tmp_path, as_settings(settings))


def test_settings_of_a_resnet_without_one_are_refused(tmp_path):
    """An option that would do nothing."""
    with pytest.raises(ConfigError, match=r"model\.resnet_width is about the ResNet of model\.stem=hybrid"):
        configured(tmp_path, {"model.resnet_width": 32})


@pytest.mark.parametrize("part", [{}, {"stem": "conv"}, RESNET], ids=["patches", "conv", "hybrid"])
def test_a_run_that_began_from_weights_resumes_by_its_own_settings(part, tmp_path):
    """By its config.yaml, which states all of them."""
    save_backbone(build(**part), tmp_path / "vit.safetensors")
    settings = {**as_settings(part), "init.weights": tmp_path / "vit.safetensors", "init.head_epochs": 0.5}
    settings |= {"budget.steps": 10}
    trained(tmp_path / "run", settings)
    sorted((tmp_path / "run" / "checkpoints").glob("*.safetensors"))[-1].unlink()
    command = ["pretrain", "--config", str(tmp_path / "run" / "config.yaml")]
    assert main(command) == 0
    assert steps(tmp_path / "run")[-1] == 10


def test_training_goes_on_from_weights_with_another_stem(tmp_path):
    """Of which the run takes over what the settings do not say, and refuses what they contradict."""
    save_backbone(build(stem="conv", positions="sinusoidal", qk_scale=0.7), tmp_path / "vit.safetensors")
    settings = {"init.weights": tmp_path / "vit.safetensors", "init.head_epochs": 0.5}
    state = opened(tmp_path / "run", settings).state
    model = state.config.model
    assert (model.stem, model.positions, model.qk_scale) == ("conv", "sinusoidal", 0.7)
    assert state.student.backbone.config.qk_scale == 0.7
    with pytest.raises(ValueError, match=r"model\.stem=patch .*does not match init\.weights"):
        opened(tmp_path / "other", {**settings, "model.stem": "patch"})
