"""No step makes the host wait for a GPU or mixes devices, and the kernels of the recipe's step are few."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import dino_vit
from benchmarks.rehearsal import CUDA, HostWaits, Rehearsal, rehearsed_run
from benchmarks.step import FIXED
from dino_vit.config.loading import replace
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.core.distributed import end_processes
from dino_vit.method.optim import (
    build_optimizer,
    clip_gradients,
    ema_update,
    parameter_groups,
    reduce_loss,
    step_if_finite,
)
from dino_vit.training.loop import take_step
from tests.support.backbones import backbone
from tests.support.runs import RESNET
from tests.support.training import configured, trained

SMALL = {
    "data.augment_on": "device",
    "data.batch_size": 2,
    "views.local_count": 1,
    "run.precision": "bf16",
    "run.log_every": 1000,
    "budget.steps": 100,
}
PATCHES = {"loss.patch_weight": 1, "loss.koleo_weight": 0.1}
CASES = {  # beside the recipes themselves, whose kernels are counted below
    "float16": {"run.precision": "fp16", "optim.clip_mode": "module", "optim.accumulate": 2},
    "rotary": {
        "model.positions": "rotary",
        "model.rotary_rescale": 2,
        "model.drop_path": 0.2,
    },
    "recomputation": {"model.grad_checkpointing": "true", "optim.name": "sgd", "optim.layer_decay": 0.9},
    "patches with a mean": {
        **PATCHES,
        "loss.centering": "ema",
        "head.shared": "true",
        "optim.clip_mode": "none",
    },
    # With 16 views of 8 passes, half of which are masked, some pass has none.
    "no patches": {**PATCHES, "data.batch_size": 1, "optim.accumulate": 8, "loss.centering": "sinkhorn"},
    "resnet": {**RESNET, "optim.name": "lars", "optim.clip_mode": "global", "head.batch_norm": "true"},
    "imitation": {"teacher.weights": "wide.safetensors", "teacher.patch_weight": 0.5, "run.precision": "no"},
    "gram": {**PATCHES, "teacher.weights": "run", "gram.weights": "run", "gram.scale": 2},
}
# A little more than the kernels of a step of ViT-S/16: 16 images, bf16, augment on the device.
MOST = {"dino": 1215, "dinov2": 1630}


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A backbone, and a run with heads for patches."""
    folder = tmp_path_factory.mktemp("weights")
    path = folder / "wide.safetensors"
    dino_vit.save_backbone(backbone(width=48, heads=3), path, mean=(0.5,) * 3, std=(0.2,) * 3)
    trained(folder / "run", {**PATCHES, "budget.steps": 10, "run.log_every": 10, "run.checkpoint_every": 10})
    return folder


@pytest.mark.parametrize("name", CASES)
def test_no_step_waits_or_mixes_devices(tmp_path, weights, name):
    paths = {key: weights / str(value) for key, value in CASES[name].items() if key.endswith(".weights")}
    config = configured(tmp_path / "run", {**SMALL, **CASES[name], **paths})
    with rehearsed_run(config) as (rehearsal, state):
        rehearsal.restart()
        take_step(state, state.loader.batches())
        assert min(rehearsal.by_part[part] for part in ("backward", "student")) > rehearsal.by_part["centre"]
        assert rehearsal.by_part["clipping"] < 20
        with pytest.raises(HostWaits):
            state.read_interval()


def test_a_logged_step_waits_only_when_it_is_read(tmp_path):
    with rehearsed_run(configured(tmp_path / "run", {**SMALL, **PATCHES, "run.log_every": 1})) as (_, state):
        take_step(state, state.loader.batches())
        assert {"output_entropy", "patch_output_entropy", "koleo"} < state.outputs.keys()
        assert {value.device.type for value in state.outputs.values()} == {"cuda"}
        with pytest.raises(HostWaits):
            state.outputs["koleo"].item()


@pytest.mark.parametrize("method", [pytest.param("dino", marks=pytest.mark.slow), "dinov2"])
def test_a_step_of_the_recipe_takes_no_more_kernels_than_it_did(tmp_path, method):
    settings = {**FIXED, "method": method, "data.source": "synthetic:64:96", "output": str(tmp_path)}
    settings |= {"data.augment_on": "device", "data.mean": (0.5,) * 3, "data.std": (0.2,) * 3}
    settings |= {"data.batch_size": 16, "run.precision": "bf16"}
    # It would raise if it made the host wait, like the steps above.
    with rehearsed_run(replace(PretrainConfig(), settings)) as (rehearsal, state):
        rehearsal.restart()
        take_step(state, state.loader.batches())
    assert 0.97 * MOST[method] < rehearsal.kernels.total() <= MOST[method], rehearsal.by_part


@pytest.fixture
def shards():
    """A student and a teacher as FSDP leaves them to the first of two processes: half of each tensor."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    with Rehearsal(answers=True) as rehearsal:
        mesh = DeviceMesh.from_group(dist.group.WORLD, "cuda")

        def half(tensor):
            # Of tensors of the processes together: what FSDP calls a shard.
            return DTensor.from_local(tensor.chunk(2)[0].clone(), mesh, [Shard(0)], run_check=False)

        networks = []
        for _ in range(2):
            network = backbone().to(CUDA)
            for parameter in network.parameters():
                parameter.data = torch.cat([parameter.data, parameter.data])  # which two processes can halve
            for module in network.modules():
                for name, parameter in module.named_parameters(recurse=False):
                    setattr(module, name, nn.Parameter(half(parameter.data)))
            networks.append(network)
        for parameter in networks[0].parameters():
            parameter.grad = torch.ones_like(parameter)
        yield rehearsal, *networks
    end_processes()


@pytest.mark.parametrize("mode", ["tensor", "module", "global", "none"])
def test_a_step_on_shards_ends_on_a_gpu(shards, mode):
    rehearsal, student, teacher = shards
    optimizer = build_optimizer("adamw", parameter_groups(student))
    rehearsal.restart()
    norm = clip_gradients([list(student.parameters())], mode=mode, max_norm=3.0)
    assert rehearsal.kernels.total() < 60, "one for every tensor"
    _, finite = reduce_loss(torch.ones((), device=CUDA), norm)
    step_if_finite(optimizer, finite)
    ema_update(list(teacher.parameters()), list(student.parameters()), 0.99)
