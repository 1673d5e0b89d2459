"""The frozen networks that a student learns from beside its average: a frozen teacher, and a Gram teacher.

A frozen teacher has the heads of its checkpoint and the centres of their outputs, if there are any.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dino_vit.config.loading import load
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.core.checkpoint import read_checkpoint
from dino_vit.models.backbone import Backbone
from dino_vit.models.head import DINOHead
from dino_vit.models.student_teacher import Network
from dino_vit.weights.formats.layouts import OURS

HEADS = {"head": "cls.center", "patch_head": "patch.center"}  # and the centre of the outputs of each


class FrozenTeacher(NamedTuple):
    """A frozen network, in evaluation mode: of a checkpoint with its heads, otherwise a backbone alone."""

    backbone: Backbone
    network: Network | None = None
    centers: Mapping[str, Tensor] = {}  # (1, prototypes), by their names in a checkpoint
    config: PretrainConfig | None = None  # of its run


def open_teacher(backbone: Backbone) -> FrozenTeacher:
    """Open what `teacher.weights` names, with the heads that lie beside the loaded backbone, if any."""
    backbone.requires_grad_(False)
    path = Path(backbone.provenance.source)
    if backbone.provenance.format != OURS.format or not path.is_file():
        return FrozenTeacher(backbone)
    checkpoint = read_checkpoint(path)
    if "teacher.head.last_layer.weight_v" not in checkpoint.tensors:
        return FrozenTeacher(backbone)  # a backbone alone, or a run that learned the features of another
    config = load(PretrainConfig, None, checkpoint.metadata["config"])
    sizes = config.head.model_dump(exclude={"shared"})
    heads, centers = dict[str, DINOHead](), dict[str, Tensor]()
    for name, center in HEADS.items():
        if center in checkpoint.tensors:
            centers[center] = checkpoint.tensors[center]
        prefix = f"teacher.{name}."
        tensors = {n.removeprefix(prefix): t for n, t in checkpoint.tensors.items() if n.startswith(prefix)}
        if tensors:  # masked patches pass the head of the CLS token, or one of their own
            with torch.device("meta"):
                heads[name] = DINOHead(in_dim=backbone.width, **sizes)
            heads[name].load_state_dict(tensors, assign=True)
    network = Network(backbone, heads).eval().requires_grad_(False)
    return FrozenTeacher(backbone, network, centers, config)


def check_frozen_teacher(config: PretrainConfig, teacher: Backbone, student: Backbone) -> None:
    """Check that a frozen teacher takes the global views, and sees the patches that the student sees."""
    name, size = f"teacher.weights={config.teacher.weights}", config.views.global_shape
    try:
        grid = teacher.grid_of(*size)
    except ValueError as error:
        raise ValueError(f"{name} does not take global views: {error}; change views.global_size") from error
    if config.loss.patch_weight and grid != student.grid_of(*size):
        rows, columns = student.grid_of(*size)
        raise ValueError(
            f"{name} sees {grid[0]} × {grid[1]} patches of a global view where the student sees {rows} × "
            f"{columns}; use the same model.patch_size, or loss.patch_weight=0"
        )


def check_gram_teacher(config: PretrainConfig, gram_teacher: Backbone, student: Backbone) -> None:
    """Check that a Gram teacher sees the patches that the student sees."""
    provenance = gram_teacher.provenance
    if not (gram_teacher.has_patches and student.has_patches):
        raise ValueError("gram.weights is about patches, which these networks do not have; leave it out")
    for what, theirs, ours in (
        ("patches", gram_teacher.patch_size, student.patch_size),
        ("channels", gram_teacher.channels, student.channels),
        ("data.mean", provenance.mean, config.data.mean),
        ("data.std", provenance.std, config.data.std),
    ):
        if theirs and ours and not np.allclose(theirs, ours):
            text = f"the network of gram.weights has {what} of {theirs}, the run of {ours}"
            raise ValueError(f"{text}; they must be the same")
