"""The vision transformer: images of any size in, the CLS token or class logits out.

- unfolded patches, early convolutions or a ResNet as stem; any channels, oblong images and patches
- learned or sinusoidal positions, interpolated if the image is not of the trained size, or rotary ones
- registers, layer scale and gated MLPs, so that DINOv2's and DINOv3's weights load unchanged
- stochastic depth, dropouts, another scale of attention
- tokens and attention weights of any block, an optional classifier

Parameter names are those of the 2021 DINO code and of timm, so their weights load by name.
B batch, C channels, N patches, R registers, T = 1 + R + N tokens, D width
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from inspect import signature
from typing import Any, Literal

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dino_vit.config import settings
from dino_vit.config.constructors import build
from dino_vit.config.sections import Stem, stem_problem
from dino_vit.core import VIT_SIZES, height_width
from dino_vit.models import positions
from dino_vit.models.backbone import Backbone
from dino_vit.models.block import Block
from dino_vit.models.layers import dropout, init_linear
from dino_vit.models.positions import Grid, PositionMode, Rotation
from dino_vit.models.sequences import sample_drop_path, sequences_by_block
from dino_vit.models.stems import ConvStem, HybridStem, PatchStem

BLOCK_KEYWORDS = ["mlp_ratio", "mlp", "qkv_bias", "qk_scale", "layer_scale", "norm_eps"]
BLOCK_KEYWORDS += ["dropout", "attention_dropout"]


@dataclass(kw_only=True, config=settings.STRICT)
class ViTConfig:
    """The keywords of a `VisionTransformer`, which its files of weights record."""

    image_size: settings.Side = 224  # that positions are for; images of any other size are taken too
    patch_size: settings.Side = 16
    channels: settings.Dimension = 3
    width: settings.Dimension = 384
    depth: settings.Few = 12
    heads: settings.Few = 6
    mlp_ratio: settings.MlpRatio = 4.0
    mlp: Literal["gelu", "swiglu"] = "gelu"
    num_classes: settings.Classes = 0  # 0: CLS features instead of class logits
    stem: Stem = "patch"
    stem_width: settings.Dimension | None = None  # of the last 3 × 3 convolution of stem="conv"; None: width
    resnet_layers: settings.Stages = (3, 4, 9)  # of a hybrid stem: blocks in each stage
    resnet_width: settings.Dimension = 64
    positions: Literal["learned", "sinusoidal", "rotary"] = "learned"
    rotary_rescale: settings.Rescale | None = None
    position_mode: PositionMode = "hf"
    registers: settings.FewOrZero = 0
    mask_token: bool = False
    qkv_bias: bool = True
    key_bias: bool | None = None  # None: true, but false with rotary positions, as in DINOv3's weights
    qk_scale: settings.Positive | None = None  # None: 1 / sqrt(channels of a head)
    layer_scale: settings.Positive | None = None
    norm_eps: settings.NormEps = 1e-6
    dropout: settings.BelowOne = 0.0  # after positions, projections of attention, and both layers of an MLP
    attention_dropout: settings.BelowOne = 0.0
    drop_path: settings.BelowOne = 0.0
    drop_path_schedule: Literal["linear", "uniform"] = "linear"
    init_std: settings.Positive = 0.02

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width={self.width} is not divisible by heads={self.heads}")
        hidden = round(self.width * self.mlp_ratio)
        if not 1 <= hidden <= settings.WIDEST:
            text = f"mlp_ratio={self.mlp_ratio:g} makes MLPs of width {hidden:,} with width={self.width}"
            raise ValueError(f"{text}; they must have from 1 to {settings.WIDEST:,} channels")
        channels = self.width // self.heads
        if self.positions == "rotary" and channels % 4:
            raise ValueError(f"positions='rotary' needs a multiple of 4 channels in a head, not {channels}")
        if problem := stem_problem(self.stem, height_width(self.patch_size), self.resnet_width):
            raise ValueError(problem)


class VisionTransformer(Backbone):
    """A pre-norm vision transformer: images (B, C, H, W) in, CLS features (B, D) or class logits out."""

    config: ViTConfig
    __signature__ = signature(ViTConfig)

    def __init__(self, **keywords: Any) -> None:
        super().__init__()
        config = build(ViTConfig, keywords)
        self.config, self.grad_checkpointing = config, False
        self.image_size, self.patch_size = height_width(config.image_size), height_width(config.patch_size)
        self.channels, self.width, self.depth = config.channels, config.width, config.depth
        self.heads, self.registers, self.position_mode = config.heads, config.registers, config.position_mode
        self.rotary, self.trained_grid = config.positions == "rotary", self.grid_of(*self.image_size)
        self.matrices: dict[Any, Tensor] = {}  # that resample positions

        width, count = self.width, 1 + math.prod(self.trained_grid)
        shape = self.patch_size, self.channels, width
        if config.stem == "hybrid":
            stem: nn.Module = HybridStem(*shape, config.resnet_layers, config.resnet_width)
        else:
            stem = (
                ConvStem(*shape, config.stem_width or width) if config.stem == "conv" else PatchStem(*shape)
            )
        self.patch_embed = stem
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = None if self.rotary else nn.Parameter(torch.zeros(1, count, width))
        if config.positions == "sinusoidal":
            self.pos_embed = nn.Parameter(positions.sinusoidal_positions(count, width), requires_grad=False)
        self.register_tokens = nn.Parameter(torch.zeros(1, self.registers, width)) if self.registers else None
        self.mask_token = nn.Parameter(torch.zeros(1, width)) if config.mask_token else None
        last, uniform = max(self.depth - 1, 1), config.drop_path_schedule == "uniform"
        self.drop_path_rates = [config.drop_path * (1 if uniform else i / last) for i in range(self.depth)]
        options = {name: getattr(config, name) for name in BLOCK_KEYWORDS}
        options["key_bias"] = not self.rotary if config.key_bias is None else config.key_bias
        self.blocks = nn.ModuleList(Block(width, self.heads, **options) for _ in range(self.depth))
        self.norm = nn.LayerNorm(width, eps=config.norm_eps)
        self.head = nn.Linear(width, config.num_classes) if config.num_classes else nn.Identity()
        self.init_weights()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "matrices": {}}  # they are of one device

    def layers(self) -> dict[str, int]:
        """Return the layer of each parameter: 0 before the blocks, i + 1 for block i, then depth + 1."""
        layers, layer = {}, 0
        for name, _ in self.named_parameters():
            if name.startswith("blocks."):
                layer = 1 + int(name.split(".")[1])
            layers[name] = layer if not layer or name.startswith("blocks.") else self.depth + 1
        return layers

    def init_weights(self) -> None:
        """Initialise linear layers, CLS token, positions and registers from truncated normals."""
        for tokens in (self.cls_token, self.pos_embed, self.register_tokens):
            if tokens is not None and tokens.requires_grad:  # sinusoidal positions are fixed
                nn.init.trunc_normal_(tokens, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                init_linear(module, self.config.init_std)

    def forward_cls(self, images: Tensor) -> Tensor:
        """Return the CLS token after the final LayerNorm, (B, D); the last block gives no other token."""
        x = self.embed_patches(images)
        for block, sequences, drop in self._passes(x, images, only_cls=True):
            x = self.checkpointed(block, x, sequences, drop)
        return self.norm(x)[:, 0]

    def forward_features(self, images: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return all tokens after the final LayerNorm, (B, 1 + R + N, D); `mask` as in `embed_patches`."""
        x = self.embed_patches(images, mask)
        for block, sequences, drop in self._passes(x, images):
            x = self.checkpointed(block, x, sequences, drop)
        return self.norm(x)

    def get_intermediate_layers(self, images: Tensor, blocks: int | Sequence[int] = 1) -> list[Tensor]:
        """Return the tokens of the last n blocks, or of the given blocks, after the final LayerNorm."""
        wanted = self._block_indices(range(-blocks, 0) if isinstance(blocks, int) else blocks)
        x, taken = self.embed_patches(images), {}
        for index, (block, sequences, drop) in enumerate(self._passes(x, images)):
            x = self.checkpointed(block, x, sequences, drop)
            if index in wanted:
                taken[index] = self.norm(x)
        return [taken[index] for index in wanted]

    def _passes(self, x: Tensor, images: Tensor, *, only_cls: bool = False) -> Iterator[tuple[Any, ...]]:
        """Return each block, the sequences it gets, and what stochastic depth drops of it in training."""
        by_block = sequences_by_block([(x.shape[0], x.shape[1])], [self.rotations(images)], [only_cls])
        drops: Iterable[Tensor | None] = [None] * self.depth
        if self.training and any(self.drop_path_rates):
            drops = sample_drop_path(self.drop_path_rates, x.shape[0], x.device)
        return zip(self.blocks, by_block, drops, strict=True)

    def get_attention(
        self, images: Tensor, blocks: Sequence[int] | None = None, *, queries: slice = slice(None)
    ) -> list[Tensor]:
        """Return the attention weights of the given blocks, by default of all: (B, heads, queries, T) each.

        Blocks count from 0. The tokens are CLS, the registers, then the patches row by row.
        `queries=slice(0, 1)` computes the row of the CLS token alone, so that large images fit into memory.
        """
        wanted = self._block_indices(range(self.depth) if blocks is None else blocks)
        x, taken = self.embed_patches(images), {}
        for index, (block, sequences, drop) in enumerate(self._passes(x, images)):
            if index in wanted:
                ((q, k, _),) = block.attn.project(block.norm1(x), sequences)
                taken[index] = block.attn.softmax(q[:, :, queries], k)
            if index < max(wanted):
                x = block(x, sequences, drop)
        return [taken[index] for index in wanted]

    def embed_patches(self, images: Tensor, mask: Tensor | None = None) -> Tensor:
        """Turn images into the first block's tokens, (B, 1 + R + N, D); `mask` (B, N) hides patches."""
        if images.ndim != 4 or images.shape[1] != self.channels:
            expected = f"(batch, {self.channels}, height, width)"
            raise ValueError(f"expected images {expected}, but got {tuple(images.shape)}")
        grid = self.grid_of(*images.shape[-2:])
        patches = self.patch_embed(images)
        if mask is not None:
            if self.mask_token is None:
                raise ValueError("masks need VisionTransformer(mask_token=True)")
            patches = torch.where(mask[..., None], self.mask_token.to(patches.dtype), patches)
        count = images.shape[0]  # len() would fix the batch size of an exported graph
        # Under autocast this is float32, since the CLS token is, and so is the residual stream.
        x = torch.cat([self.cls_token.expand(count, -1, -1), patches], dim=1)
        if self.pos_embed is not None:
            x = x + self.interpolate_pos_embs(grid)
        if self.register_tokens is not None:
            x = torch.cat([x[:, :1], self.register_tokens.expand(count, -1, -1), x[:, 1:]], dim=1)
        return dropout(x, self.config.dropout, self.training)

    def interpolate_pos_embs(self, grid: Grid) -> Tensor:
        """Return the position embeddings, CLS first, for a grid of (h, w) patches: (1, 1 + h·w, D)."""
        assert self.pos_embed is not None, "rotary positions have no embeddings"
        trained, mode = self.trained_grid, self.position_mode
        return positions.interpolate_pos_embs(self.pos_embed, grid, trained, mode, self.matrices)

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
            grid, channels = self.grid_of(*images.shape[-2:]), self.width // self.heads
            rotation = positions.rotary_positions(grid, channels, scale=scale)
        return list(zip(*(part.expand(self.depth, -1, -1) for part in rotation), strict=True))

    def grid_of(self, height: int, width: int) -> Grid:
        """Return the grid of patches (h, w) of an image of this size."""
        p, q = self.patch_size
        if height % p or width % q or not height or not width:
            size = f"an image of {height} × {width} pixels cannot be divided into patches of {p} × {q}"
            raise ValueError(f"{size}; resize, crop or pad it to a multiple")
        return height // p, width // q

    def checkpointed(self, block: Callable[..., Tensor], x: Tensor, *options: Any) -> Tensor:
        """Run a block, with activation checkpointing if it is enabled."""
        if self.grad_checkpointing and torch.is_grad_enabled():
            return checkpoint(block, x, *options, use_reentrant=False)
        return block(x, *options)

    def _block_indices(self, blocks: Sequence[int]) -> list[int]:
        outside = [index for index in blocks if not -self.depth <= index < self.depth]
        if outside or not blocks:
            known = f"this backbone has blocks 0 to {self.depth - 1}; negative numbers count from the last"
            raise ValueError(f"blocks {outside or '()'} do not exist: {known}")
        return [index % self.depth for index in blocks]


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
