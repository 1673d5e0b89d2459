"""Small models of other libraries with random weights, and the features that they themselves give."""

from collections.abc import Callable
from dataclasses import dataclass

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

WIDTH, DEPTH, HEADS, SIZE, PATCH = 32, 3, 2, 32, 8
HF = {
    "hidden_size": WIDTH,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": HEADS,
    "image_size": SIZE,
    "patch_size": PATCH,
}


@dataclass
class Peer:
    model: nn.Module
    tokens: Callable[[Tensor], Tensor]
    resizes: bool = True

    def __post_init__(self) -> None:
        """Give every parameter a value of its own, so that a lost or swapped one shows."""
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


def timm_dinov2_registers() -> Peer:
    return timm_vit(init_values=1e-5, reg_tokens=4, no_embed_class=True, num_classes=0)


def torchvision_vit() -> Peer:
    model = TorchvisionTransformer(SIZE, PATCH, DEPTH, HEADS, WIDTH, 4 * WIDTH, num_classes=5)

    def tokens(images: Tensor) -> Tensor:
        patches = model._process_input(images)
        return model.encoder(torch.cat((model.class_token.expand(len(images), -1, -1), patches), dim=1))

    return Peer(model, tokens, resizes=False)


def huggingface_vit() -> Peer:
    model = ViTModel(ViTConfig(**HF, intermediate_size=4 * WIDTH), add_pooling_layer=False)
    return Peer(model, lambda images: model(images, interpolate_pos_encoding=True).last_hidden_state)


def huggingface_dinov2(**keywords) -> Peer:
    model = Dinov2Model(Dinov2Config(**HF, **keywords))
    return Peer(model, lambda images: model(images).last_hidden_state)


def huggingface_dinov2_gated() -> Peer:
    return huggingface_dinov2(use_swiglu_ffn=True)


def huggingface_dinov2_registers() -> Peer:
    model = Dinov2WithRegistersModel(Dinov2WithRegistersConfig(**HF))
    return Peer(model, lambda images: model(images).last_hidden_state)


PEERS = {
    "timm": timm_vit,
    "timm-dinov2-registers": timm_dinov2_registers,
    "torchvision": torchvision_vit,
    "huggingface-vit": huggingface_vit,
    "huggingface-dinov2": huggingface_dinov2,
    "huggingface-dinov2-gated": huggingface_dinov2_gated,
    "huggingface-dinov2-registers": huggingface_dinov2_registers,
}
