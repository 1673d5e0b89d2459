import copy

import pytest
import torch
from torch import nn

from dino_vit.method.optim import (
    build_optimizer,
    clip_gradients,
    ema_update,
    parameter_groups,
    reduce_loss,
    set_rates,
    step_if_finite,
)
from dino_vit.models.vit import VisionTransformer


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.cls_token = nn.Parameter(torch.randn(1, 1, 4))
        self.pos_embed = nn.Parameter(torch.randn(1, 5, 4))
        self.patch_embed = nn.Conv2d(3, 4, 2)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.norm = nn.LayerNorm(4)
        self.depth = 2

    layers = VisionTransformer.layers


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Linear(4, 3)
        self.gain = nn.Parameter(torch.ones(3, 1))
        self.frozen = nn.Parameter(torch.ones(3, 1), requires_grad=False)


def make_gradients(*modules, size=1.0):
    generator = torch.Generator().manual_seed(0)
    for module in modules:
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.grad = size * torch.randn(parameter.shape, generator=generator)


def parameters_of(modules):
    return [list(module.parameters()) for module in modules]


def described(groups, *modules):
    """Return {name: (decay_scale, lr_scale)}; every trainable parameter must be there exactly once."""
    names = {parameter: name for module in modules for name, parameter in module.named_parameters()}
    listed = [parameter for group in groups for parameter in group["params"]]
    assert len(listed) == len(set(listed))
    return {
        names[parameter]: (group["decay_scale"], group["lr_scale"])
        for group in groups
        for parameter in group["params"]
    }


def test_biases_and_vectors_are_not_decayed():
    backbone, head = Backbone(), Head()
    groups = parameter_groups(backbone, head)
    assert len(groups) == 2
    scales = described(groups, backbone, head)
    decayed = {name for name, (decays, _) in scales.items() if decays}
    weights = {f"{module}.weight" for module in ("patch_embed", "blocks.0", "blocks.1", "mlp")}
    assert decayed == {"cls_token", "pos_embed", "gain"} | weights
    biases = {name.replace("weight", "bias") for name in weights}
    assert set(scales) - decayed == {"norm.weight", "norm.bias"} | biases
    assert {scale for _, scale in scales.values()} == {1.0}


def test_layer_decay_goes_by_depth_and_rates_reach_their_groups():
    backbone, head = Backbone(), Head()
    groups = parameter_groups(backbone, head, layer_decay=0.5)
    scales = described(groups, backbone, head)
    expected = {
        "cls_token": 1 / 8,
        "pos_embed": 1 / 8,
        "patch_embed": 1 / 8,
        "blocks.0": 1 / 4,
        "blocks.1": 1 / 2,
    }
    for name, (_, scale) in scales.items():
        assert scale == next((s for start, s in expected.items() if name.startswith(start)), 1.0), name
    optimizer = build_optimizer("sgd", groups)
    set_rates(optimizer, lr=8.0, weight_decay=0.3)
    for group in optimizer.param_groups:
        assert group["lr"] == 8.0 * group["lr_scale"]
        assert group["weight_decay"] == 0.3 * group["decay_scale"]


def naive_adamw(parameter, gradients, lr, weight_decay):
    first, second = torch.zeros_like(parameter), torch.zeros_like(parameter)
    for t, gradient in enumerate(gradients, start=1):
        parameter = parameter * (1 - lr * weight_decay)
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        parameter = parameter - lr * (first / (1 - 0.9**t)) / ((second / (1 - 0.999**t)).sqrt() + 1e-8)
    return parameter


def naive_sgd(parameter, gradients, lr, weight_decay):
    momentum = torch.zeros_like(parameter)
    for gradient in gradients:
        momentum = 0.9 * momentum + gradient + weight_decay * parameter
        parameter = parameter - lr * momentum
    return parameter


NAIVE = {"adamw": naive_adamw, "sgd": naive_sgd}


@pytest.mark.parametrize("devices", [("cpu",), ()], ids=["fused", "plain"])
@pytest.mark.parametrize("name", NAIVE)
def test_optimizers_are_their_formulas(monkeypatch, name, devices):
    """Also past a step that is not finite, the very first one included, which must leave no trace."""
    monkeypatch.setattr("dino_vit.method.optim.SKIPPING_DEVICES", devices)
    head = Head()
    expected = {n: p.detach().clone() for n, p in head.named_parameters()}
    optimizer = build_optimizer(name, parameter_groups(head))
    gradients = {n: torch.randn(4, *p.shape) for n, p in expected.items()}
    for step in (None, 0, 1, None, 2, 3):
        for n, parameter in head.named_parameters():
            if parameter.requires_grad:
                parameter.grad = (
                    torch.full_like(parameter, float("nan")) if step is None else gradients[n][step]
                )
        set_rates(optimizer, lr=0.1, weight_decay=0.2)
        step_if_finite(optimizer, torch.tensor(step is not None))
    for n, parameter in head.named_parameters():
        if parameter.requires_grad:
            decay = 0.2 if parameter.ndim != 1 else 0.0
            wanted = NAIVE[name](expected[n], gradients[n], lr=0.1, weight_decay=decay)
            torch.testing.assert_close(parameter.detach(), wanted, rtol=1e-5, atol=1e-6, msg=n)
    assert torch.equal(head.frozen, expected["frozen"])


@pytest.mark.parametrize("name", NAIVE)
def test_parameters_without_a_gradient_are_skipped(name):
    head = Head()
    before = copy.deepcopy(head)
    optimizer = build_optimizer(name, parameter_groups(head))
    set_rates(optimizer, lr=0.1, weight_decay=0.1)
    make_gradients(head)
    head.mlp.zero_grad(set_to_none=True)  # as the loop does
    step_if_finite(optimizer, torch.tensor(True))
    assert torch.equal(head.mlp.weight, before.mlp.weight)
    assert torch.equal(head.mlp.bias, before.mlp.bias)
    assert not torch.equal(head.gain, before.gain)


@pytest.mark.parametrize("mode", ["tensor", "module", "global", "none"])
@pytest.mark.parametrize("size", [0.01, 1.0])
def test_clip_modes(mode, size):
    modules = [Backbone(), Head()]
    make_gradients(*modules, size=size)
    modules[1].mlp.bias.grad *= 1e-3  # stays below the limit when every tensor has its own
    before = [[p.grad.clone() for p in m.parameters() if p.grad is not None] for m in modules]
    norm = clip_gradients(parameters_of(modules), mode=mode, max_norm=1.5)
    everything = [gradient for part in before for gradient in part]
    torch.testing.assert_close(norm, torch.cat([gradient.flatten() for gradient in everything]).norm())
    together = {
        "tensor": [[gradient] for gradient in everything],
        "module": before,
        "global": [everything],
        "none": [],
    }[mode]
    factors = [1.0] * len(everything) if mode == "none" else []
    for part in together:
        total = torch.cat([gradient.flatten() for gradient in part]).norm().item()
        factor = 1.5 / (total + 1e-6)
        factors += [factor if factor < 1 else 1.0] * len(part)
    after = [p.grad for m in modules for p in m.parameters() if p.grad is not None]
    for gradient, was, factor in zip(after, everything, factors, strict=True):
        torch.testing.assert_close(gradient, was * factor)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_step_is_finite_if_its_loss_and_every_gradient_are(wrong):
    modules = [Backbone(), Head()]
    make_gradients(*modules)
    norm = clip_gradients(parameters_of(modules), mode="tensor", max_norm=3.0)
    assert reduce_loss(torch.tensor(1.5), norm) == (1.5, True)
    assert not reduce_loss(torch.tensor(wrong), norm)[1]
    modules[1].gain.grad[1, 0] = wrong
    norm = clip_gradients(parameters_of(modules), mode="tensor", max_norm=3.0)
    assert not reduce_loss(torch.tensor(1.0), norm)[1]


@pytest.mark.parametrize("momentum", [0.996, 0.3, 0.0, 1.0])
def test_ema_is_its_formula(momentum):
    teacher, student = Backbone(), Backbone()
    expected = [
        momentum * t + (1 - momentum) * s
        for t, s in zip(teacher.parameters(), student.parameters(), strict=True)
    ]
    ema_update(*parameters_of([teacher, student]), momentum)
    for parameter, wanted in zip(teacher.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.detach(), wanted.detach())
        assert parameter.requires_grad


def test_statistics_are_averaged_and_counts_copied():
    teacher, student = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    student(torch.randn(8, 3))
    expected = torch.lerp(teacher.running_var, student.running_var, 0.25)
    ema_update(list(teacher.buffers()), list(student.buffers()), 0.75)
    assert torch.equal(teacher.running_var, expected)
    assert teacher.num_batches_tracked == 1
