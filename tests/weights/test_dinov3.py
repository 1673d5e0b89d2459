"""DINOv3's backbone: rotary positions as in timm and transformers, its three layouts read, two written."""

import math
from dataclasses import replace

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch.testing import assert_close
from transformers import AutoModel, DINOv3ViTConfig, DINOv3ViTModel

from dino_vit import VisionTransformer, export_backbone, load_backbone
from dino_vit.models.positions import rotary_positions, rotate
from dino_vit.weights import WeightsError
from dino_vit.weights.loading import _translate
from dino_vit.weights.read_file import RawWeights
from dino_vit.weights.recognition import infer_architecture, recognise
from tests.support.close import assert_close_to_scale

SMALL = {"image_size": 64, "patch_size": 16, "width": 128, "depth": 2, "heads": 2}
ROTARY = {**SMALL, "positions": "rotary", "registers": 4, "layer_scale": 1e-5, "norm_eps": 1e-5}
IMAGES = [
    torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0)) for size in ((64, 64), (96, 48))
]

KINDS = {
    "mlp": {},
    "gated": {"use_gated_mlp": True, "hidden_act": "silu"},
    "key bias": {"key_bias": True},
    "no registers": {"num_register_tokens": 0},
}


@pytest.fixture
def huggingface(request):
    """A model with random weights that count, registers and layer scales too."""
    torch.manual_seed(0)
    settings = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "image_size": 64}
    settings |= {"num_attention_heads": 2, "num_register_tokens": 4}
    settings |= KINDS[getattr(request, "param", "mlp")]
    return with_values(DINOv3ViTModel(DINOv3ViTConfig(**settings)).eval())


def with_values(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.1 * torch.randn_like(parameter))
    return model


def tokens_of(model, images):
    with torch.no_grad():
        return model.eval().forward_features(images)


def original(model):
    """Return the weights of a Hugging Face model as DINOv3's own code names them."""
    tensors, periods = model.state_dict(), (100 ** (torch.arange(16) / 16)).bfloat16()
    found = {"rope_embed.periods": periods, "mask_token": torch.zeros(1, 128)}
    for name, tensor in tensors.items():
        theirs = name.removeprefix("model.")
        for old, new in (
            ("embeddings.cls_token", "cls_token"),
            ("embeddings.register_tokens", "storage_tokens"),
            ("embeddings.patch_embeddings", "patch_embed.proj"),
            ("layer.", "blocks."),
            ("attention.o_proj", "attn.proj"),
            ("layer_scale1.lambda1", "ls1.gamma"),
            ("layer_scale2.lambda1", "ls2.gamma"),
            ("mlp.gate_proj", "mlp.w1"),
            ("mlp.up_proj", "mlp.w2" if model.config.use_gated_mlp else "mlp.fc1"),
            ("mlp.down_proj", "mlp.w3" if model.config.use_gated_mlp else "mlp.fc2"),
        ):
            theirs = theirs.replace(old, new)
        if not any(part in theirs for part in ("_proj", "mask_token")):
            found[theirs] = tensor
    for block in range(2):
        prefix = f"model.layer.{block}.attention"
        q, k, v = (tensors.get(f"{prefix}.{part}_proj.bias") for part in "qkv")
        if k is None:  # it is masked, whatever it is
            k, ones = torch.randn_like(q), torch.ones(128)
            found[f"blocks.{block}.attn.qkv.bias_mask"] = torch.cat([ones, 0 * ones, ones])
        found[f"blocks.{block}.attn.qkv.bias"] = torch.cat([q, k, v])
        weights = [tensors[f"{prefix}.{part}_proj.weight"] for part in "qkv"]
        found[f"blocks.{block}.attn.qkv.weight"] = torch.cat(weights)
    return found


def test_rotations_are_those_of_the_formula():
    """Patch by patch and channel by channel; the tokens before the patches stay."""
    q = torch.randn(1, 1, 7, 8, dtype=torch.float64)
    cosines, sines = rotary_positions((2, 3), 8, scale=torch.tensor([1.3]))
    rotated = rotate(q, (cosines.double(), sines.double()))
    assert torch.equal(rotated[:, :, 0], q[:, :, 0])
    for patch in range(6):
        row, column = divmod(patch, 3)
        x, y = (2 * (column + 0.5) / 3 - 1) * 1.3, (2 * (row + 0.5) / 2 - 1) * 1.3
        for pair, (coordinate, period) in enumerate(((y, 1), (y, 10), (x, 1), (x, 10))):
            angle = 2 * math.pi * coordinate / period
            first, second = q[0, 0, 1 + patch, pair], q[0, 0, 1 + patch, pair + 4]
            wanted = first * math.cos(angle) - second * math.sin(angle)
            assert_close(rotated[0, 0, 1 + patch, pair], wanted, rtol=0, atol=1e-5)
            wanted = second * math.cos(angle) + first * math.sin(angle)
            assert_close(rotated[0, 0, 1 + patch, pair + 4], wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("layout", "huggingface"),
    [
        ("folder", "mlp"),
        ("folder", "no registers"),
        ("file", "gated"),
        ("original", "gated"),
        ("original", "key bias"),
    ],
    indirect=["huggingface"],
)
def test_weights_of_transformers_and_of_dinov3_give_the_same_features(tmp_path, huggingface, layout):
    """At the trained size and at another, all tokens; and the attention."""
    if layout == "folder":
        huggingface.save_pretrained(tmp_path / "model")
        model = load_backbone(tmp_path / "model")
    else:
        tensors = original(huggingface) if layout == "original" else huggingface.state_dict()
        save_file({name: one.contiguous() for name, one in tensors.items()}, tmp_path / "a.safetensors")
        model = load_backbone(tmp_path / "a.safetensors", image_size=64, heads=2)
    config, architecture = huggingface.config, model.architecture
    assert (model.heads, model.registers) == (2, config.num_register_tokens)
    assert (architecture["positions"], bool(architecture["key_bias"])) == ("rotary", config.key_bias)
    assert model.provenance.format == ("dinov3" if layout == "original" else "huggingface")
    for images in IMAGES:
        with torch.no_grad():
            theirs = huggingface(images)
            assert_close_to_scale(tokens_of(model, images), theirs.last_hidden_state)
            assert_close_to_scale(model(images), theirs.last_hidden_state[:, 0])
    huggingface.set_attn_implementation("eager")
    with torch.no_grad():
        theirs = huggingface(IMAGES[1], output_attentions=True).attentions
        ours = model.get_attention(IMAGES[1])
    for one, other in zip(ours, theirs, strict=True):
        assert_close_to_scale(one, other)


@pytest.mark.parametrize("name", ["small_patch16_dinov3_qkvb", "small_plus_patch16_dinov3"])
def test_weights_of_timm_give_the_same_features(tmp_path, name):
    torch.manual_seed(0)
    peer = with_values(timm.create_model(f"vit_{name}", depth=2, num_classes=0).eval())
    save_file(peer.state_dict(), tmp_path / "a.safetensors")
    model = load_backbone(tmp_path / "a.safetensors")
    assert (model.heads, model.architecture["norm_eps"]) == (6, 1e-5)
    for size in ((224, 224), (96, 160)):
        images = torch.randn(2, 3, *size)
        assert_close_to_scale(tokens_of(model, images), tokens_of(peer, images))


# What a pretraining here gives, and what no tensor shows.
OTHERS = {"norm_eps": 1e-6, "registers": 0, "rotary_rescale": 1.5}


@pytest.mark.parametrize(("mlp", "changes"), [("gelu", {}), ("swiglu", OTHERS)], ids=["mlp", "gated"])
def test_exports_open_in_transformers_and_here(tmp_path, mlp, changes):
    torch.manual_seed(0)
    model = with_values(VisionTransformer(**{**ROTARY, **changes}, mlp=mlp)).eval()
    export_backbone(model, tmp_path / "vit", "huggingface")
    export_backbone(model, tmp_path / "vit.safetensors", "timm")  # which is compared with timm, too
    peer, loading = AutoModel.from_pretrained(tmp_path / "vit", output_loading_info=True)
    assert not any(loading.values()), "every tensor is there and none beside them"
    for images in IMAGES:
        with torch.no_grad():
            assert_close_to_scale(peer.eval()(images).last_hidden_state, tokens_of(model, images))
        for name in ("vit", "vit.safetensors"):
            again = load_backbone(tmp_path / name)
            assert again.architecture["rotary_rescale"] == model.architecture["rotary_rescale"]
            assert_close_to_scale(tokens_of(again, images), tokens_of(model, images))


def test_the_coordinates_are_rescaled_in_training_alone_for_each_block_anew():
    model, seen = with_values(VisionTransformer(**ROTARY, rotary_rescale=2.0)).train(), []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1].rotations[0][0]))
    torch.manual_seed(1)
    rescaled = model(IMAGES[0])
    assert not torch.equal(rescaled, model(IMAGES[0]))
    torch.manual_seed(1)
    assert torch.equal(rescaled, model(IMAGES[0]))
    evaluated = model.eval()(IMAGES[0])
    assert not torch.equal(*seen[:2])
    assert torch.equal(*seen[6:8])
    model.train().config = replace(model.config, rotary_rescale=None)
    assert torch.equal(model(IMAGES[0]), evaluated)


def test_rotated_keys_may_have_a_bias(tmp_path):
    model = with_values(VisionTransformer(**ROTARY, key_bias=True))
    before = tokens_of(model, IMAGES[0])
    model.blocks[0].attn.qkv.bias.data[128:256] += 1
    assert not torch.allclose(tokens_of(model, IMAGES[0]), before, atol=1e-3)
    with pytest.raises(WeightsError, match="timm format does not support key_bias=True"):
        export_backbone(model, tmp_path / "vit.pth", "timm")


def test_other_periods_are_refused(huggingface):
    tensors = original(huggingface)
    with pytest.raises(WeightsError, match="rotary positions of other periods"):
        load_backbone({**tensors, "rope_embed.periods": torch.full((16,), 5.0)}, heads=2)


@pytest.mark.parametrize(
    ("name", "heads", "mlp"),
    [
        ("huge_plus_patch16_dinov3", 20, "swiglu"),
        ("7b_patch16_dinov3", 32, "swiglu"),
    ],
)
def test_the_large_ones_are_recognised_by_their_shapes(name, heads, mlp):
    """Without memory for them: tensors on the meta device."""
    with torch.device("meta"):
        peer = timm.create_model(f"vit_{name}", num_classes=0)
    raw = RawWeights(peer.state_dict(), source="vit", sha256="")
    layout = recognise(raw)
    tensors, _ = _translate(raw, layout, set())
    architecture = infer_architecture(tensors, layout, raw, {})
    assert (architecture["heads"], architecture["mlp"]) == (heads, mlp)
    assert architecture["depth"] == len(peer.blocks)
    with torch.device("meta"):
        ours = VisionTransformer(**architecture).state_dict()
    assert {n: t.shape for n, t in ours.items()} == {n: t.shape for n, t in tensors.items()}
    assert peer.blocks[0].attn.num_heads == heads
