"""The loss of a forward pass, as a sum of terms.

v views (global ones first), g global views, b images
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from dino_vit.core import Size
from dino_vit.core.distributed import all_reduce_mean
from dino_vit.method.centering import Center, SinkhornCenter
from dino_vit.method.cross_entropy import LazyLogits
from dino_vit.method.feature_losses import (
    cosine_loss,
    gradient_loss,
    gram_loss,
    imitation_loss,
    koleo_loss,
    resize_patches,
)
from dino_vit.method.loss import dino_loss, loss_statistics, patch_loss, target_sums
from dino_vit.models.backbone import Backbone
from dino_vit.models.student_teacher import Masks, Network, NetworkOutput

PATCH_STATISTICS = "mean_output_entropy", "output_entropy", "entropy_gap", "prototypes_in_use", "rows"


class TeacherOutput(NamedTuple):
    """What the student is to predict: the teacher's logits for the global views, or a backbone's features."""

    cls: Tensor  # (g·b, width)
    logits: Mapping[str, LazyLogits] = {}  # "cls": of CLS tokens, "patch": of masked patches
    centers: Mapping[str, Tensor] = {}  # what is subtracted from each
    patches: Tensor | None = None  # (g·b, N, width)


class LossTerms(NamedTuple):
    """The loss of a forward pass, which is the weighted sum of the terms, and each of them."""

    loss: Tensor
    cls: Tensor  # cross-entropy of the CLS tokens of student and teacher, or 1 minus their cosine
    patch: Tensor | None = None  # the same of patches
    koleo: Tensor | None = None  # summed over the global views
    gram: Tensor | None = None
    gradients: Tensor | None = None  # 1 minus the cosine of those around patches and what is predicted


class Objective:
    """The terms of the loss with their weights, and the centers of the teacher's logits.

    The teacher is the average of the student, or a frozen network. Of a frozen backbone without heads the
    student learns the features instead of the logits.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        prototypes: int,
        views: int,
        global_views: int,
        global_size: Size,
        grid: Size,  # of the student's patches in a global view
        student_temperature: float,
        centering: Literal["ema", "sinkhorn"],
        patch_weight: float = 0.0,
        koleo_weight: float = 0.0,
        gram_weight: float = 0.0,
        gradient_weight: float = 0.0,
        gram_teacher: Backbone | None = None,
        fixed_teacher: Network | Backbone | None = None,
    ) -> None:
        self.compiled = False  # the losses; a run on CUDA that compiles sets it
        self.views, self.global_views = views, global_views
        self.global_size, self.grid = global_size, grid
        self.student_temperature = student_temperature
        self.patch_weight, self.koleo_weight, self.gram_weight = patch_weight, koleo_weight, gram_weight
        self.gradient_weight = gradient_weight
        self.gram_teacher = gram_teacher and gram_teacher.to(device).requires_grad_(False)
        self.fixed_teacher = fixed_teacher and fixed_teacher.to(device)
        self.prototypes = None if isinstance(fixed_teacher, Backbone) else prototypes
        self.centers: dict[str, Center | SinkhornCenter] = {}  # "cls" and "patch"
        if self.prototypes:
            build = SinkhornCenter if centering == "sinkhorn" else Center
            for name in ("cls", "patch") if patch_weight else ("cls",):
                self.centers[name] = build(prototypes=prototypes).to(device)

    def __call__(
        self,
        student: nn.Module,
        teacher: Network,
        views: Sequence[Tensor],  # by size, each (views of that size * b, C, h, w); the global ones first
        masks: Masks | None,
        *,
        images: int,
        teacher_temperature: float,
    ) -> tuple[LossTerms, TeacherOutput]:
        """Compute the loss of a micro-batch; `student` is a Network that may be wrapped."""
        rows = self.global_views * images
        gram_views = views[0][:rows]
        views = self._resize_global(views, rows)
        if isinstance(self.fixed_teacher, Backbone):
            masks, teacher_out = None, self._features(self.fixed_teacher, views[0][:rows])
        else:
            teacher_out = self._targets(
                self.fixed_teacher or teacher, views[0][:rows], masks, teacher_temperature
            )
        # As in DINOv2's distillation, the student of a frozen teacher sees all patches.
        all_patches = teacher_out.patches is not None or self.gram_teacher is not None
        out: NetworkOutput = student(
            views, masks, use_mask_token=self.fixed_teacher is None, all_patches=all_patches
        )

        if teacher_out.logits:
            cls, patch = self._cross_entropies(out, teacher_out, masks, rows, teacher_temperature)
        else:
            cls, patch = self._distill_features(out, teacher_out, rows)
        loss, koleo, gram, gradients = cls, None, None, None
        if patch is not None:
            loss = loss + self.patch_weight * patch
        if self.koleo_weight:
            global_cls = torch.split(out.cls, images)[: self.global_views]
            koleo = torch.stack([koleo_loss(features) for features in global_cls]).sum()
            loss = loss + self.koleo_weight * koleo
        if self.gram_teacher is not None and out.tokens is not None:
            gram = gram_loss(out.tokens[:rows], self._tokens_of(self.gram_teacher, gram_views)[1])
            loss = loss + self.gram_weight * gram
        if out.gradients is not None:
            kept = None if out.kept_patches is None else out.kept_patches[:rows]
            predicted = rearrange(out.gradients, "(b n) d -> b n d", b=len(views[0]))[:rows]
            gradients = gradient_loss(predicted, views[0][:rows], self.grid, kept)
            loss = loss + self.gradient_weight * gradients
        return LossTerms(loss, cls, patch, koleo, gram, gradients), teacher_out

    def _resize_global(self, views: Sequence[Tensor], rows: int) -> Sequence[Tensor]:
        """Return the views, the global ones as the student sees them; a Gram teacher may see more."""
        if views[0].shape[-2:] == self.global_size:
            return views
        resized = F.interpolate(views[0][:rows], size=self.global_size, mode="bicubic", antialias=True)
        return [resized, *(view for view in (views[0][rows:], *views[1:]) if len(view))]

    @torch.no_grad()
    def _targets(
        self, teacher: Network, views: Tensor, masks: Masks | None, temperature: float
    ) -> TeacherOutput:
        """Return the targets for the CLS tokens of the global views, and for the masked patches."""
        out = teacher([views], masks)
        logits = {"cls": LazyLogits.of(out.features, out.prototypes).computed()}
        if out.patch_features is not None and "patch" in self.centers:
            logits["patch"] = LazyLogits.of(out.patch_features, out.patch_prototypes)
        centers = {name: self.centers[name](each, temperature) for name, each in logits.items()}
        return TeacherOutput(out.cls, logits, centers)

    @torch.no_grad()
    def _features(self, teacher: Backbone, views: Tensor) -> TeacherOutput:
        """Return the features of a frozen backbone for the global views."""
        if not self.patch_weight:
            return TeacherOutput(teacher.forward_cls(views))
        cls, patches = self._tokens_of(teacher, views)
        return TeacherOutput(cls, patches=patches)

    @torch.no_grad()
    def _tokens_of(self, backbone: Backbone, views: Tensor) -> tuple[Tensor, Tensor]:
        """Return CLS tokens (g·b, width), and patches (g·b, N, width) resized to the student's grid."""
        tokens = backbone.forward_features(views)
        height, width = views.shape[-2:]
        patches = tokens[:, backbone.first_patch :]
        return tokens[:, 0], resize_patches(patches, backbone.grid_of(height, width), self.grid)

    def _cross_entropies(
        self,
        out: NetworkOutput,
        teacher_out: TeacherOutput,
        masks: Masks | None,
        rows: int,
        teacher_temperature: float,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the cross-entropies of other views (DINO) and of masked patches (iBOT)."""
        logits, centers = teacher_out.logits, teacher_out.centers
        cls = dino_loss(
            out.features,
            out.prototypes,
            logits["cls"],
            centers["cls"],
            views=self.views,
            global_views=self.global_views,
            student_temperature=self.student_temperature,
            teacher_temperature=teacher_temperature,
            compiled=self.compiled,
        )
        if out.patch_features is None or out.patch_prototypes is None or "patch" not in logits:
            return cls, None
        assert masks is not None
        patch = patch_loss(
            out.patch_features,
            out.patch_prototypes,
            logits["patch"],
            centers["patch"],
            masks.weights,
            views=rows,
            student_temperature=self.student_temperature,
            teacher_temperature=teacher_temperature,
            compiled=self.compiled,
        )
        return cls, patch

    def _distill_features(
        self, out: NetworkOutput, teacher_out: TeacherOutput, rows: int
    ) -> tuple[Tensor, Tensor | None]:
        """Return 1 minus the cosines of the student's projected features with the backbone's."""
        cls = imitation_loss(out.features, teacher_out.cls, global_views=self.global_views)
        if teacher_out.patches is None:
            return cls, None
        assert out.patch_features is not None
        return cls, cosine_loss(out.patch_features[:rows], teacher_out.patches)

    def update(self) -> None:
        """Move the centers, after the last micro-batch of a step."""
        for center in self.centers.values():
            center.update()


def output_sums(
    terms: LossTerms, teacher_out: TeacherOutput, teacher_temperature: float
) -> dict[str, Tensor]:
    """Return what `output_statistics` takes of a micro-batch; those of several add up."""
    sums = {"embedding_std": embedding_std(teacher_out.cls)}
    optional = {"koleo": terms.koleo, "gram": terms.gram, "gradient_loss": terms.gradients}
    for name, term in {**optional, "patch_loss": terms.patch}.items():
        sums |= {} if term is None else {name: term.detach()}
    for name, logits in teacher_out.logits.items():
        loss, center = terms.cls if name == "cls" else terms.patch, teacher_out.centers[name]
        assert loss is not None
        targets = target_sums(loss, logits, center, teacher_temperature=teacher_temperature)
        sums |= {f"{name}.{part}": value for part, value in targets.items()}
    return sums


def output_statistics(sums: Mapping[str, Tensor], micro_batches: int) -> dict[str, Tensor]:
    """Return what a log line says of the micro-batches of a step, over all processes."""
    # KoLeo is the same in all processes already.
    statistics = {
        name: value / micro_batches if name == "koleo" else all_reduce_mean(value / micro_batches)
        for name, value in sums.items()
        if "." not in name
    }
    for name in ("cls", "patch"):
        prefix = f"{name}."
        parts = {key.removeprefix(prefix): sums[key] for key in sums if key.startswith(prefix)}
        figures = loss_statistics(parts, micro_batches) if parts else {}
        if name == "cls":
            statistics |= figures
        elif parts:
            statistics |= {f"patch_{figure}": figures[figure] for figure in PATCH_STATISTICS}
    return statistics


def embedding_std(cls: Tensor) -> Tensor:
    """Return the spread of normalised CLS features: 1 if uniform on the sphere, 0 if all are equal."""
    unit = F.normalize(cls.float(), dim=-1)
    return unit.std(dim=0).mean() * unit.shape[1] ** 0.5
