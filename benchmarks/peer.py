"""DINO with lightly's modules and a timm backbone, put together as lightly's documentation does.

One step: the teacher's average first, a pass for every view, lightly's loss, AdamW. In bf16 where ours is.
`MaskedPeer` passes the views of one size together, as its loss needs the patches of all global views.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import timm
import torch
import torch.nn.functional as F
from lightly.loss import DINOLoss, IBOTPatchLoss, KoLeoLoss
from lightly.models.modules import DINOProjectionHead, MaskedVisionTransformerTIMM
from lightly.models.utils import deactivate_requires_grad, update_momentum
from lightly.transforms.dino_transform import DINOTransform
from PIL import Image
from torch import Tensor, nn

from dino_vit.config.pretrain import PretrainConfig
from dino_vit.models.student_teacher import Masks


def build_timm(config: PretrainConfig, drop_path: float = 0) -> timm.models.VisionTransformer:
    """Build the network of a configuration as timm has it."""
    width, depth, heads = config.model.shape
    return timm.models.VisionTransformer(
        img_size=config.views.global_shape,
        patch_size=config.model.patch_size,
        in_chans=config.data.channels,
        embed_dim=width,
        depth=depth,
        num_heads=heads,
        num_classes=0,
        global_pool="token",
        dynamic_img_size=True,
        drop_path_rate=drop_path,
    )


class Network(nn.Module):
    """Backbone and head."""

    def __init__(self, config: PretrainConfig) -> None:
        super().__init__()
        self.backbone = build_timm(config, drop_path=config.model.drop_path)
        width, head = config.model.shape[0], config.head
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


class MaskedNetwork(nn.Module):
    """Backbone and head, the head shared by the CLS token and masked patches."""

    def __init__(self, config: PretrainConfig, drop_path: float) -> None:
        super().__init__()
        head = config.head
        vit = build_timm(config, drop_path)
        self.backbone = MaskedVisionTransformerTIMM(vit=vit, weight_initialization="skip")
        self.head = DINOProjectionHead(
            vit.embed_dim, head.hidden_dim, head.bottleneck_dim, head.prototypes, norm_last_layer=True
        )

    def forward(self, views: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Return all tokens; `hidden` patches are replaced by the mask token."""
        return self.backbone.encode(views, mask=None if hidden is None else F.pad(hidden, (1, 0)))


class MaskedPeer:
    """The loss of DINOv2 with lightly's modules: CLS tokens, masked patches, KoLeo."""

    def __init__(self, config: PretrainConfig, masks: Masks, device: torch.device) -> None:
        self.student = MaskedNetwork(config, config.model.drop_path).to(device)
        self.teacher = MaskedNetwork(config, 0).to(device)
        self.teacher.load_state_dict(self.student.state_dict())
        deactivate_requires_grad(self.teacher)
        prototypes = config.head.prototypes
        self.loss = DINOLoss(output_dim=prototypes, warmup_teacher_temp_epochs=5).to(device)
        self.patch_loss = IBOTPatchLoss(output_dim=prototypes, teacher_temp=0.04).to(device)
        self.koleo, self.weights = KoLeoLoss(), config.loss
        self.optimizer = torch.optim.AdamW(self.student.parameters(), lr=1e-5)
        self.device, self.clip = device, config.optim.clip
        self.bf16 = config.run.precision == "bf16"
        rows, columns = config.views.global_shape
        grid = rows // config.model.patch_size, columns // config.model.patch_size
        self.mask = masks.mask.to(device)
        self.as_grid = self.mask.view(-1, *grid)

    def step(self, views: Sequence[Tensor]) -> float:
        """Take one step on views of which the first two are global; return its loss."""
        update_momentum(self.student, self.teacher, 0.996)
        globals_, locals_ = torch.cat(list(views[:2])), torch.cat(list(views[2:]))
        student, teacher = self.student, self.teacher
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            with torch.no_grad():
                tokens = teacher(globals_)
                taught = teacher.head(tokens[:, 0]).chunk(2)
                taught_patches = teacher.head(tokens[:, 1:][self.mask])
            tokens = student(globals_, self.mask)
            cls = tokens[:, 0]
            said = [*student.head(cls).chunk(2), *student.head(student(locals_)[:, 0]).chunk(len(views) - 2)]
            loss = self.loss(taught, said, epoch=1)
            said_patches = student.head(tokens[:, 1:][self.mask])
            loss = loss + self.weights.patch_weight * self.patch_loss(
                taught_patches, said_patches, self.as_grid
            )
            loss = loss + self.weights.koleo_weight * sum(self.koleo(view) for view in cls.chunk(2))
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
