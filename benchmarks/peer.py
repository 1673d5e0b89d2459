"""DINO with lightly's modules and a timm backbone, put together as lightly's documentation does.

One step: the teacher's average first, a pass for every view, lightly's loss, AdamW. In bf16 where ours is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import timm
import torch
from lightly.loss import DINOLoss
from lightly.models.modules import DINOProjectionHead
from lightly.models.utils import deactivate_requires_grad, update_momentum
from lightly.transforms.dino_transform import DINOTransform
from PIL import Image
from torch import Tensor, nn

from dino_vit.config.pretrain import PretrainConfig


class Network(nn.Module):
    """Backbone and head."""

    def __init__(self, config: PretrainConfig) -> None:
        super().__init__()
        width, depth, heads = config.model.shape
        self.backbone = timm.models.VisionTransformer(
            img_size=config.views.global_shape,
            patch_size=config.model.patch_size,
            embed_dim=width,
            depth=depth,
            num_heads=heads,
            num_classes=0,
            global_pool="token",
            dynamic_img_size=True,
            drop_path_rate=config.model.drop_path,
        )
        head = config.head
        self.head = DINOProjectionHead(
            width, head.hidden_dim, head.bottleneck_dim, head.prototypes, norm_last_layer=head.norm_last_layer
        )

    def forward(self, view: Tensor) -> Tensor:
        return self.head(self.backbone(view))


class Peer:
    """A student, a teacher and their optimiser."""

    def __init__(self, config: PretrainConfig, device: torch.device) -> None:
        self.student = Network(config).to(device)
        self.teacher = Network(config).to(device)
        self.teacher.load_state_dict(self.student.state_dict())
        deactivate_requires_grad(self.teacher)
        self.loss = DINOLoss(output_dim=config.head.prototypes, warmup_teacher_temp_epochs=5).to(device)
        self.optimizer = torch.optim.AdamW(self.student.parameters(), lr=1e-5)
        self.device, self.clip = device, config.optim.clip
        self.bf16 = config.run.precision == "bf16"

    def step(self, views: Sequence[Tensor]) -> float:
        """Take one step on views of which the first two are global; return its loss."""
        update_momentum(self.student, self.teacher, 0.996)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            taught = [self.teacher(view) for view in views[:2]]
            said = [self.student(view) for view in views]
            loss = self.loss(taught, said, epoch=1)
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.student.parameters(), self.clip)
        self.optimizer.step()
        return loss.item()


def transform(config: PretrainConfig) -> Callable[[Image.Image], list[Tensor]]:
    """Return its views of a PIL image, with the recipe's sizes and shares."""
    views = config.views
    cut: Callable[[Image.Image], list[Tensor]] = DINOTransform(
        global_crop_size=views.global_shape[0],
        global_crop_scale=views.global_scale,
        local_crop_size=views.local_shape[0],
        local_crop_scale=views.local_scale,
        n_local_views=views.local_count,
    )
    return cut
