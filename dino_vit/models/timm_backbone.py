"""Any backbone of timm behind the interface of ours: pooled features as CLS, the feature map as patches."""

import copy
import math
from collections.abc import Sequence
from difflib import get_close_matches
from inspect import signature
from typing import Any

import torch
from einops import rearrange
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from dino_vit.config.constructors import build
from dino_vit.config.settings import STRICT, BelowOne, Classes, Dimension, Side
from dino_vit.core import Size, height_width
from dino_vit.models.backbone import Backbone

PREFIX = "timm:"  # of a name in the settings


@dataclass(kw_only=True, config=STRICT)
class TimmConfig:
    """The keywords of a `TimmBackbone`, which its files of weights record."""

    name: str
    image_size: Side = 224
    channels: Dimension = 3
    drop_path: BelowOne = 0.0
    num_classes: Classes = 0


class TimmBackbone(Backbone):
    """A randomly initialised model of timm, without its classifier."""

    config: TimmConfig
    __signature__ = signature(TimmConfig)

    def __init__(self, **keywords: Any) -> None:
        super().__init__()
        config = build(TimmConfig, keywords)
        self.config, name, channels = config, config.name, config.channels
        self.name, self.image_size, self.channels = name, height_width(config.image_size), channels
        self.depth, self.heads, self.registers = 1, 0, 0
        self.model, self.arguments = _create(name, self.image_size, channels, config.drop_path)
        self._shapes: dict[Size, tuple[int, Size]] = {}
        self.width, grid = self._shapes_of(*self.image_size)
        self.has_patches = grid != (0, 0)
        height, width = (
            math.ceil(side / max(count, 1)) for side, count in zip(self.image_size, grid, strict=True)
        )
        self.patch_size = height, width
        self.head = nn.Linear(self.width, config.num_classes) if config.num_classes else nn.Identity()

    @property
    def grad_checkpointing(self) -> bool:
        """Whether activations are computed again in the backward pass."""
        return bool(getattr(self.model, "grad_checkpointing", False))

    @grad_checkpointing.setter
    def grad_checkpointing(self, enable: bool) -> None:
        if not enable:
            return
        text = f"{PREFIX}{self.name} does not support model.grad_checkpointing=true"
        if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in self.modules()):
            raise ValueError(f"{text}: its BatchNorm would count each batch twice")
        try:
            self.model.set_grad_checkpointing(True)
        except AssertionError as error:
            raise ValueError(f"{text}: {error}") from error

    def forward_cls(self, images: Tensor) -> Tensor:
        """Return the pooled features (B, D)."""
        return self._pooled(self.model.forward_features(images))

    def forward_features(self, images: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the pooled features and those of the map, row by row, (B, 1 + N, D).

        The map has no rows if the features are made wider after it is pooled.
        """
        assert mask is None, "timm's models have no mask token"
        features = self.model.forward_features(images)
        cls = self._pooled(features)[:, None]
        if not self.has_patches:
            return cls
        height, width = images.shape[-2:]
        return torch.cat([cls, self._map(features, (height, width)).flatten(1, 2)], dim=1)

    def get_intermediate_layers(self, images: Tensor, blocks: int | Sequence[int] = 1) -> list[Tensor]:
        """Return the tokens after the last block, the only ones."""
        if blocks not in (1, [0], [-1]):
            raise ValueError(f"blocks={blocks}: {PREFIX}{self.name} has only its last features")
        return [self.forward_features(images)]

    def grid_of(self, height: int, width: int) -> Size:
        """Return the size of the feature map (h, w) of an image of this size."""
        return self._shapes_of(height, width)[1]

    def layers(self) -> dict[str, int]:
        """Return timm's groups of parameters by depth; what follows comes last, under the name `head`."""
        from timm.models import group_parameters

        groups = group_parameters(self.model, self.model.group_matcher(coarse=False), reverse=True)
        last = 1 + max(groups.values())
        names = (name for name, _ in self.named_parameters())
        return {name: groups.get(name.removeprefix("model."), last) for name in names} | {"head": last}

    def _pooled(self, features: Tensor) -> Tensor:
        pooled: Tensor = self.model.forward_head(features, pre_logits=True)
        return pooled.flatten(1)

    def _map(self, features: Tensor, size: Size) -> Tensor:
        """Return features as a map (b, y, x, d)."""
        if features.ndim == 4:
            channels_last = getattr(self.model, "output_fmt", None) == "NHWC"
            return features if channels_last else rearrange(features, "b d y x -> b y x d")
        patches = features[:, getattr(self.model, "num_prefix_tokens", 0) :]
        rows = round(math.sqrt(patches.shape[1] * size[0] / size[1]))
        if patches.shape[1] % max(rows, 1) or patches.shape[1] < 2:  # other tokens are among them
            return features.new_empty(len(features), 0, 0, 0)
        return rearrange(patches, "b (y x) d -> b y x d", y=rows)

    def _shapes_of(self, height: int, width: int) -> tuple[int, Size]:
        """Return the width of the pooled features and the size of the map of an image of this size."""
        size = height, width
        if size not in self._shapes:
            try:
                self._shapes[size] = self._infer_shapes(size)
            except Exception as error:  # each model has its own way to refuse a size
                text = f"{PREFIX}{self.name} takes no images of {height} × {width} pixels"
                raise ValueError(f"{text}: {error}") from error
        return self._shapes[size]

    def _infer_shapes(self, size: Size) -> tuple[int, Size]:
        # A twin without memory, whose tensors deepcopy finds in its memo.
        tensors = [*self.model.named_parameters(), *self.model.named_buffers()]
        twin = copy.deepcopy(self.model, {id(tensor): tensor.to("meta") for _, tensor in tensors}).eval()
        with torch.no_grad(), torch.device("meta"):
            features = twin.forward_features(torch.empty(1, self.channels, *size))
            pooled = twin.forward_head(features, pre_logits=True).flatten(1)
        _, rows, columns, depth = self._map(features, size).shape
        return pooled.shape[1], (rows, columns) if depth == pooled.shape[1] else (0, 0)


def _create(name: str, size: Size, channels: int, drop_path: float) -> tuple[Any, dict[str, Any]]:
    """Build a model of timm for images of any size, where it can be; return the arguments of it too."""
    try:
        import timm
    except ImportError as error:
        text = f"{PREFIX}{name} is built by timm, which is not installed"
        raise ValueError(f"{text}: pip install timm") from error
    if not timm.is_model(name):
        near = get_close_matches(name, timm.list_models(), n=3)
        advice = f"did you mean {' or '.join(near)}?" if near else "timm.list_models() names them all"
        raise ValueError(f"timm {timm.__version__} has no model {name!r}; {advice}")
    fixed = {"model_name": name, "num_classes": 0, "in_chans": channels}
    wanted: dict[str, Any] = {"drop_path_rate": drop_path} if drop_path else {}
    # Most transformers are built for a size, some take others too; convolutions know of none.
    for sizes in ({"img_size": size, "dynamic_img_size": True}, {"img_size": size}, {}):
        try:
            return timm.create_model(**fixed, **wanted, **sizes), {**fixed, **sizes}
        except TypeError as error:
            fault = str(error)
    raise ValueError(f"{PREFIX}{name} cannot be built with drop_path={drop_path}: {fault}")
