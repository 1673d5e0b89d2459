"""The teacher of a checkpoint: its backbone, and the prototypes that it knows images by."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dino_vit.config.pretrain import PretrainConfig
from dino_vit.core.checkpoint import Checkpoint
from dino_vit.eval.attention import cls_attention
from dino_vit.models.head import DINOHead
from dino_vit.models.vit import VisionTransformer
from dino_vit.views.preparation import Preparation, preparation_of
from dino_vit.weights import load_backbone

BATCH = 64  # images looked at together


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """A teacher that only looks."""

    backbone: VisionTransformer
    head: DINOHead
    center: Tensor  # (1, prototypes)
    preparation: Preparation
    step: int

    @property
    def device(self) -> torch.device:
        return self.backbone.cls_token.device

    def attention(self, images: Tensor) -> Tensor:
        """Return the CLS attention of the last block's heads (n, h, y, x) for images as they are read."""
        return cls_attention(self.backbone, self.preparation.normaliser(self.device)(images)).float().cpu()

    @torch.no_grad()
    def clusters(self, features: Tensor) -> Tensor:
        """Return the prototype that the centred output names for each CLS feature (n, width)."""
        parts = torch.split(features.to(self.device), BATCH)
        return torch.cat([(self.head(part) - self.center).argmax(dim=-1) for part in parts]).cpu()


def load_teacher(checkpoint: Checkpoint, config: PretrainConfig, device: torch.device) -> Teacher:
    """Load the teacher of a checkpoint onto a device."""
    backbone = load_backbone(checkpoint.path).to(device)
    head = DINOHead(in_dim=backbone.width, **config.head.model_dump())
    prefix = "teacher.head."
    head.load_state_dict(
        {name.removeprefix(prefix): t for name, t in checkpoint.tensors.items() if name.startswith(prefix)}
    )
    return Teacher(
        backbone=backbone,
        head=head.to(device).eval(),
        center=checkpoint.tensors["loss.center"].to(device),
        preparation=preparation_of(backbone),
        step=checkpoint.step,
    )
