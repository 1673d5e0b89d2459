"""The loss of a forward pass, as a sum of terms.

v views (global ones first), g global views, b images
"""

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dino_vit.config.pretrain import PretrainConfig
from dino_vit.core.distributed import all_reduce_mean
from dino_vit.method.centring import Center, build_center
from dino_vit.method.cross_entropy import LazyLogits, logits_of
from dino_vit.method.gram import gram_loss, resize_patches
from dino_vit.method.koleo import koleo_loss
from dino_vit.method.loss import dino_loss, loss_statistics
from dino_vit.method.patches import patch_loss
from dino_vit.models.backbone import Backbone
from dino_vit.models.masks import Masks
from dino_vit.models.student_teacher import Network, embedding_std

OF_PATCHES = "mean_output_entropy", "output_entropy", "entropy_gap", "prototypes_in_use", "rows"


L = TypeVar("L", list[Tensor], LazyLogits)


class Targets(NamedTuple, Generic[L]):
    """What the student is to predict: the teacher's logits, and what is subtracted from them."""

    logits: L
    center: Tensor


class Forward(NamedTuple):
    """A forward pass: the weighted sum of the terms, each of them, and what the teacher said."""

    loss: Tensor
    cross_entropy: Tensor  # of the CLS tokens of student and teacher
    patch: Tensor | None  # the same of masked patches
    koleo: Tensor | None  # summed over the global views
    gram: Tensor | None
    targets: Targets[list[Tensor]]
    patch_targets: Targets[LazyLogits] | None
    teacher_cls: Tensor


class Objective:
    """The terms of the loss with their weights, and the centres of the teacher's logits."""

    def __init__(
        self,
        config: PretrainConfig,
        device: torch.device,
        *,
        earlier: Backbone | None = None,
        frozen: Network | None = None,
    ) -> None:
        self.loss, self.views, self.anchor = config.loss, config.views, config.anchor
        self.earlier = earlier and earlier.to(device).requires_grad_(False)
        self.frozen = frozen and frozen.to(device)
        centring: dict[str, Any] = {
            "method": config.loss.centring,
            "prototypes": config.head.prototypes,
            "momentum": config.loss.center_momentum,
        }
        self.center = build_center(**centring).to(device)
        self.patch_center = build_center(**centring).to(device) if self.loss.patch_weight else None

    def __call__(
        self,
        student: nn.Module,
        teacher: Network,
        views: Sequence[Tensor],  # by size, each (views of that size * b, C, h, w); the global ones first
        masks: Masks | None,
        *,
        images: int,
        teacher_temperature: float,
    ) -> Forward:
        """Compute the loss of a pass; `student` is a Network that may be wrapped."""
        global_views = self.views.global_count
        rows = global_views * images
        enlarged = views[0][:rows]
        if self.anchor and self.anchor.scale > 1:
            reduced = F.interpolate(enlarged, size=self.views.global_shape, mode="bicubic", antialias=True)
            views = [reduced, *(view for view in (views[0][rows:], *views[1:]) if len(view))]
        targets, patch_targets, teacher_cls = self._targets(
            self.frozen or teacher, [views[0][:rows]], masks, teacher_temperature
        )
        # As in DINOv2's distillation, the student of a frozen teacher sees all patches.
        out = student(views, masks, hide=self.frozen is None, all_patches=self.anchor is not None)
        temperatures: dict[str, Any] = {
            "student_temperature": self.loss.student_temp,
            "teacher_temperature": teacher_temperature,
        }
        cross_entropy = dino_loss(
            out.projection.features,
            out.projection.prototypes,
            targets.logits[0],
            targets.center,
            views=global_views + self.views.local_count,
            global_views=global_views,
            **temperatures,
        )
        loss, patch, koleo = cross_entropy, None, None
        if masks is not None and patch_targets is not None:
            patch = patch_loss(
                out.patches.features,
                out.patches.prototypes,
                patch_targets.logits,
                patch_targets.center,
                masks.weights,
                views=rows,
                **temperatures,
            )
            loss = loss + self.loss.patch_weight * patch
        if weight := self.loss.koleo_weight:
            of_views = out.cls.split(images)[:global_views]
            koleo = torch.stack([koleo_loss(cls) for cls in of_views]).sum()
            loss = loss + weight * koleo
        gram = None
        if self.anchor and self.earlier:
            gram = gram_loss(out.tokens[:rows], self._earlier_patches(enlarged))
            loss = loss + self.anchor.weight * gram
        return Forward(loss, cross_entropy, patch, koleo, gram, targets, patch_targets, teacher_cls)

    @torch.no_grad()
    def _earlier_patches(self, views: Tensor) -> Tensor:
        """Return the patches (rows, N, width) of global views, as the earlier teacher sees them."""
        assert self.earlier
        earlier, (height, width) = self.earlier, views.shape[-2:]
        patches = earlier.forward_features(views)[:, earlier.first_patch :]
        wanted = earlier.grid_of(*self.views.global_shape)
        return resize_patches(patches, earlier.grid_of(height, width), wanted)

    @torch.no_grad()
    def _targets(
        self, teacher: Network, views: Sequence[Tensor], masks: Masks | None, temperature: float
    ) -> tuple[Targets[list[Tensor]], Targets[LazyLogits] | None, Tensor]:
        """Return what the teacher says of the global views and of their masked patches, which it sees."""
        out = teacher(views, masks)
        logits = [logits_of(*out.projection)]
        targets = Targets(logits, self.center(logits, temperature))
        if out.patches is None or self.patch_center is None:
            return targets, None, out.cls
        lazy = LazyLogits(*out.patches)
        return targets, Targets(lazy, self.patch_center(lazy, temperature)), out.cls

    def accumulate(self, out: Forward) -> None:
        """Remember the teacher's logits of a pass for the centres after the step."""
        self.center.accumulate(out.targets.logits)
        if self.patch_center and out.patch_targets:
            self.patch_center.accumulate(out.patch_targets.logits)

    def update(self) -> None:
        """Move the centres, after the last pass of a step."""
        for center in self.modules().values():
            center.update()

    def modules(self) -> dict[str, Center]:
        """Return the centres by their names in a checkpoint."""
        return {"loss": self.center, **({"patch_loss": self.patch_center} if self.patch_center else {})}


def measure(out: Forward, teacher_temperature: float) -> dict[str, Tensor]:
    """Return what a log line says of a pass, over all processes."""
    loss = out.cross_entropy.detach()
    statistics = loss_statistics(loss, *out.targets, teacher_temperature=teacher_temperature)
    found = {**statistics._asdict(), "embedding_std": all_reduce_mean(embedding_std(out.teacher_cls))}
    if out.koleo is not None:
        found["koleo"] = out.koleo.detach()
    if out.gram is not None:
        found["gram"] = all_reduce_mean(out.gram.detach())
    if out.patch is not None and out.patch_targets is not None:
        loss = out.patch.detach()
        of_patches = loss_statistics(loss, *out.patch_targets, teacher_temperature=teacher_temperature)
        found["patch_loss"] = all_reduce_mean(loss)
        found |= {f"patch_{name}": getattr(of_patches, name) for name in OF_PATCHES}
    return found
