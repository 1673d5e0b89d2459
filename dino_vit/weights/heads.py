"""Load the teacher of a checkpoint with its projection heads and the centres of its outputs."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dino_vit.core.checkpoint import Checkpoint, Checkpoints, read_checkpoint
from dino_vit.core.storage import StorageError
from dino_vit.models.backbone import Backbone
from dino_vit.models.head import DINOHead
from dino_vit.models.student_teacher import Network
from dino_vit.weights.loading import load_backbone
from dino_vit.weights.metadata import WeightsError
from dino_vit.weights.reading import is_name

HEADS = {"head": "loss.center", "patch_head": "patch_loss.center"}  # and the centre of the outputs of each


class TrainedTeacher(NamedTuple):
    """A frozen network, in evaluation mode: of a checkpoint with its heads, otherwise a backbone alone."""

    backbone: Backbone
    network: Network | None = None
    centers: Mapping[str, Tensor] = {}  # (1, prototypes), by their names in a checkpoint
    config: Mapping[str, Any] = {}  # the settings of the run

    @property
    def sha256(self) -> str:
        assert self.backbone.provenance
        return self.backbone.provenance.sha256


def open_teacher(source: str) -> TrainedTeacher:
    """Open what `teacher.weights` names: a run folder, a checkpoint, or weights of any kind."""
    path, checkpoint = Path(source), None
    if not is_name(source) and path.is_dir():
        checkpoint = Checkpoints(path).newest()
    elif not is_name(source) and path.is_file() and path.suffix == ".safetensors":
        with suppress(StorageError):  # of another library
            checkpoint = read_checkpoint(path)
    # A run that learned the features of a backbone has no prototypes.
    if checkpoint is not None and "teacher.head.last_layer.weight_v" in checkpoint.tensors:
        return _load_teacher(checkpoint)
    return TrainedTeacher(load_backbone(source).requires_grad_(False))


def _load_teacher(checkpoint: Checkpoint) -> TrainedTeacher:
    """Return the teacher of a checkpoint with its heads and centres."""
    path = checkpoint.path
    sizes = {key: value for key, value in checkpoint.metadata["config"]["head"].items() if key != "shared"}
    backbone, heads, centers = load_backbone(path), dict[str, DINOHead](), dict[str, Tensor]()
    for name, center in HEADS.items():
        if center in checkpoint.tensors:
            centers[center] = checkpoint.tensors[center]
        prefix = f"teacher.{name}."
        tensors = {n.removeprefix(prefix): t for n, t in checkpoint.tensors.items() if n.startswith(prefix)}
        if tensors:  # masked patches pass the head of the CLS token, or one of their own
            with torch.device("meta"):
                heads[name] = DINOHead(in_dim=backbone.width, **sizes)
            heads[name].load_state_dict(tensors, assign=True)
    prototypes = heads["head"].last_layer.weight_v.shape[0]
    first = centers.get(HEADS["head"])
    if first is None or first.shape != (1, prototypes):
        raise WeightsError(f"{path} holds no centre of its {prototypes:,} prototypes")
    network = Network(backbone, **heads).eval().requires_grad_(False)
    return TrainedTeacher(backbone, network, centers, checkpoint.metadata["config"])
