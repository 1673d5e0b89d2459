"""The fixed networks that a student learns from beside its average: a frozen teacher, a Gram teacher.

Only a run that names weights for one imports this module.
"""

from pathlib import Path

import numpy as np

from dino_vit.config.pretrain import PretrainConfig
from dino_vit.core.distributed import all_equal
from dino_vit.models.backbone import Backbone
from dino_vit.weights.loading import TrainedTeacher, load_backbone, open_teacher


def open_frozen(config: PretrainConfig, weights: str) -> TrainedTeacher:
    """Load the network that `teacher.weights` names."""
    _check_other_run(config, "teacher.weights", weights)
    frozen = open_teacher(weights)
    if not all_equal(int(frozen.sha256[:12], 16)):
        text = f"the processes read different weights from teacher.weights={weights}"
        raise ValueError(f"{text}; give a checkpoint that is kept")
    return frozen


def _check_other_run(config: PretrainConfig, key: str, weights: str) -> None:
    """Check that a fixed network is not the newest checkpoint of the run, which changes."""
    if Path(weights).resolve() == Path(config.output).resolve():
        raise ValueError(f"{key}={weights} is the run itself; give another, or a checkpoint that is kept")


def check_frozen(config: PretrainConfig, frozen: Backbone, student: Backbone) -> None:
    """Check that a frozen teacher takes the global views, and sees the patches that the student sees."""
    name, size = f"teacher.weights={config.teacher.weights}", config.views.global_shape
    try:
        grid = frozen.grid_of(*size)
    except ValueError as error:
        raise ValueError(f"{name} does not take global views: {error}; change views.global_size") from error
    if config.loss.patch_weight and grid != student.grid_of(*size):
        rows, columns = student.grid_of(*size)
        raise ValueError(
            f"{name} sees {grid[0]} × {grid[1]} patches of a global view where the student sees {rows} × "
            f"{columns}; use the same model.patch_size, or loss.patch_weight=0"
        )


def load_gram_teacher(config: PretrainConfig, student: Backbone) -> Backbone:
    """Load the network that `gram` holds the patches to."""
    assert config.gram is not None
    _check_other_run(config, "gram.weights", config.gram.weights)
    gram_teacher = load_backbone(config.gram.weights)
    provenance = gram_teacher.provenance
    if not (gram_teacher.has_patches and student.has_patches):
        raise ValueError("gram.weights is about patches, which these networks do not have; leave it out")
    for what, theirs, ours in (
        ("patches", gram_teacher.patch_size, student.patch_size),
        ("channels", gram_teacher.channels, student.channels),
        ("data.mean", provenance and provenance.mean, config.data.mean),
        ("data.std", provenance and provenance.std, config.data.std),
    ):
        if theirs and ours and not np.allclose(theirs, ours):
            text = f"gram.weights={config.gram.weights} has {what} of {theirs}, the run of {ours}"
            raise ValueError(f"{text}; they must be the same")
    return gram_teacher
