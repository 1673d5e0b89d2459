"""Models of timm behind our interface, compared with timm's own calls."""

import pytest
import timm
import torch

from dino_vit.models.timm_backbone import TimmBackbone
from tests.support.close import assert_close_to_scale

IMAGES = [
    torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0)) for size in ((64, 64), (32, 96))
]
NAMES = ["test_convnext", "test_resnet", "test_vit", "swin_tiny_patch4_window7_224", "mobilenetv3_small_050"]


def backbone(name, **changes):
    torch.manual_seed(0)
    return TimmBackbone(**{"name": name, "image_size": 64, **changes}).eval()


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_features_are_those_of_timm(name):
    ours, images = backbone(name), IMAGES[1]
    theirs = timm.create_model(**ours.arguments).eval()
    theirs.load_state_dict(ours.model.state_dict())
    assert_close_to_scale(ours(images), theirs(images))
    assert_close_to_scale(ours.forward_features(images)[:, 0], theirs(images))
    assert ours.width == theirs(images).shape[1]


@pytest.mark.parametrize(("name", "stride"), [("test_convnext", 32), ("test_vit", 16), (NAMES[3], 32)])
@torch.no_grad()
def test_patches_are_the_feature_map_row_by_row(name, stride):
    ours, images = backbone(name), IMAGES[1]
    features = ours.model.forward_features(images)
    rows, columns = ours.grid_of(32, 96)
    assert (rows, columns) == (32 // stride, 96 // stride)
    if name == "test_vit":
        expected = features[:, 1:]
    else:
        places = [(y, x) for y in range(rows) for x in range(columns)]
        at_place = {"test_convnext": lambda y, x: features[..., y, x]}.get(
            name, lambda y, x: features[:, y, x]
        )
        expected = torch.stack([at_place(y, x) for y, x in places], dim=1)
    assert ours.patch_size == (stride, stride)
    assert_close_to_scale(ours.forward_features(images)[:, ours.first_patch :], expected)


def test_a_model_that_cannot_be_built_is_said():
    with pytest.raises(ValueError, match="has no model 'convnext_tinny'; did you mean convnext_tiny"):
        backbone("convnext_tinny")
    with pytest.raises(ValueError, match=r"vgg11 cannot be built with drop_path=0\.1: .*drop_path_rate"):
        backbone("vgg11", drop_path=0.1)
    with pytest.raises(ValueError, match="has only its last features"):
        backbone("test_vit").get_intermediate_layers(IMAGES[0], 4)


def test_channels_depth_of_layers_and_stochastic_depth():
    ours = backbone("test_convnext", channels=5, drop_path=0.5)
    assert ours(torch.zeros(1, 5, 64, 64)).shape == (1, ours.width)
    layers = ours.layers()
    assert layers.keys() == {*dict(ours.named_parameters()), "head"}
    assert layers["model.stem.0.weight"] == 0
    order = [layers[f"model.stages.{stage}.blocks.0.gamma"] for stage in range(4)]
    assert order == sorted(set(order))
    ours.train()
    first, second = ours(torch.ones(1, 5, 64, 64)), ours(torch.ones(1, 5, 64, 64))
    assert not torch.equal(first, second)
    ours.add_classifier(7)
    assert ours.architecture["num_classes"] == 7
    assert ours.layers()["head.weight"] == layers["head"] == max(layers.values())
    assert [name for name, layer in layers.items() if layer == layers["head"]] == ["head"]


def test_recomputation_changes_no_gradient_and_is_refused_with_batch_norm():
    gradients = []
    for again in (False, True):
        ours = backbone("test_vit").train()
        ours.grad_checkpointing = again
        assert ours.grad_checkpointing is again
        ours(IMAGES[0]).square().sum().backward()
        gradients.append([parameter.grad for parameter in ours.parameters()])
    assert_close_to_scale(*gradients)
    with pytest.raises(ValueError, match=r"timm:test_resnet does not support .* its BatchNorm would"):
        backbone("test_resnet").grad_checkpointing = True
    with pytest.raises(ValueError, match="timm:convit_tiny does not support model"):
        backbone("convit_tiny").grad_checkpointing = True
