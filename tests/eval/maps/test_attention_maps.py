import numpy as np
import pytest
import torch

from dino_vit.eval.maps import attention
from tests.support.backbones import backbone
from tests.support.close import assert_close_to_scale


def trained(**changes):
    model = backbone(heads=4, registers=3, **changes).train()
    with torch.no_grad():  # or all tokens are nearly alike, and so is their attention
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("block", [0, 1, -1])
def test_maps_of_the_class_token_are_its_attention_to_the_patches(block):
    model, images = trained(drop_path=0.5), torch.randn(2, 3, 24, 40)
    maps = attention.cls_attention(model, images, block)
    assert maps.shape == (2, 4, 3, 5)
    assert model.training, "the mode is as it was"
    expected = model.eval().get_attention(images, [block % 3])[0][:, :, 0, 4:]
    assert_close_to_scale(maps.flatten(2), expected)
    assert maps.flatten(2).std(-1).min() > 1e-3, "there is something to compare"


def naive_mask(values, share):
    marked, held = set(), 0.0
    order = sorted(range(len(values)), key=lambda i: -values[i])
    for index in order:
        if held >= share * sum(values):
            break
        marked.add(index)
        held += values[index]
    return [index in marked for index in range(len(values))]


@pytest.mark.parametrize("share", [0.01, 0.3, 0.6, 0.99])
def test_the_mask_is_the_smallest_set_that_holds_the_share(share):
    weights = torch.rand(3, 2, 5, 7, generator=torch.Generator().manual_seed(1)) ** 4
    maps = attention.mass_mask(weights, share)
    for values, mask in zip(weights.flatten(0, 1), maps.flatten(0, 1), strict=True):
        assert mask.flatten().tolist() == naive_mask(values.double().flatten().tolist(), share)
    assert attention.mass_mask(torch.full((2, 2), 0.25), 0.6).sum() == 3


def test_colours_are_the_principal_components_over_all_images():
    generator = torch.Generator().manual_seed(2)
    stretch = torch.diag(torch.tensor([9.0, 5.0, 2.0, 1.0, 0.5, 0.1]))
    turn = torch.linalg.qr(torch.randn(6, 6, generator=generator)).Q
    tokens = [torch.randn(y, x, 6, generator=generator) @ stretch @ turn for y, x in ((20, 30), (7, 50))]
    colours = attention.principal_colours(tokens)
    joined = np.concatenate([image.reshape(-1, 6).double().numpy() for image in tokens])
    centred = joined - joined.mean(0)
    _, _, axes = np.linalg.svd(centred, full_matrices=False)
    for colour in range(3):
        axis = axes[colour] * np.sign(axes[colour][np.abs(axes[colour]).argmax()])
        values = centred @ axis
        low, high = np.quantile(values, [0.01, 0.99])
        expected = np.clip((values - low) / (high - low), 0, 1)
        shown = np.concatenate([image[..., colour].flatten().numpy() for image in colours])
        np.testing.assert_allclose(shown, expected, atol=1e-6)
    assert [image.shape for image in colours] == [(20, 30, 3), (7, 50, 3)]
    flat = attention.principal_colours([torch.ones(2, 2, 4)])[0]
    assert bool(flat.isfinite().all())
