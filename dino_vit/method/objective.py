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
from dino_vit.core.sizes import Size
from dino_vit.method.centring import Center, build_center
from dino_vit.method.cross_entropy import LazyLogits, logits_of
from dino_vit.method.distillation import cosine_loss, imitation_loss
from dino_vit.method.gram import gram_loss, resize_patches
from dino_vit.method.koleo import koleo_loss
from dino_vit.method.loss import dino_loss, loss_statistics
from dino_vit.method.patches import patch_loss
from dino_vit.models.backbone import Backbone
from dino_vit.models.masks import Masks
from dino_vit.models.student_teacher import Network, Output, embedding_std

OF_PATCHES = "mean_output_entropy", "output_entropy", "entropy_gap", "prototypes_in_use", "rows"


L = TypeVar("L", list[Tensor], LazyLogits)


class Targets(NamedTuple, Generic[L]):
    """What the student is to predict: the teacher's logits, and what is subtracted from them."""

    logits: L
    center: Tensor


class Forward(NamedTuple):
    """A forward pass: the weighted sum of the terms, each of them, and what the teacher said."""

    loss: Tensor
    cls: Tensor  # the cross-entropy of the CLS tokens of student and teacher, or 1 minus their cosine
    teacher_cls: Tensor
    patch: Tensor | None = None  # the same of patches
    koleo: Tensor | None = None  # summed over the global views
    gram: Tensor | None = None
    targets: Targets[list[Tensor]] | None = None
    patch_targets: Targets[LazyLogits] | None = None


class Objective:
    """The terms of the loss with their weights, and the centres of the teacher's logits.

    The targets are those of the student's average or of a frozen network. Of a frozen backbone without heads
    the student imitates the features instead.
    """

    def __init__(
        self,
        config: PretrainConfig,
        device: torch.device,
        *,
        grid: Size | None = None,
        earlier: Backbone | None = None,
        frozen: Network | Backbone | None = None,
    ) -> None:
        self.loss, self.views, self.anchor = config.loss, config.views, config.anchor
        self.earlier = earlier and earlier.to(device).requires_grad_(False)
        self.frozen = frozen and frozen.to(device)
        self.grid = grid or (0, 0)  # of the student's patches in a global view
        self.prototypes = None if isinstance(frozen, Backbone) else config.head.prototypes
        self.imitation_weight = config.teacher.patch_weight
        centring: dict[str, Any] = {
            "method": config.loss.centring,
            "prototypes": config.head.prototypes,
            "momentum": config.loss.center_momentum,
        }
        self.center = build_center(**centring).to(device) if self.prototypes else None
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
        if isinstance(self.frozen, Backbone):
            out, forward = self._imitate(self.frozen, student, views, rows)
        else:
            out, forward = self._predict(teacher, student, views, masks, rows, teacher_temperature)
        loss = forward.loss
        koleo, gram = None, None
        if weight := self.loss.koleo_weight:
            of_views = torch.split(out.cls, images)[:global_views]
            koleo = torch.stack([koleo_loss(cls) for cls in of_views]).sum()
            loss = loss + weight * koleo
        if self.anchor and self.earlier and out.tokens is not None:
            gram = gram_loss(out.tokens[:rows], self._patches_of(self.earlier, enlarged)[1])
            loss = loss + self.anchor.weight * gram
        return forward._replace(loss=loss, koleo=koleo, gram=gram)

    def _predict(
        self,
        teacher: Network,
        student: nn.Module,
        views: Sequence[Tensor],
        masks: Masks | None,
        rows: int,
        temperature: float,
    ) -> tuple[Output, Forward]:
        """Let the student predict what the teacher says of other views, and of masked patches."""
        frozen = self.frozen if isinstance(self.frozen, Network) else None
        targets, patch_targets, teacher_cls = self._targets(
            frozen or teacher, [views[0][:rows]], masks, temperature
        )
        # As in DINOv2's distillation, the student of a frozen teacher sees all patches.
        out: Output = student(views, masks, hide=frozen is None, all_patches=self.anchor is not None)
        temperatures: dict[str, Any] = {
            "student_temperature": self.loss.student_temp,
            "teacher_temperature": temperature,
        }
        cross_entropy = dino_loss(
            out.projection.features,
            out.projection.prototypes,
            targets.logits[0],
            targets.center,
            views=self.views.global_count + self.views.local_count,
            global_views=self.views.global_count,
            **temperatures,
        )
        loss, patch = cross_entropy, None
        if masks is not None and patch_targets is not None and out.patches is not None:
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
        found = Forward(loss, cross_entropy, teacher_cls, patch, targets=targets, patch_targets=patch_targets)
        return out, found

    def _imitate(
        self, frozen: Backbone, student: nn.Module, views: Sequence[Tensor], rows: int
    ) -> tuple[Output, Forward]:
        """Let the student, through linear layers, have the features of a frozen backbone."""
        seen = views[0][:rows]
        if not self.imitation_weight:
            with torch.no_grad():
                cls = frozen.forward_cls(seen)
            out: Output = student(views, all_patches=self.anchor is not None)
            loss = imitation_loss(out.projection.features, cls, global_views=self.views.global_count)
            return out, Forward(loss, loss, cls)
        cls, patches = self._patches_of(frozen, seen)
        out = student(views, all_patches=True)
        loss = imitation_loss(out.projection.features, cls, global_views=self.views.global_count)
        assert out.patches is not None
        patch = cosine_loss(out.patches.features[:rows], patches)
        return out, Forward(loss + self.imitation_weight * patch, loss, cls, patch)

    @torch.no_grad()
    def _patches_of(self, frozen: Backbone, views: Tensor) -> tuple[Tensor, Tensor]:
        """Return the CLS tokens of global views (rows, width), and patches (rows, N, width) of our grid."""
        tokens = frozen.forward_features(views)
        height, width = views.shape[-2:]
        patches = tokens[:, frozen.first_patch :]
        return tokens[:, 0], resize_patches(patches, frozen.grid_of(height, width), self.grid)

    @torch.no_grad()
    def _targets(
        self, teacher: Network, views: Sequence[Tensor], masks: Masks | None, temperature: float
    ) -> tuple[Targets[list[Tensor]], Targets[LazyLogits] | None, Tensor]:
        """Return what the teacher says of the global views and of their masked patches, which it sees."""
        out = teacher(views, masks)
        logits = [logits_of(*out.projection)]
        assert self.center
        targets = Targets(logits, self.center(logits, temperature))
        if out.patches is None or self.patch_center is None:
            return targets, None, out.cls
        lazy = LazyLogits(*out.patches)
        return targets, Targets(lazy, self.patch_center(lazy, temperature)), out.cls

    def accumulate(self, out: Forward) -> None:
        """Remember the teacher's logits of a pass for the centres after the step."""
        if self.center and out.targets:
            self.center.accumulate(out.targets.logits)
        if self.patch_center and out.patch_targets:
            self.patch_center.accumulate(out.patch_targets.logits)

    def update(self) -> None:
        """Move the centres, after the last pass of a step."""
        for center in self.modules().values():
            center.update()

    def modules(self) -> dict[str, Center]:
        """Return the centres by their names in a checkpoint."""
        centers = {"loss": self.center, "patch_loss": self.patch_center}
        return {name: center for name, center in centers.items() if center is not None}


def measure(out: Forward, teacher_temperature: float) -> dict[str, Tensor]:
    """Return what a log line says of a pass, over all processes."""
    found = {"embedding_std": all_reduce_mean(embedding_std(out.teacher_cls))}
    if out.targets is not None:
        loss = out.cls.detach()
        found |= loss_statistics(loss, *out.targets, teacher_temperature=teacher_temperature)._asdict()
    if out.koleo is not None:
        found["koleo"] = out.koleo.detach()
    if out.gram is not None:
        found["gram"] = all_reduce_mean(out.gram.detach())
    if out.patch is not None:
        loss = out.patch.detach()
        found["patch_loss"] = all_reduce_mean(loss)
    if out.patch is not None and out.patch_targets is not None:
        of_patches = loss_statistics(loss, *out.patch_targets, teacher_temperature=teacher_temperature)
        found |= {f"patch_{name}": getattr(of_patches, name) for name in OF_PATCHES}
    return found
