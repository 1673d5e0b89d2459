"""A GPU computes what the CPU computes, within the tolerance of the precision: run by `make test-gpu`.

`tests/rehearsal/test_gpu_tests.py` runs them on a CPU, so that they fail for no other reason.
"""

import os

import numpy as np
import pytest
import torch

from dino_vit import VisionTransformer
from dino_vit.core.distributed import apply_fsdp, full_tensor
from dino_vit.data.synthetic import make_textures
from dino_vit.eval.neighbours import FAISS, _gpu_resources, nearest
from dino_vit.features.frozen import FrozenBackbone
from dino_vit.method.cross_entropy import LazyLogits
from dino_vit.method.optim import clip_gradients
from dino_vit.models.positions import interpolate_pos_embs
from dino_vit.views.augment import Augment, Column
from dino_vit.views.eval_transform import EvalTransform
from tests.support.images import write_synthetic
from tests.support.processes import free_port, run_in_two
from tests.support.runs import RESNET, history, run
from tests.support.training import trained

DEVICE = torch.device(os.environ.get("TEST_GPU_ON", "cuda"))
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE.type == "cuda" and not torch.cuda.is_available(),
        reason="no CUDA device; run `make test-gpu` where there is one",
    ),
]
on_cuda = pytest.mark.skipif(DEVICE.type != "cuda", reason="of CUDA alone")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


BACKENDS = {"cuda": "nccl", "cpu": "gloo"}
PATCHES = {"loss.patch_weight": 1, "loss.koleo_weight": 0.1, "loss.centering": "sinkhorn"}
PATCHES["loss.edge_weight"] = 2
CASES = {  # settings, and how far a loss may be off
    "float32": ({}, 1e-3),
    "bf16": ({"compute.precision": "bf16"}, 0.05),
    "fp16": ({"compute.precision": "fp16", "optim.clip_mode": "module"}, 0.2),
    # With 4 views of 8 passes, half of which are masked, some pass has none.
    "no patches": ({**PATCHES, "loss.koleo_weight": 0, "data.batch_size": 1, "optim.accumulate": 8}, 1e-3),
    "compiled": ({"compute.compile": "true"}, 1e-3),
    "compiled, with patches": ({**PATCHES, "compute.compile": "true", "compute.precision": "bf16"}, 0.05),
    "resnet": ({**RESNET, "head.batch_norm": "true", "compute.precision": "bf16"}, 0.1),
}


def losses(output):
    return [metrics["loss"] for metrics in history(output)]


@pytest.mark.parametrize("name", CASES)
def test_training_steps_have_the_losses_of_the_cpu(tmp_path, name):
    settings, tolerance = CASES[name]
    settings = {"budget.steps": 10 if DEVICE.type == "cuda" else 1, **settings}
    settings |= {"optim.warmup_epochs": 0, "optim.freeze_last_layer_epochs": 0}
    run(tmp_path / "gpu", settings)
    ours = np.array(losses(tmp_path / "gpu"), dtype=float)
    taken = np.isfinite(ours)  # in float16 the first steps are skipped, until the scale is found
    assert taken.sum() >= settings["budget.steps"] - (9 if name == "fp16" else 0)
    if DEVICE.type == "cuda":
        on_cpu = {**settings, "compute.compile": "false", "compute.precision": "no"}
        run(tmp_path / "cpu", on_cpu, environ={"CUDA_VISIBLE_DEVICES": ""})
        assert ours[taken] == pytest.approx(
            np.array(losses(tmp_path / "cpu"), dtype=float)[taken], rel=tolerance
        )


@pytest.mark.parametrize("settings", [{"model.drop_path": 0.2}, PATCHES], ids=["dino", "dinov2"])
def test_compiled_blocks_have_the_losses_of_plain_ones(tmp_path, monkeypatch, settings):
    """As in a run of many steps; a CPU has no Triton, and compiles nothing."""
    settings = {"budget.steps": 6, "optim.warmup_epochs": 0, "compute.precision": "bf16", **settings}
    trained(tmp_path / "plain", {**settings, "compute.compile": "false"})
    monkeypatch.setattr("dino_vit.training.networks.choose_compile", lambda wanted, *_: wanted == "auto")
    state = trained(tmp_path / "compiled", settings)
    assert all(term.compiled == (DEVICE.type == "cuda") for term in state.objective.terms)
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "plain"), rel=0.05)


@pytest.mark.parametrize("rows", [0, 50])
def test_the_teachers_logits_are_those_of_float32(rows):
    features, prototypes = (torch.randn(n, 256, device=DEVICE) for n in (rows, 1000))
    features, center = torch.nn.functional.normalize(features), torch.rand(1, 1000, device=DEVICE)
    prototypes = torch.nn.functional.normalize(prototypes)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        logits = LazyLogits.of(features, prototypes)
        assert logits[:].dtype == torch.float32
        torch.testing.assert_close(
            logits[:], features.double() @ prototypes.T.double(), atol=1e-4, rtol=0, check_dtype=False
        )
        scores = logits.scores(slice(None), center, 0.04)
    torch.testing.assert_close(scores, (logits[:] - center) / 0.04)


def test_a_run_is_evaluated_on_the_images_of_val(tmp_path):
    for number in range(24):
        split = "val" if number % 3 == 0 else "train"
        write_synthetic(tmp_path / "images" / split / "ab"[number % 2] / f"{number}.png", number)
    settings = {
        "data.source": tmp_path / "images",
        "compute.eval_every": 1,
    }
    settings |= {"budget.steps": 2, "optim.warmup_epochs": 0, "optim.freeze_last_layer_epochs": 0}
    assert "val" in run(tmp_path / "run", settings)
    assert 0 <= history(tmp_path / "run")[-1]["knn"] <= 100


@on_cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
@pytest.mark.parametrize("sharded", ["false", "true"])
def test_two_gpus_follow_one(tmp_path, sharded):
    settings = {"model.drop_path": 0, "optim.clip_mode": "module", "compute.sharded": sharded}
    run(tmp_path / "one", {**settings, "data.batch_size": 16}, environ={"CUDA_VISIBLE_DEVICES": "0"})
    run_in_two(tmp_path / "two", {**settings, "data.batch_size": 8})
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-3)


def test_a_run_in_automatic_precision_resumes_on_the_gpu(tmp_path):
    settings = {"compute.precision": "auto", "data.workers": 2}
    settings |= {"optim.warmup_epochs": 0, "optim.freeze_last_layer_epochs": 0}
    run(tmp_path / "run", {**settings, "budget.steps": 2})
    run(tmp_path / "run", {**settings, "budget.steps": 3, "compute.resume": "changed"})
    found = losses(tmp_path / "run")
    assert len(found) == 3
    assert np.isfinite(found).all()


@pytest.mark.parametrize("mode", ["hf", "dino", "timm"])
def test_positions_are_those_of_the_cpu_and_their_gradient_is_the_same_every_time(mode):
    positions, upstream, matrices = torch.randn(1, 197, 384), torch.randn(1, 37, 384), {}

    def resampled(device):
        leaf = positions.to(device).requires_grad_()
        found = interpolate_pos_embs(leaf, (6, 6), trained_grid=(14, 14), mode=mode, matrices=matrices)
        return found.detach(), torch.autograd.grad(found, leaf, upstream.to(device))[0]

    first, *others = [resampled(DEVICE) for _ in range(20)]
    for found, expected in zip(first, resampled("cpu"), strict=True):
        assert torch.allclose(found.cpu(), expected, atol=1e-5)
    assert all(torch.equal(gradient, first[1]) for _, gradient in others)


def test_features_are_those_of_the_cpu():
    model = VisionTransformer(image_size=32, patch_size=8, width=192, depth=4, heads=3).eval()
    source, transform = (
        make_textures(length=40, size=40),
        EvalTransform(size=(32, 32), mean=MEAN, std=STD),
    )
    keywords = {"transform": transform, "batch_size": 16}
    expected = FrozenBackbone(model=model, **keywords).extract(source, range(40)).values
    found = FrozenBackbone(model=model.to(DEVICE), **keywords).extract(source, range(40)).values
    assert found.device.type == DEVICE.type
    assert torch.allclose(found.cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", ["tensor", "module", "global"])
def test_clipped_gradients_are_those_of_the_cpu(mode):
    networks = [torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3)) for _ in range(2)]
    gradients = {}
    for device in ("cpu", DEVICE):
        generator = torch.Generator().manual_seed(0)
        for parameter in (parameter for network in networks for parameter in network.parameters()):
            parameter.grad = None
            parameter.data = parameter.data.to(device)
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(device)
        clip_gradients([list(n.parameters()) for n in networks], mode=mode, max_norm=0.3)
        gradients[device] = [p.grad.cpu() for network in networks for p in network.parameters()]
    for found, expected in zip(gradients[DEVICE], gradients["cpu"], strict=True):
        assert torch.allclose(found, expected, atol=1e-6)


def test_gradients_of_shards_are_clipped_as_those_of_one_tensor(monkeypatch):
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}.items():
        monkeypatch.setenv(name, value)
    torch.distributed.init_process_group(BACKENDS[DEVICE.type], rank=0, world_size=1)
    try:
        norms = []
        for sharded in (False, True):
            torch.manual_seed(0)
            network = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3)).to(DEVICE)
            if sharded:
                apply_fsdp(network, network, [], DEVICE, torch.float32)
            network(torch.ones(2, 7, device=DEVICE)).square().sum().backward()
            clip_gradients([list(network.parameters())], mode="module", max_norm=0.3)
            gradients = [full_tensor(parameter.grad) for parameter in network.parameters()]
            norms.append(torch.stack(torch._foreach_norm(gradients)))
        assert torch.allclose(*norms)
    finally:
        torch.distributed.destroy_process_group()


def test_photometry_is_that_of_the_cpu():
    rows = torch.zeros(64, len(Column))
    rows[:, Column.ORDER] = torch.randint(24, (64,)).float()
    rows[:, Column.BRIGHTNESS : Column.HUE] = torch.rand(64, 3) * 0.8 + 0.6
    rows[:, Column.HUE] = torch.rand(64) * 0.2 - 0.1
    values = {"FLIP": 1, "JITTER": 1, "GREY": 1, "SIGMA": 1.3, "SOLARISE": 1}
    values |= {"VERTICAL_FLIP": 1, "ROTATION": torch.tensor([90, 180, 17.5, -40]).repeat(16)}
    for name, value in values.items():
        rows[:, getattr(Column, name)] = value * (torch.rand(64) < 0.5)
    images = torch.randint(0, 256, (64, 3, 48, 40), dtype=torch.uint8)
    augment = Augment(mean=MEAN, std=STD)
    expected = augment(images, rows)
    difference = (augment.to(DEVICE)(images.to(DEVICE), rows).cpu() - expected).abs()
    # Rounding decides on which side of the solarisation's threshold a value falls, one level apart at most.
    assert (difference > 1e-3).float().mean() < 1e-3
    assert difference.max() < 1.5 / 255 / min(STD)


@pytest.mark.parametrize("self_offset", [None, 100])
def test_neighbours_are_as_near_as_those_of_the_cpu(self_offset):
    bank = torch.randn(5000, 96)
    queries = bank[100:300] if self_offset else torch.randn(200, 96)
    expected, _ = nearest(bank, queries, k=20, self_offset=self_offset)
    if FAISS and DEVICE.type == "cuda":
        assert _gpu_resources() is not None, "this FAISS has no GPU: pip install faiss-gpu"
    cosines, rows = nearest(bank.to(DEVICE), queries.to(DEVICE), k=20, self_offset=self_offset)
    assert torch.allclose(cosines.cpu(), expected, atol=1e-5)
    # Equally near rows may change places: what counts is how near the rows are that were found.
    found = torch.nn.functional.normalize(bank, dim=1)[rows.cpu()]
    products = (found * torch.nn.functional.normalize(queries, dim=1)[:, None]).sum(dim=2)
    assert torch.allclose(products, expected, atol=1e-5)
