"""Stems, which turn images into patch tokens: (B, C, H, W) -> (B, N, D).

b batch, c channels, h w grid, p q height and width of a patch, d token width
"""

from collections import OrderedDict
from itertools import pairwise

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from dino_vit.config.sections import GROUPS, REDUCTION
from dino_vit.core import Size

FIRST_KERNEL = {
    "patch": "patch_embed.proj.weight",
    "conv": "patch_embed.backbone.0.conv.weight",
    "hybrid": "patch_embed.backbone.stem.conv.weight",
}


class UnfoldedConv(nn.Conv2d):
    """A convolution whose stride is its kernel, as one product of unfolded patches: -> (B, N, D).

    On a CPU in bfloat16 it takes a fourth of the time of the convolution (`benchmarks/TRIED.md`).
    """

    def forward(self, images: Tensor) -> Tensor:
        (p, q), device, dtype = self.kernel_size, images.device.type, images.dtype
        if torch.is_autocast_enabled(device) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device)
        patches = rearrange(images, "b c (h p) (w q) -> b h w c p q", p=p, q=q)
        patches = patches.to(dtype, memory_format=torch.contiguous_format)  # unfolded and cast by one kernel
        flat = rearrange(patches, "b h w c p q -> b (h w) (c p q)")
        return F.linear(flat, self.weight.flatten(1), self.bias)


class PatchStem(nn.Module):
    """Project patches, with weights that are stored as a convolution's."""

    def __init__(self, patch_size: Size, channels: int, width: int) -> None:
        super().__init__()
        self.proj = UnfoldedConv(channels, width, kernel_size=patch_size, stride=patch_size)

    def forward(self, images: Tensor) -> Tensor:
        tokens: Tensor = self.proj(images)
        return tokens


class ConvStem(nn.Module):
    """Convolutions of 3 × 3 and stride 2 down to the grid, each with a norm and GELU, then one of 1 × 1.

    Parameters are named as in timm's ConvStem with its GroupNorm1. Early convolutions make a ViT easier to
    optimise (Xiao et al., 2021). `conv_width` is that of the last one of 3 × 3.
    """

    def __init__(self, patch_size: Size, channels: int, width: int, conv_width: int) -> None:
        super().__init__()
        halvings = [side.bit_length() - 1 for side in patch_size]
        widths = [channels, *conv_widths(patch_size, conv_width)]
        self.backbone = nn.Sequential()
        for number, (before, after) in enumerate(pairwise(widths)):
            stride = [2 if number < count else 1 for count in halvings]
            conv = nn.Conv2d(before, after, 3, (stride[0], stride[1]), padding=1, bias=False)
            layers = OrderedDict(conv=conv, bn=nn.GroupNorm(1, after), act=nn.GELU())
            self.backbone.append(nn.Sequential(layers))
        self.backbone.append(nn.Sequential(OrderedDict(conv=nn.Conv2d(widths[-1], width, 1))))

    def forward(self, images: Tensor) -> Tensor:
        return rearrange(self.backbone(images), "b d h w -> b (h w) d")


def conv_widths(patch_size: Size, width: int) -> list[int]:
    """Return the channels after each convolution of stride 2 of a ConvStem: doubled up to the width."""
    count = max(patch_size).bit_length() - 1
    return [max(1, width >> (count - 1 - number)) for number in range(count)]


class HybridStem(nn.Module):
    """Project patches of the feature map of a ResNetV2, which has a stride of 16; named as in timm."""

    def __init__(
        self, patch_size: Size, channels: int, width: int, layers: tuple[int, ...], base_width: int
    ) -> None:
        super().__init__()
        self.backbone = ResNetV2(channels=channels, layers=layers, base_width=base_width)
        cells = patch_size[0] // REDUCTION, patch_size[1] // REDUCTION
        self.proj = nn.Conv2d(self.backbone.width, width, kernel_size=cells, stride=cells)

    def forward(self, images: Tensor) -> Tensor:
        return rearrange(self.proj(self.backbone(images)), "b d h w -> b (h w) d")


def inflate(kernel: Tensor, channels: int) -> Tensor:
    """Return the first kernel of a stem for other channels: each gets the mean kernel.

    It is scaled so that equal channels give the same output as before. In a hybrid stem the scale has no
    effect: its kernels are standardised, and a GroupNorm follows.
    """
    mean = kernel.mean(dim=1, keepdim=True) * (kernel.shape[1] / channels)
    return mean.expand(-1, channels, -1, -1).contiguous()


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
        self.norm = nn.GroupNorm(GROUPS, out_channels)

    def forward(self, x: Tensor) -> Tensor:
        normalised: Tensor = self.norm(self.conv(x))
        return normalised


class Bottleneck(nn.Module):
    """Convolutions of 1 × 1, 3 × 3 and 1 × 1 with a residual connection."""

    def __init__(self, *, in_width: int, out_width: int, stride: int) -> None:
        super().__init__()
        inner = out_width // 4
        changes = in_width != out_width or stride != 1
        self.downsample = ConvNorm(in_width, out_width, 1, stride) if changes else nn.Identity()
        self.conv1 = StandardizedConv(in_width, inner, 1)
        self.norm1 = nn.GroupNorm(GROUPS, inner)
        self.conv2 = StandardizedConv(inner, inner, 3, stride)
        self.norm2 = nn.GroupNorm(GROUPS, inner)
        self.conv3 = StandardizedConv(inner, out_width, 1)
        self.norm3 = nn.GroupNorm(GROUPS, out_width)

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
        features: Tensor = self.stages(F.max_pool2d(x, kernel_size=3, stride=2))
        return features
