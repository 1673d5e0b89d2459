"""Histograms of oriented gradients as loops, and the baselines as backbones."""

import math

import pytest
import torch

from dino_vit.models.backbone import CLS, FeatureSpec
from dino_vit.models.edges import edge_histograms
from dino_vit.weights.baselines import Baseline


def images(channels=3, size=(48, 48)):
    return torch.randn(2, channels, *size, generator=torch.Generator().manual_seed(0))


def histograms_naive(image):
    """Return the histograms of one image (c, H, W), pixel by pixel and block by block, in Python numbers."""
    _, height, width = image.shape
    channels = image.double().tolist()
    cells = [[[0.0] * 9 for _ in range(width // 8)] for _ in range(height // 8)]
    for y in range(height // 8 * 8):
        for x in range(width // 8 * 8):
            gradients = []
            for channel in channels:
                dx = channel[y][min(x + 1, width - 1)] - channel[y][max(x - 1, 0)]
                dy = channel[min(y + 1, height - 1)][x] - channel[max(y - 1, 0)][x]
                gradients.append((math.hypot(dx, dy), math.degrees(math.atan2(dy, dx)) % 180))
            length, degrees = max(gradients)
            for orientation in range(9):
                distance = abs(degrees - (20 * orientation + 10))
                distance = min(distance, 180 - distance)
                cells[y // 8][x // 8][orientation] += length * max(0.0, 1 - distance / 20) / 64
    rows = []
    for y in range(height // 8 - 1):
        for x in range(width // 8 - 1):
            block = cells[y][x] + cells[y][x + 1] + cells[y + 1][x] + cells[y + 1][x + 1]
            norm = math.sqrt(sum(value**2 for value in block))
            block = [min(value / norm, 0.2) for value in block]
            norm = math.sqrt(sum(value**2 for value in block))
            rows.append([value / norm for value in block])
    return torch.tensor(rows).reshape(height // 8 - 1, width // 8 - 1, 36)


@pytest.mark.parametrize(("channels", "size"), [(3, (48, 48)), (1, (16, 27)), (5, (33, 24))])
def test_edge_histograms_are_those_of_loops(channels, size):
    given = images(channels, size)
    ours = edge_histograms(given)
    for row, image in zip(ours, given, strict=True):
        expected = histograms_naive(image)
        y, x, _ = expected.shape
        torch.testing.assert_close(row.view(36, y, x), expected.permute(2, 0, 1), rtol=1e-4, atol=1e-5)


def test_gradients_hardly_depend_on_lighting_and_contrast():
    given = images()
    torch.testing.assert_close(edge_histograms(3 * given + 2), edge_histograms(given))
    assert not edge_histograms(torch.ones(1, 3, 48, 48)).any()


@pytest.mark.parametrize(("name", "width"), [("pixels", 4 * 32 * 32), ("edges", 900)])
def test_baselines_are_backbones(name, width):
    model = Baseline(name=name, channels=4)
    given = images(4, model.image_size)
    assert CLS.shape(model, model.image_size) == (width,)
    assert model(given).shape == (2, width)
    torch.testing.assert_close(FeatureSpec().extract(model, given), model.forward_features(given)[:, 0])
    assert Baseline(**model.architecture).width == width
    assert not model.state_dict()
    with pytest.raises(ValueError, match=f"blocks=2: {name} are of one block"):
        model.get_intermediate_layers(given, 2)


def test_gradients_need_two_cells():
    assert Baseline(name="edges", image_size=(16, 24)).width == 2 * 36
    with pytest.raises(ValueError, match="edges need images of 16 pixels or more"):
        Baseline(name="edges", image_size=12)
