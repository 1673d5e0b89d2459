"""Stems, which turn an image into patch tokens, (B, C, H, W) -> (B, N, D).

b batch, c channels, h w grid, p q patch height and width, d token width
"""

from collections import OrderedDict
from itertools import pairwise

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from dino_vit.core import Size
from dino_vit.models.linear import Linear

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
        self.proj = Linear(channels * patch_size[0] * patch_size[1], width)

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
        self.backbone = ResNetV2(channels=channels, layers=layers, base_width=base_width)
        cells = (patch_size[0] // REDUCTION, patch_size[1] // REDUCTION)
        self.proj = nn.Conv2d(self.backbone.width, width, kernel_size=cells, stride=cells)

    def forward(self, images: Tensor) -> Tensor:
        return rearrange(self.proj(self.backbone(images)), "b d h w -> b (h w) d")


STEMS: dict[str, type[nn.Module]] = {"conv": ConvStem, "unfold": UnfoldStem, "hybrid": HybridStem}


def pad_same(x: Tensor, kernel: int, stride: int, value: float = 0.0) -> Tensor:
    """Pad as TensorFlow's "SAME", with an odd pixel at the bottom right."""
    pads: list[int] = []
    for size in (x.shape[-1], x.shape[-2]):
        total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
        pads += [total // 2, total - total // 2]
    return F.pad(x, pads, value=value) if any(pads) else x


class StandardizedConv(nn.Conv2d):
    """A convolution without bias and with kernels standardised to zero mean and unit variance."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> None:
        super().__init__(in_channels, out_channels, kernel, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        kernels = self.weight.flatten(1)
        weight = F.layer_norm(kernels, kernels.shape[1:], eps=1e-8).view_as(self.weight)
        x = pad_same(x, self.kernel_size[0], self.stride[0])
        return F.conv2d(x, weight, stride=self.stride)


class ConvNorm(nn.Module):
    """A standardised convolution and a group normalisation."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = StandardizedConv(in_channels, out_channels, kernel, stride)
        self.norm = nn.GroupNorm(32, out_channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


class Bottleneck(nn.Module):
    """Convolutions of 1 × 1, 3 × 3 and 1 × 1 with a residual connection."""

    def __init__(self, *, in_width: int, out_width: int, stride: int) -> None:
        super().__init__()
        inner = out_width // 4
        changes = in_width != out_width or stride != 1
        self.downsample = ConvNorm(in_width, out_width, 1, stride) if changes else nn.Identity()
        self.conv1 = StandardizedConv(in_width, inner, 1)
        self.norm1 = nn.GroupNorm(32, inner)
        self.conv2 = StandardizedConv(inner, inner, 3, stride)
        self.norm2 = nn.GroupNorm(32, inner)
        self.conv3 = StandardizedConv(inner, out_width, 1)
        self.norm3 = nn.GroupNorm(32, out_width)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.norm3(self.conv3(y)) + self.downsample(x))


class ResNetV2(nn.Module):
    """The first three stages of a ResNet V2: a feature map with a stride of 16."""

    def __init__(self, *, channels: int, layers: tuple[int, ...], base_width: int) -> None:
        super().__init__()
        widths = [base_width, *(base_width * 4 * 2**stage for stage in range(3))]
        self.width = widths[-1]
        self.stem = ConvNorm(channels, base_width, 7, 2)
        self.stages = nn.Sequential()
        for stage, (depth, (in_width, out_width)) in enumerate(zip(layers, pairwise(widths), strict=True)):
            blocks = [Bottleneck(in_width=in_width, out_width=out_width, stride=2 if stage else 1)]
            for _ in range(depth - 1):
                blocks.append(Bottleneck(in_width=out_width, out_width=out_width, stride=1))
            self.stages.append(nn.Sequential(OrderedDict(blocks=nn.Sequential(*blocks))))  # timm's names

    def forward(self, images: Tensor) -> Tensor:
        x = pad_same(F.relu(self.stem(images)), kernel=3, stride=2, value=float("-inf"))
        x = F.max_pool2d(x, kernel_size=3, stride=2)
        return self.stages(x)
