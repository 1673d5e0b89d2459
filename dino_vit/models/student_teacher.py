"""The student and the teacher: two networks of the same architecture.

v views (global ones first), b images
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dino_vit.models.backbone import Backbone
from dino_vit.models.head import DINOHead, convert_sync_batchnorm
from dino_vit.models.multicrop import Drops, forward_multicrop, sample_drops
from dino_vit.models.vit import VisionTransformer

T = TypeVar("T")
HeadBuilder = Callable[..., nn.Module]  # called with `in_dim`, the width of the backbone


class Need(NamedTuple):
    """What a forward pass is asked for: tokens of the backbone, or what a head makes of them.

    `cls`: the CLS tokens (v·b, D). Of the views of the first size alone, B in number: `patches`: all patches
    (B, N, D); `masked`: the masked ones (m, D); `middle`: those that are kept, after half of the blocks
    (B·kept, D); `kept`: their indices (B, kept), missing if all are. `prototypes`: those of a `DINOHead`,
    (k, d); its output for tokens are L2-normalised features (..., d), which the loss multiplies with them.
    """

    what: Literal["cls", "patches", "masked", "middle", "kept", "prototypes"]
    head: str | None = None


Outputs = Mapping[Need, Tensor]


class Network(nn.Module):
    """A backbone and projection heads: one backbone pass for all view sizes, one pass of each head.

    Stochastic depth is drawn from `generator`, if the training loop sets one, or PyTorch's own.
    """

    def __init__(self, backbone: Backbone, heads: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.backbone = backbone
        for name, head in heads.items():
            self.add_module(name, head)
        self.generator: torch.Generator | None = None

    def forward(
        self,
        views: Sequence[Tensor],
        needs: Collection[Need],
        *,
        masked: Tensor | None = None,
        hidden: Tensor | None = None,
        kept: Tensor | None = None,
    ) -> dict[Need, Tensor]:
        """Return what is needed of views by size, each (views of that size · b, C, h, w).

        `masked` (m,) are the indices of the masked patches among all of the first size; the mask token
        replaces those that are `hidden` (global views · b, N). In training no other patches of the first size
        are seen than those `kept`, given as indices (B, kept).
        """
        if hidden is not None:
            hidden = F.pad(hidden, (0, 0, 0, len(views[0]) - len(hidden)))
        drops = sample_drops(self.backbone, views, kept, self.generator)
        whats = {need.what for need in needs}
        cls, patches, middle = self.run_backbone(
            views, hidden, not whats.isdisjoint({"patches", "masked"}), "middle" in whats, drops
        )
        found: dict[str, Tensor | None] = {"cls": cls, "patches": patches}
        if middle is not None:
            found["middle"] = middle.flatten(0, 1)
        if masked is not None and patches is not None:
            found["masked"] = patches.flatten(0, 1)[masked]
        found["kept"] = drops.kept
        outputs = {need: self._output(need, found) for need in needs}
        return {need: output for need, output in outputs.items() if output is not None}

    def _output(self, need: Need, found: Mapping[str, Tensor | None]) -> Tensor | None:
        if need.head is None:
            return found.get(need.what)
        head: Any = self.get_submodule(need.head)
        # An output too, so that DistributedDataParallel sees all parameters in use.
        if need.what == "prototypes":
            prototypes: Tensor = head.prototypes
            return prototypes
        if isinstance(head, DINOHead):
            head = head.project
        output: Tensor = head(found[need.what])
        return output

    def run_backbone(
        self, views: Sequence[Tensor], mask: Tensor | None, all_patches: bool, halfway: bool, drops: Drops
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the CLS tokens of all views, and patches of the first size, if asked for.

        These are all after the last block, and those that are kept after half of the blocks. This is what
        `compute.compile` compiles: the shapes are the same in each step.
        """
        parts = forward_multicrop(self.backbone, views, mask, tokens=all_patches, middle=halfway, drops=drops)
        patches = slice(self.backbone.first_patch, None)
        middle = parts.pop()[:, patches] if halfway else None
        if not all_patches:
            return torch.cat(parts), None, middle
        return torch.cat([parts[0][:, 0], *parts[1:]]), parts[0][:, patches], middle

    def run_unsharded(self, work: Callable[[Backbone], T]) -> T:
        """Return work(backbone); FSDP, where it shards the network, gathers the weights for the call."""
        return work(self.backbone)

    @property
    def heads(self) -> list[nn.Module]:
        """The heads, in their order."""
        return [module for module in self.children() if module is not self.backbone]


def build_networks(
    *,
    backbone: Mapping[str, Any],
    drop_path: float,
    heads: Mapping[str, HeadBuilder],
    student_heads: Mapping[str, HeadBuilder] | None = None,
) -> tuple[Network, Network]:
    """Return a student and a teacher with the same weights; the teacher needs no gradient.

    With `name` their backbone is a model of timm. The student may have heads that the teacher has not.
    """

    def build(dropping: Mapping[str, float]) -> Network:
        built: Backbone
        if "name" in backbone:
            from dino_vit.models.timm_backbone import TimmBackbone

            built = TimmBackbone(**backbone, drop_path=dropping["drop_path"])
        else:
            built = VisionTransformer(**{**backbone, **dropping})
        network = Network(built, {name: head(in_dim=built.width) for name, head in heads.items()})
        convert_sync_batchnorm(network)
        return network

    student = build({"drop_path": drop_path})
    teacher = build({"drop_path": 0.0, "dropout": 0.0, "attention_dropout": 0.0})
    teacher.load_state_dict(student.state_dict())
    for name, head in (student_heads or {}).items():
        student.add_module(name, head(in_dim=student.backbone.width))
    teacher.requires_grad_(False).eval()  # its targets are a function of the images
    for module in teacher.modules():  # a BatchNorm takes the statistics of the batch, as in 2021
        module.training = isinstance(module, _BatchNorm)
    return student, teacher
