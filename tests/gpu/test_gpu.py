"""What a GPU computes is what the CPU computes, within the tolerance of float32: run by `make test-gpu`."""

import json

import numpy as np
import pytest
import torch

from dino_vit import VisionTransformer
from dino_vit.data.sources.synthetic import SyntheticSource
from dino_vit.eval.features import FrozenBackbone
from dino_vit.eval.knn import nearest
from dino_vit.method.optim import clip_gradients
from dino_vit.models.positions import interpolate_pos_embs
from dino_vit.views.augment import Augment, Column
from dino_vit.views.eval_transform import EvalTransform
from tests.support.runs import run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="no CUDA device; run `make test-gpu` where there is one",
    ),
]
DEVICE = torch.device("cuda")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def losses(output):
    return [json.loads(line)["loss"] for line in (output / "metrics.jsonl").read_text().splitlines()]


def test_training_steps_have_the_losses_of_the_cpu(tmp_path):
    settings = {"data.augment_on": "device", "budget.steps": 10}
    run(tmp_path / "gpu", settings)
    run(tmp_path / "cpu", settings, environ={"CUDA_VISIBLE_DEVICES": ""})
    ours, expected = losses(tmp_path / "gpu"), losses(tmp_path / "cpu")
    assert len(ours) == 10
    assert ours == pytest.approx(expected, rel=1e-3)


def test_a_run_in_automatic_precision_resumes_on_the_gpu(tmp_path):
    settings = {"run.precision": "auto", "data.workers": 2}
    run(tmp_path / "run", {**settings, "budget.steps": 10})
    run(tmp_path / "run", {**settings, "budget.steps": 15, "run.resume": "changed"})
    found = losses(tmp_path / "run")
    assert len(found) == 15
    assert np.isfinite(found).all()


@pytest.mark.parametrize("mode", ["hf", "dino", "timm"])
def test_positions_are_those_of_the_cpu_and_their_gradient_is_the_same_every_time(mode):
    positions, upstream = torch.randn(1, 197, 384), torch.randn(1, 37, 384)

    def resampled(device):
        leaf = positions.to(device).requires_grad_()
        found = interpolate_pos_embs(leaf, (6, 6), trained_grid=(14, 14), mode=mode)
        return found.detach(), torch.autograd.grad(found, leaf, upstream.to(device))[0]

    first, *others = [resampled(DEVICE) for _ in range(20)]
    for found, expected in zip(first, resampled("cpu"), strict=True):
        assert torch.allclose(found.cpu(), expected, atol=1e-5)
    assert all(torch.equal(gradient, first[1]) for _, gradient in others)


def test_features_are_those_of_the_cpu():
    model = VisionTransformer(image_size=32, patch_size=8, width=192, depth=4, heads=3).eval()
    source, transform = (
        SyntheticSource(length=40, size=40),
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
    for device in ("cpu", "cuda"):
        generator = torch.Generator().manual_seed(0)
        for parameter in (parameter for network in networks for parameter in network.parameters()):
            parameter.grad = None
            parameter.data = parameter.data.to(device)
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(device)
        clip_gradients([list(n.parameters()) for n in networks], mode=mode, max_norm=0.3)
        gradients[device] = [p.grad.cpu() for network in networks for p in network.parameters()]
    for found, expected in zip(gradients["cuda"], gradients["cpu"], strict=True):
        assert torch.allclose(found, expected, atol=1e-6)


def test_photometry_is_that_of_the_cpu():
    rows = torch.zeros(64, len(Column))
    rows[:, Column.ORDER] = torch.randint(24, (64,)).float()
    rows[:, Column.BRIGHTNESS : Column.HUE] = torch.rand(64, 3) * 0.8 + 0.6
    rows[:, Column.HUE] = torch.rand(64) * 0.2 - 0.1
    values = {"FLIP": 1, "JITTER": 1, "GREY": 1, "SIGMA": 1.3, "SOLARISE": 1}
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
    cosines, rows = nearest(bank.to(DEVICE), queries.to(DEVICE), k=20, self_offset=self_offset)
    assert torch.allclose(cosines.cpu(), expected, atol=1e-5)
    # Equally near rows may change places: what counts is how near the rows are that were found.
    found = torch.nn.functional.normalize(bank, dim=1)[rows.cpu()]
    products = (found * torch.nn.functional.normalize(queries, dim=1)[:, None]).sum(dim=2)
    assert torch.allclose(products, expected, atol=1e-5)
