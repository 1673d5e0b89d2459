"""Small models of other libraries with random weights, and the features that they themselves give."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from timm.models.vision_transformer import VisionTransformer as TimmTransformer
from torch import Tensor, nn
from torchvision.models import VisionTransformer as TorchvisionTransformer
from transformers import (
    Dinov2Config,
    Dinov2Model,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    ViTConfig,
    ViTModel,
)

from tests.support.close import assert_close_to_scale

WIDTH, DEPTH, HEADS, SIZE, PATCH = 32, 3, 2, 32, 8
HF = {
    "hidden_size": WIDTH,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": HEADS,
    "image_size": SIZE,
    "patch_size": PATCH,
}
HF_VIT = {**HF, "intermediate_size": 4 * WIDTH}


@dataclass
class Peer:
    model: nn.Module
    tokens: Callable[[Tensor], Tensor]
    resizes: bool = True

    def __post_init__(self) -> None:
        """Give every parameter a value of its own, so that a missing or swapped one shows."""
        for parameter in self.model.parameters():
            nn.init.normal_(parameter, std=0.1)
        self.model.eval()


def timm_vit(**keywords) -> Peer:
    model = TimmTransformer(
        img_size=SIZE,
        patch_size=PATCH,
        embed_dim=WIDTH,
        depth=DEPTH,
        num_heads=HEADS,
        dynamic_img_size=True,
        **{"num_classes": 5, **keywords},
    )
    return Peer(model, model.forward_features)


def torchvision_vit() -> Peer:
    model = TorchvisionTransformer(SIZE, PATCH, DEPTH, HEADS, WIDTH, 4 * WIDTH, num_classes=5)

    def tokens(images: Tensor) -> Tensor:
        patches = model._process_input(images)
        return model.encoder(torch.cat((model.class_token.expand(len(images), -1, -1), patches), dim=1))

    return Peer(model, tokens, resizes=False)


def huggingface(model: nn.Module) -> Peer:
    """Return a ViT of transformers, which resamples positions if asked to, or a Dinov2, which always does."""
    asked = {"interpolate_pos_encoding": True} if isinstance(model, ViTModel) else {}
    return Peer(model, lambda images: model(images, **asked).last_hidden_state)


PEERS = {
    "timm": timm_vit,
    "timm-dinov2-registers": partial(
        timm_vit, init_values=1e-5, reg_tokens=4, no_embed_class=True, num_classes=0
    ),
    "torchvision": torchvision_vit,
    "huggingface-vit": lambda: huggingface(ViTModel(ViTConfig(**HF_VIT), add_pooling_layer=False)),
    "huggingface-dinov2": lambda: huggingface(Dinov2Model(Dinov2Config(**HF))),
    "huggingface-dinov2-gated": lambda: huggingface(Dinov2Model(Dinov2Config(**HF, use_swiglu_ffn=True))),
    "huggingface-dinov2-registers": lambda: huggingface(
        Dinov2WithRegistersModel(Dinov2WithRegistersConfig(**HF))
    ),
}


def assert_same_tokens(model: nn.Module, peer: Peer) -> None:
    """Compare tokens at the trained size and, where the peer takes others, at a larger and an oblong one."""
    sizes = [(SIZE, SIZE), (SIZE + 2 * PATCH, SIZE + 2 * PATCH), (2 * PATCH, SIZE + PATCH)]
    for size in sizes if peer.resizes else sizes[:1]:
        images = torch.randn(2, 3, *size)
        with torch.no_grad():
            ours, theirs = model.forward_features(images), peer.tokens(images)
        assert_close_to_scale(ours, theirs)
