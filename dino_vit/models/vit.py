"""The vision transformer: images of any size in, the CLS token or class logits out.

- learned positions, interpolated if the image is not of the trained size, or rotary ones
- any number of channels, images and patches that are not square
- registers, layer scale and gated MLPs, so that DINOv2's and DINOv3's weights load unchanged
- tokens and attention weights of any block, an optional classifier

Parameter names are those of the 2021 DINO code and of timm, so their weights load by name.
B batch, C channels, N patches, R registers, T = 1 + R + N tokens, D width
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dino_vit.config.constructors import takes
from dino_vit.config.settings import (
    BelowOne,
    Classes,
    Dimension,
    Few,
    FewOrZero,
    MlpRatio,
    NormEps,
    Positive,
    Rescale,
    Side,
)
from dino_vit.core import VIT_SIZES, height_width
from dino_vit.models.backbone import Backbone
from dino_vit.models.block import Block, draw_drop_path
from dino_vit.models.linear import Linear, init_linear
from dino_vit.models.positions import (
    Grid,
    PositionMode,
    Rotation,
    interpolate_pos_embs,
    rotary_positions,
)
from dino_vit.models.sequences import sequences_of_blocks

BLOCK_OPTIONS = "mlp_ratio", "mlp", "qkv_bias", "layer_scale", "norm_eps"
_BLOCK = re.compile(r"blocks\.(\d+)\.")
# In the metadata of earlier files; without effect on the features, or the tensors show it.
FORMER_ARGUMENTS = ("stem", "resnet_layers", "resnet_width", "dropout", "attention_dropout")


@dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """The keywords of a `VisionTransformer`, which its files of weights record."""

    image_size: Side = 224  # that positions are for; images of any other size are taken too
    patch_size: Side = 16
    channels: Dimension = 3
    width: Dimension = 384
    depth: Few = 12
    heads: Few = 6
    mlp_ratio: MlpRatio = 4.0
    mlp: Literal["gelu", "swiglu"] = "gelu"
    num_classes: Classes = 0  # 0: CLS features instead of class logits
    positions: Literal["learned", "rotary"] = "learned"
    rotary_rescale: Rescale | None = None
    position_mode: PositionMode = "hf"
    registers: FewOrZero = 0
    mask_token: bool = False
    qkv_bias: bool = True
    key_bias: bool | None = None  # None: unless positions are rotary, as in DINOv3's released weights
    layer_scale: Positive | None = None
    norm_eps: NormEps = 1e-6
    drop_path: BelowOne = 0.0
    drop_path_schedule: Literal["linear", "uniform"] = "linear"
    init_std: Positive = 0.02

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width={self.width} is not divisible by heads={self.heads}")
        if self.positions == "rotary" and self.width // self.heads % 4:
            text = "positions='rotary' needs a multiple of 4 channels in a head"
            raise ValueError(f"{text}, not {self.width // self.heads}")


class PatchEmbed(nn.Module):
    """Project patches with a convolution whose stride is its kernel size: (B, C, H, W) -> (B, N, D)."""

    def __init__(self, *, patch_size: Grid, channels: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, width, kernel_size=patch_size, stride=patch_size)

    def forward(self, images: Tensor) -> Tensor:
        return rearrange(self.proj(images), "b d h w -> b (h w) d")


class VisionTransformer(Backbone):
    """A pre-norm vision transformer: images (B, C, H, W) in, CLS features (B, D) or class logits out."""

    config: ViTConfig

    @takes(ViTConfig)
    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config, self.grad_checkpointing = config, False
        self.image_size, self.patch_size = height_width(config.image_size), height_width(config.patch_size)
        self.channels, self.width = config.channels, config.width
        self.depth, self.heads, self.registers = config.depth, config.heads, config.registers
        self.position_mode, self.rotary = config.position_mode, config.positions == "rotary"
        self.trained_grid = self.grid_of(*self.image_size)
        self._matrices: dict[Any, Tensor] = {}  # that resample positions

        width, count = self.width, 1 + math.prod(self.trained_grid)
        self.patch_embed = PatchEmbed(patch_size=self.patch_size, channels=self.channels, width=width)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = None if self.rotary else nn.Parameter(torch.zeros(1, count, width))
        registers = nn.Parameter(torch.zeros(1, self.registers, width)) if self.registers else None
        self.register_tokens = registers
        self.mask_token = nn.Parameter(torch.zeros(1, width)) if config.mask_token else None
        last, uniform = max(self.depth - 1, 1), config.drop_path_schedule == "uniform"
        self.drop_path_rates = [config.drop_path * (1 if uniform else i / last) for i in range(self.depth)]
        options = {name: getattr(config, name) for name in BLOCK_OPTIONS}
        options["key_bias"] = not self.rotary if config.key_bias is None else config.key_bias
        self.blocks = nn.ModuleList(Block(width, self.heads, **options) for _ in range(self.depth))
        self.norm = nn.LayerNorm(width, eps=config.norm_eps)
        self.head = Linear(width, config.num_classes) if config.num_classes else nn.Identity()
        self.init_weights()

    def layers(self) -> dict[str, int]:
        """Return the layer of each parameter: 0 before the blocks, i + 1 for block i, then depth + 1."""
        layers, outside = {}, 0
        for name, _ in self.named_parameters():
            block = _BLOCK.match(name)
            outside = self.depth + 1 if block else outside
            layers[name] = int(block[1]) + 1 if block else outside
        return layers

    def init_weights(self) -> None:
        """Initialise linear layers and tokens from truncated normals; convolutions keep PyTorch's default."""
        for tokens in (self.cls_token, self.pos_embed, self.register_tokens):
            if tokens is not None:
                nn.init.trunc_normal_(tokens, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                init_linear(module, self.config.init_std)

    def forward_cls(self, images: Tensor) -> Tensor:
        """Return the CLS token after the final LayerNorm, (B, D); the last block computes no other token."""
        x = self.embed_patches(images)
        for block, sequences, drop in self._passes(x, images, only_cls=True):
            x = self.run(block, x, sequences, drop)
        return self.norm(x)[:, 0]

    def forward_features(self, images: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return all tokens after the final LayerNorm, (B, 1 + R + N, D), CLS first.

        The mask token replaces the patches that are masked (B, N).
        """
        x = self.embed_patches(images, mask)
        for block, sequences, drop in self._passes(x, images):
            x = self.run(block, x, sequences, drop)
        return self.norm(x)

    def get_intermediate_layers(self, images: Tensor, blocks: int | Sequence[int] = 1) -> list[Tensor]:
        """Return the tokens of the last n blocks, or of the given blocks, after the final LayerNorm."""
        wanted = self._block_indices(range(-blocks, 0) if isinstance(blocks, int) else blocks)
        x, taken = self.embed_patches(images), {}
        for index, (block, sequences, drop) in enumerate(self._passes(x, images)):
            x = self.run(block, x, sequences, drop)
            if index in wanted:
                taken[index] = self.norm(x)
        return [taken[index] for index in wanted]

    def _passes(self, x: Tensor, images: Tensor, *, only_cls: bool = False) -> Iterator[tuple[Any, ...]]:
        """Return each block, what is in its sequences, and what stochastic depth drops of it in training."""
        of_blocks = sequences_of_blocks([(x.shape[0], x.shape[1])], [self.rotations(images)], [only_cls])
        drops: Iterable[Tensor | None] = [None] * self.depth
        if self.training and any(self.drop_path_rates):
            drops = draw_drop_path(self.drop_path_rates, x.shape[0], x.device)
        return zip(self.blocks, of_blocks, drops, strict=True)

    def get_attention(
        self, images: Tensor, blocks: Sequence[int] | None = None, *, queries: slice = slice(None)
    ) -> list[Tensor]:
        """Return the attention weights of the given blocks, by default of all: (B, heads, queries, T) each.

        The tokens are CLS, the registers, then the patches row by row. `queries=slice(0, 1)` computes the row
        of the CLS token alone, so that large images fit into memory.
        """
        wanted = self._block_indices(range(self.depth) if blocks is None else blocks)
        x, taken = self.embed_patches(images), {}
        for index, (block, sequences, drop) in enumerate(self._passes(x, images)):
            if index in wanted:
                q, k, _ = block.attn.split(block.norm1(x), *sequences.rotations)
                taken[index] = block.attn.softmax(q[:, :, queries], k)
            if index < max(wanted):
                x = block(x, sequences, drop)
        return [taken[index] for index in wanted]

    def embed_patches(self, images: Tensor, mask: Tensor | None = None) -> Tensor:
        """Turn images into the tokens that enter the first block, (B, 1 + R + N, D).

        The mask token replaces the patches that are masked (B, N).
        """
        if images.ndim != 4 or images.shape[1] != self.channels:
            raise ValueError(
                f"expected images (batch, {self.channels}, height, width), but got {tuple(images.shape)}"
            )
        grid = self.grid_of(*images.shape[-2:])
        patches = self.patch_embed(images)
        if mask is not None:
            assert self.mask_token is not None, "masks need VisionTransformer(mask_token=True)"
            patches = torch.where(mask[..., None], self.mask_token.to(patches.dtype), patches)
        cls: Tensor = self.cls_token
        if self.pos_embed is not None:
            positions = self.interpolate_pos_embs(grid)
            cls, patches = cls + positions[:, :1], patches + positions[:, 1:]
        patches = patches.to(cls.dtype)  # the sums of residuals stay in float32 under autocast
        count = images.shape[0]  # len() would fix the batch size of an exported graph
        parts = [cls.expand(count, -1, -1), patches]
        if self.register_tokens is not None:
            parts.insert(1, self.register_tokens.expand(count, -1, -1))
        return torch.cat(parts, dim=1)

    def interpolate_pos_embs(self, grid: Grid) -> Tensor:
        """Return the position embeddings, CLS first, for a grid of (h, w) patches: (1, 1 + h·w, D)."""
        assert self.pos_embed is not None, "rotary positions have no embeddings"
        keywords: Any = {"trained_grid": self.trained_grid, "mode": self.position_mode}
        return interpolate_pos_embs(self.pos_embed, grid, **keywords, matrices=self._matrices)

    def rotations(self, images: Tensor) -> Sequence[Rotation | None]:
        """Return the rotation of each patch of images of this size for each block, if there are any.

        In training a block's coordinates are rescaled by a random factor from 1 / rotary_rescale to
        rotary_rescale, another for each block as in DINOv3.
        """
        if not self.rotary:
            return [None] * self.depth
        scale = torch.ones(1, 1, 1, device=images.device)
        if self.training and self.config.rotary_rescale:
            reach = math.log(self.config.rotary_rescale)
            scale = scale.new_empty(self.depth, 1, 1).uniform_(-reach, reach).exp()
        with torch.autocast(images.device.type, enabled=False):
            channels = self.width // self.heads
            rotation = rotary_positions(self.grid_of(*images.shape[-2:]), channels, scale=scale)
        return list(zip(*(part.expand(self.depth, -1, -1) for part in rotation), strict=True))

    def grid_of(self, height: int, width: int) -> Grid:
        """Return the grid of patches (h, w) of an image of this size."""
        if height % self.patch_size[0] or width % self.patch_size[1] or not height or not width:
            raise ValueError(
                f"an image of {height} × {width} pixels cannot be divided into patches of "
                f"{self.patch_size[0]} × {self.patch_size[1]}; resize, crop or pad it to a multiple"
            )
        return height // self.patch_size[0], width // self.patch_size[1]

    def run(self, block: Callable[..., Tensor], x: Tensor, *options: Any) -> Tensor:
        """Run a block, with activation checkpointing if it is enabled."""
        if self.grad_checkpointing and torch.is_grad_enabled():
            return checkpoint(block, x, *options, use_reentrant=False)
        return block(x, *options)

    def _block_indices(self, blocks: Sequence[int]) -> list[int]:
        outside = [index for index in blocks if not -self.depth <= index < self.depth]
        if outside or not blocks:
            raise ValueError(
                f"blocks {outside or '()'} do not exist: this backbone has blocks 0 to {self.depth - 1}; "
                "negative numbers count from the last"
            )
        return [index % self.depth for index in blocks]


def current_arguments(architecture: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments in the metadata of a file without those that a VisionTransformer had earlier."""
    arguments = {name: value for name, value in architecture.items() if name not in FORMER_ARGUMENTS}
    if arguments.get("qk_scale") is None:
        arguments.pop("qk_scale", None)
    return arguments


vit_tiny = partial(VisionTransformer, **VIT_SIZES["vit_tiny"])
"""ViT-Ti/16: width 192, 12 blocks, 3 heads. Keywords are those of VisionTransformer."""
vit_small = partial(VisionTransformer, **VIT_SIZES["vit_small"])
"""ViT-S/16: width 384, 12 blocks, 6 heads. Keywords are those of VisionTransformer."""
vit_base = partial(VisionTransformer, **VIT_SIZES["vit_base"])
"""ViT-B/16: width 768, 12 blocks, 12 heads. Keywords are those of VisionTransformer."""
vit_large = partial(VisionTransformer, **VIT_SIZES["vit_large"])
"""ViT-L/16: width 1024, 24 blocks, 16 heads. Keywords are those of VisionTransformer."""
vit_huge = partial(VisionTransformer, **VIT_SIZES["vit_huge"])
"""ViT-H/14: width 1280, 32 blocks, 16 heads. Keywords are those of VisionTransformer."""
