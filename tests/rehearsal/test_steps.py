"""No step makes the host wait for a GPU or mixes devices, and the kernels of the recipe's step are few."""

import pytest
import torch

import dino_vit
from benchmarks.step import FIXED
from dino_vit import VisionTransformer
from dino_vit.config.loading import load
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.core.distributed import all_gather_equal, any_process, broadcast_int
from dino_vit.training.loop import take_step
from tests.support.backbones import backbone
from tests.support.rehearsal import HostWaits, Rehearsal, one_of_two, rehearsed_run
from tests.support.runs import RESNET, ROOT
from tests.support.training import configured, trained

SMALL = {
    "data.batch_size": 2,
    "views.local_count": 1,
    "compute.precision": "bf16",
    "compute.log_every": 1000,
    "budget.steps": 100,
}
PATCHES = {"loss.patch_weight": 1, "loss.koleo_weight": 0.1, "loss.edge_weight": 2}
ROTARY = {"model.positions": "rotary", "model.rotary_rescale": 2, "model.drop_path": 0.2}
AGAIN = {"model.grad_checkpointing": "true", "model.patch_drop": 0.5}
ALONE = {"loss.patch_weight": 1, "data.batch_size": 1, "optim.accumulate": 8, "loss.centering": "sinkhorn"}
CASES = {  # beside the recipes themselves, whose kernels are counted below
    "rotary": {**ROTARY, "compute.precision": "fp16", "optim.clip_mode": "module", "optim.accumulate": 2},
    "recomputation": {**AGAIN, "optim.name": "sgd", "optim.layer_decay": 0.9},
    # With 16 views of 8 passes, half of which are masked, some pass has none.
    "no patches": {**ALONE, "optim.clip_mode": "none"},
    "imitation": {
        "teacher.weights": "wide.safetensors",
        "teacher.patch_weight": 0.5,
        "compute.precision": "no",
    },
    "gram": {**PATCHES, "teacher.weights": "run", "gram.weights": "run", "gram.scale": 2},
}
# A little more than the kernels of a step of four blocks of ViT-S/16: 16 images, bf16, augment on device.
# A bound moves down with each mend.
MOST = {"dino": 745, "dinov2": 1040}
FOUR_BLOCKS = {"model.arch": None, "model.width": 384, "model.depth": 4, "model.heads": 6}


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A backbone, and a run with heads for patches."""
    folder = tmp_path_factory.mktemp("weights")
    path = folder / "wide.safetensors"
    dino_vit.save_backbone(backbone(width=48, heads=3), path, mean=(0.5,) * 3, std=(0.2,) * 3)
    trained(
        folder / "run",
        {**PATCHES, "budget.steps": 10, "compute.log_every": 10, "compute.checkpoint_every": 10},
    )
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
            state.interval.read()


def test_a_logged_step_waits_only_when_it_is_read(tmp_path):
    with rehearsed_run(configured(tmp_path / "run", {**SMALL, **PATCHES, "compute.log_every": 1})) as (
        _,
        state,
    ):
        take_step(state, state.loader.batches())
        statistics = state.objective.figures()
        assert {"output_entropy", "patch_output_entropy", "koleo"} < statistics.keys()
        assert {value.device.type for value in statistics.values()} == {"cuda"}
        with pytest.raises(HostWaits):
            statistics["koleo"].item()


@pytest.mark.parametrize("method", MOST)
def test_a_step_of_the_recipe_takes_no_more_kernels_than_it_did(tmp_path, method):
    settings = {**FIXED, "data.source": "synthetic:16:96", "data.batch_size": 16, "method": method}
    settings |= {"data.mean": (0.5,) * 3, "data.std": (0.2,) * 3, **FOUR_BLOCKS}
    config = load(PretrainConfig, None, {**settings, "compute.precision": "bf16", "output": str(tmp_path)})
    with rehearsed_run(config) as (rehearsal, state):
        batches = state.loader.batches()
        take_step(state, batches)  # which makes the matrix that resamples positions
        rehearsal.restart()
        take_step(state, batches)
        batches.close()
    assert 0.97 * MOST[method] < rehearsal.kernels.total() <= MOST[method], rehearsal.by_part
    # Which a GPU computes 16 times as fast in half precision; those of float32 are the blur's.
    assert rehearsal.products[torch.float32] < 1e-2 * rehearsal.products.total(), rehearsal.products


SHARDED = {"compute.sharded": "true", "head.batch_norm": "true"}
TWO_PROCESSES = {
    "shards": {**SHARDED, **PATCHES, "model.grad_checkpointing": "true", "optim.clip_mode": "module"},
    "shards in float16": {**SHARDED, "compute.precision": "fp16", "optim.accumulate": 2},
    "resnet": {**RESNET, "optim.name": "sgd", "optim.clip_mode": "global", "head.batch_norm": "true"},
}


@pytest.mark.parametrize("name", TWO_PROCESSES)
def test_no_step_of_two_processes_waits_or_mixes_devices(tmp_path, name):
    config = configured(tmp_path / "run", {**SMALL, **TWO_PROCESSES[name]})
    with one_of_two(), rehearsed_run(config) as (rehearsal, state):
        assert state.sharded == ("shards" in name)
        if name == "resnet":
            convolutions = [weight for weight in state.student.parameters() if weight.ndim == 4]
            assert all(weight.is_contiguous(memory_format=torch.channels_last) for weight in convolutions)
        rehearsal.restart()
        take_step(state, state.loader.batches())
        assert rehearsal.by_part["clipping"] < 60, "one for every tensor"
        rehearsal.answers = True
        state.begin_save()
        whole = {name: tensor.shape for name, tensor in state.writer._copy.items()}
        assert whole["student.head.last_layer.weight_v"] == whole["teacher.head.last_layer.weight_v"]
        assert whole["student.head.last_layer.weight_v"][0] == state.config.head.prototypes
        assert state.writer.finish(wait=True).exists()


def test_hosts_agree_without_the_gpus():
    with one_of_two(), Rehearsal(answers=True) as rehearsal:
        any_process(False)  # the first time, the hosts connect
        rehearsal.waits.clear()
        any_process(False)
        broadcast_int(3)
        all_gather_equal(torch.zeros(2))
        assert not rehearsal.waits


def test_hosts_that_cannot_connect_are_a_sentence(monkeypatch):
    def fail(**_):
        raise RuntimeError("Gloo connectFullMesh failed")

    with one_of_two(), Rehearsal(answers=True):
        monkeypatch.setattr("torch.distributed.new_group", fail)
        with pytest.raises(ValueError, match="cannot connect by gloo: set GLOO_SOCKET_IFNAME"):
            any_process(False)


@pytest.mark.parametrize("name", ["vits16_dinov3", "vitb16_dinov3"])
def test_the_small_recipes_of_dinov3_are_rehearsed(tmp_path, name):
    """With all that their files set: from weights as DINOv3's are, and with an earlier teacher for Gram."""
    sizes = {"vits16_dinov3": {"width": 384, "heads": 6}, "vitb16_dinov3": {"width": 768, "heads": 12}}[name]
    sizes["depth"] = 2  # of 12
    layout = {"positions": "rotary", "registers": 4, "layer_scale": 1e-5, "norm_eps": 1e-5}
    published = VisionTransformer(patch_size=16, **sizes, **layout)
    weights = tmp_path / "published.safetensors"
    dino_vit.save_backbone(published, weights, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    small = {"data.source": "synthetic:16:64", "output": str(tmp_path / "run"), "views.local_count": 1}
    small |= {
        "head.prototypes": 64,
        "head.hidden_dim": 64,
        "data.batch_size": 2,
        "compute.eval_every": None,
    }
    small |= {
        "compute.precision": "bf16",
        "data.workers": 0,
        "budget.steps": 1000,
    }
    small |= {"model.arch": None, **{f"model.{name}": size for name, size in sizes.items()}}
    small |= {"init.weights": str(weights), "gram.weights": str(weights), "gram.weight": 2.0, "gram.scale": 2}
    config = load(PretrainConfig, ROOT / f"configs/pretrain/{name}.yaml", small)
    with rehearsed_run(config) as (_, state):
        kept = state.student.backbone.architecture
        assert {key: kept[key] for key in layout} == layout
        assert (kept["width"], kept["rotary_rescale"], kept["key_bias"]) == (sizes["width"], 2.0, None)
        batches = state.loader.batches()
        take_step(state, batches)  # raises where it would wait
        batches.close()
    weights = {term.name: term.weight for term in state.objective.terms}
    assert weights == {"cls": 1.0, "patch": 1.0, "koleo": 0.1, "gram": 2.0}
