"""Runs that learn from a frozen teacher, another run: what it teaches, how it resumes, what must agree."""

import re

import numpy as np
import pytest
import torch
from PIL import Image
from torch.testing import assert_close

import dino_vit
from dino_vit.core.checkpoint import Checkpoints
from dino_vit.training.frozen_networks import open_teacher
from tests.support.runs import RESNET, tensors
from tests.support.training import assert_resumes_exactly, opened, tensors_of, trained

WIDE = {"model.width": 48, "model.depth": 3, "model.heads": 3, "seed": 5, "budget.steps": 10}
PATCHES = {"loss.patch_weight": 1, "views.global_size": 48, "views.local_size": 24}


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A teacher that is wider than its students."""
    output = tmp_path_factory.mktemp("teachers") / "wide"
    trained(output, {**WIDE, "head.prototypes": 128})
    return output


def pupil(teacher, **more):
    return {"teacher.weights": teacher, "head.prototypes": 128, "budget.steps": 20, **more}


def test_targets_are_those_of_the_frozen_teacher(tmp_path, wide):
    """The cross-entropy of a step, written out with the tensors of the teacher's file."""
    found = opened(tmp_path / "run", pupil(wide, **{"model.drop_path": 0}))
    state = found
    teacher = open_teacher(dino_vit.load_backbone(wide))
    assert_close(state.objective.state["cls"].center, teacher.centers["cls.center"])
    batch = next(state.loader.batches())
    views, images, temperature = state.views_of(batch), len(batch.samples), 0.04
    losses = state.objective(
        state.student, state.teacher, views, None, images=images, teacher_temperature=temperature
    )
    with torch.no_grad():
        network = teacher.network
        logits = network.head(network.backbone(views[0]))
        targets = ((logits - teacher.centers["cls.center"]) / temperature).softmax(1).split(images)
        outputs = [state.student.head(state.student.backbone(size)) / 0.1 for size in views]
        students = [part.log_softmax(1) for size in outputs for part in size.split(images)]
        terms = [
            -(target * student).sum(1).mean()
            for g, target in enumerate(targets)
            for v, student in enumerate(students)
            if g != v
        ]
    assert_close(losses.total.detach(), torch.stack(terms).mean(), atol=1e-4, rtol=1e-4)


def test_the_teacher_stays_as_it_is_and_the_average_of_the_student_is_kept(tmp_path, wide):
    state = trained(tmp_path / "run", pupil(wide))
    frozen = open_teacher(dino_vit.load_backbone(wide)).network
    for name, tensor in tensors_of(state.objective.frozen_teacher).items():
        assert torch.equal(tensor, frozen.state_dict()[name]), name
    assert state.teacher.backbone.width == 32
    kept = dino_vit.load_backbone(tmp_path / "run")
    assert all(torch.equal(kept.state_dict()[n], t) for n, t in state.teacher.backbone.state_dict().items())
    start = opened(tmp_path / "again", pupil(wide)).teacher.backbone
    assert any(not torch.equal(start.state_dict()[n], t) for n, t in kept.state_dict().items())


def test_weights_to_start_from_have_the_channels_of_the_teacher(tmp_path):
    one = {"data.channels": 1, "data.mean": "[0.5]", "data.std": "[0.2]", "head.prototypes": 128}
    one |= {"augment.saturation": 0, "augment.hue": 0, "augment.grey": 0}
    for number in range(64):
        Image.fromarray(np.full((40, 40), 3 * number, np.uint8)).save(tmp_path / f"{number}.png")
    grey = trained(tmp_path / "grey", {**WIDE, **one, "data.source": tmp_path}).folder
    both = pupil(grey, **{"init.weights": grey, "data.source": tmp_path, "model.width": 48, "model.depth": 3})
    both |= {key: value for key, value in one.items() if key.startswith("augment")}
    state = opened(tmp_path / "run", {**both, "model.heads": 3})
    assert state.student.backbone.channels == state.config.data.channels == 1


def test_a_run_resumes_exactly(tmp_path, wide):
    assert_resumes_exactly(tmp_path, pupil(wide, **{"budget.steps": 10}))


def test_the_average_has_the_statistics_of_the_student(tmp_path, wide):
    """It sees no image itself: in the head, and in a backbone of timm."""
    statistics = {"head.batch_norm": "true", "teacher.momentum": 0.5}
    state = trained(tmp_path / "run", pupil(wide, **RESNET, **statistics, **{"budget.steps": 10}))
    ours, theirs = dict(state.teacher.named_buffers()), dict(state.student.named_buffers())
    assert len(ours) > 20
    for name, statistic in theirs.items():
        if name.endswith("running_mean"):
            assert statistic.abs().max() > 0
            assert (ours[name] - statistic).norm() < 0.5 * statistic.norm(), name
        elif name.endswith("num_batches_tracked"):
            assert ours[name] == statistic > 0


def test_masked_patches_are_learned_without_hiding_them(tmp_path):
    trained(tmp_path / "teacher", {**WIDE, **PATCHES, "head.shared": "false"})
    settings = {"teacher.weights": tmp_path / "teacher", **PATCHES}
    state = trained(tmp_path / "run", {**settings, "budget.steps": 10})
    assert not state.config.head.shared
    assert "patch.center" in tensors(tmp_path / "run", 10)
    assert "patch" in state.objective.state
    assert state.student.backbone.mask_token is None
    with pytest.raises(
        ValueError, match=r"sees 6 × 6 patches of a global view where the student sees 12 × 12"
    ):
        opened(tmp_path / "other", {**settings, "model.patch_size": 4})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"head.prototypes": 64}, "head.prototypes=64 (there 128) does not match teacher.weights="),
        ({"views.global_size": 36, "model.patch_size": 4}, "does not take global views: an image of 36 × 36"),
        (
            {"teacher.weights": "nowhere"},
            "nowhere does not exist; train a network first (`dino-vit pretrain IMAGES FOLDER`), or give",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_learned_is_refused(tmp_path, wide, change, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        opened(tmp_path / "run", {**pupil(wide), **change})


def test_a_teacher_is_recognised_by_what_its_file_holds(tmp_path, wide):
    """A checkpoint anywhere has heads; a file of another library in a folder `checkpoints` has none."""
    path = tmp_path / "elsewhere.safetensors"
    path.write_bytes(Checkpoints(wide).paths()[-1].read_bytes())
    assert opened(tmp_path / "a", pupil(path)).objective.state["cls"].center.shape == (1, 128)
    (tmp_path / "checkpoints").mkdir()
    for name in ("timm.pth", "timm.safetensors"):
        dino_vit.export_backbone(dino_vit.load_backbone(wide), tmp_path / "checkpoints" / name, "timm")
        assert not opened(tmp_path / name, pupil(tmp_path / "checkpoints" / name)).objective.state


@pytest.mark.parametrize("key", ["teacher.weights", "gram.weights"])
def test_a_run_does_not_learn_from_itself_nor_from_what_has_changed(tmp_path, key):
    short = {"budget.steps": 5, "optim.warmup_epochs": 0}
    with pytest.raises(ValueError, match=f"{key}=.* is the run itself; give another"):
        opened(tmp_path / "run", {**short, key: tmp_path / "run"})
    settings = {**short, key: tmp_path / "teacher"}
    trained(tmp_path / "teacher", short)
    trained(tmp_path / "run", settings)
    opened(tmp_path / "run", settings)
    trained(tmp_path / "teacher", {**short, "budget.steps": 10, "compute.resume": "changed"})
    with pytest.raises(ValueError, match=rf"the weights of {key}=.* have changed"):
        opened(tmp_path / "run", settings)
