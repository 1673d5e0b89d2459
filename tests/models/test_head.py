import copy

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

from dino_vit.models.head import DINOHead, convert_sync_batchnorm

SMALL = {"in_dim": 6, "prototypes": 20, "hidden_dim": 16, "bottleneck_dim": 8}


@pytest.mark.parametrize(("batch_norm", "linears"), [(False, ["0.", "2.", "4."]), (True, ["0.", "3.", "6."])])
def test_parameters_are_named_as_in_the_reference(batch_norm, linears):
    head = DINOHead(**SMALL, batch_norm=batch_norm)
    shapes = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    weights = {name for name, shape in shapes.items() if name.startswith("mlp") and len(shape) == 2}
    assert weights == {f"mlp.{linear}weight" for linear in linears}
    assert shapes["last_layer.weight_g"] == (20, 1)
    assert shapes["last_layer.weight_v"] == (20, 8)


def test_forward_is_the_naive_head():
    head = DINOHead(**SMALL, norm_last_layer=False).double()
    nn.init.uniform_(head.last_layer.weight_g, 0.5, 2.0)
    x = torch.randn(5, 6, dtype=torch.double)
    state = head.state_dict()
    h = x
    for layer in (0, 2, 4):
        h = h @ state[f"mlp.{layer}.weight"].T + state[f"mlp.{layer}.bias"]
        h = F.gelu(h) if layer < 4 else h
    for row in range(5):
        h[row] /= h[row].square().sum().sqrt()
    expected = torch.empty(5, 20, dtype=torch.double)
    for k in range(20):
        direction = state["last_layer.weight_v"][k] / state["last_layer.weight_v"][k].square().sum().sqrt()
        expected[:, k] = h @ (direction * state["last_layer.weight_g"][k])
    torch.testing.assert_close(head(x), expected)
    torch.testing.assert_close(head.project(x) @ head.last_layer.weight().T, expected)


def test_gradients_are_those_of_weight_norm():
    head = DINOHead(**SMALL, norm_last_layer=False).double()
    peer = nn.utils.parametrizations.weight_norm(nn.Linear(8, 20, bias=False).double())
    with torch.no_grad():
        peer.parametrizations.weight.original0.copy_(head.last_layer.weight_g)
        peer.parametrizations.weight.original1.copy_(head.last_layer.weight_v)
    x, upstream = torch.randn(5, 8, dtype=torch.double), torch.randn(5, 20, dtype=torch.double)
    head.last_layer(x).backward(upstream)
    peer(x).backward(upstream)
    torch.testing.assert_close(head.last_layer.weight_g.grad, peer.parametrizations.weight.original0.grad)
    torch.testing.assert_close(head.last_layer.weight_v.grad, peer.parametrizations.weight.original1.grad)


def test_initialisation_is_the_recipe():
    head = DINOHead(in_dim=300, hidden_dim=400, bottleneck_dim=100, prototypes=1000)
    for layer in (0, 2, 4):
        assert head.mlp[layer].weight.std().item() == pytest.approx(0.02, rel=0.05)
        assert not head.mlp[layer].bias.any()
    direction = head.last_layer.weight_v
    assert direction.std().item() == pytest.approx(0.1 / 3**0.5, rel=0.02)  # uniform within 1 / sqrt(100)
    assert direction.abs().max() <= 0.1
    assert (head.last_layer.weight_g == 1).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_features_are_normalised_in_float32_under_autocast(dtype):
    head = DINOHead(**SMALL)
    with torch.no_grad():
        head.mlp[4].weight.mul_(1e-3)  # the squares of such features vanish in float16
    with torch.autocast("cpu", dtype):
        features = head.project(torch.randn(4, 6))
        assert head(torch.randn(4, 6)).dtype == dtype
    assert features.dtype == torch.float32
    torch.testing.assert_close(features.norm(dim=1), torch.ones(4))


@pytest.mark.parametrize("kind", [torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, timm.layers.BatchNormAct2d])
def test_a_batch_norm_of_all_processes_can_be_copied(kind):
    network = torch.nn.Sequential(kind(4), torch.nn.Identity())
    convert_sync_batchnorm(network)
    x = torch.randn(8, 4, *[3, 3][: 2 * (kind is not torch.nn.BatchNorm1d)])
    network(x)
    network.eval()
    copied = copy.deepcopy(network)
    assert type(copied[0]) is type(network[0])
    assert isinstance(copied[0], kind)
    assert torch.equal(copied(x), network(x))
