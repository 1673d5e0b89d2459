"""Stems, which turn an image into patch tokens, (B, C, H, W) -> (B, N, D).

b batch, c channels, h w grid, p q patch height and width, d token width
"""

from functools import partial
from typing import Any

from einops import rearrange
from torch import Tensor, nn

from dino_vit.core import Size

REDUCTION = 16  # stride of the ResNet's feature map


class ConvStem(nn.Module):
    """Project patches with a convolution whose stride is its kernel size."""

    def __init__(self, *, patch_size: Size, channels: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, width, kernel_size=patch_size, stride=patch_size)

    def forward(self, images: Tensor) -> Tensor:
        return rearrange(self.proj(images), "b d h w -> b (h w) d")


class UnfoldStem(nn.Module):
    """Unfold patches and project them with a linear layer; equals `ConvStem` with a flattened kernel."""

    def __init__(self, *, patch_size: Size, channels: int, width: int) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.proj = nn.Linear(channels * patch_size[0] * patch_size[1], width)

    def forward(self, images: Tensor) -> Tensor:
        p, q = self.patch_size
        return self.proj(rearrange(images, "b c (h p) (w q) -> b (h w) (c p q)", p=p, q=q))


class HybridStem(nn.Module):
    """Project patches of the feature map of a ResNetV2, which has a stride of 16."""

    def __init__(
        self, *, patch_size: Size, channels: int, width: int, layers: tuple[int, ...], base_width: int
    ) -> None:
        super().__init__()
        if patch_size[0] % REDUCTION or patch_size[1] % REDUCTION:
            raise ValueError(f"patch_size={patch_size} must be a multiple of {REDUCTION} for stem='hybrid'")
        self.backbone = _resnet(channels, layers, base_width)
        cells = (patch_size[0] // REDUCTION, patch_size[1] // REDUCTION)
        self.proj = nn.Conv2d(self.backbone.num_features, width, kernel_size=cells, stride=cells)

    def forward(self, images: Tensor) -> Tensor:
        return rearrange(self.proj(self.backbone(images)), "b d h w -> b (h w) d")


def _resnet(channels: int, layers: tuple[int, ...], base_width: int) -> Any:
    """Return the first three stages of timm's ResNetV2, initialised as PyTorch's layers are."""
    try:
        from timm.layers import StdConv2dSame
        from timm.models.resnetv2 import ResNetV2
    except ImportError as error:
        raise ValueError("stem='hybrid' is built by timm: pip install 'dino-vit[timm]'") from error
    resnet = ResNetV2(
        layers=layers,
        channels=tuple(base_width * 4 * 2**stage for stage in range(len(layers))),
        num_classes=0,
        in_chans=channels,
        global_pool="",
        stem_chs=base_width,
        stem_type="same",
        preact=False,
        conv_layer=partial(StdConv2dSame, eps=1e-8),
    )
    for module in resnet.modules():
        if isinstance(module, nn.Conv2d | nn.GroupNorm):
            module.reset_parameters()
    return resnet


STEMS: dict[str, type[nn.Module]] = {"conv": ConvStem, "unfold": UnfoldStem, "hybrid": HybridStem}
