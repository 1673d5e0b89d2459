import pytest
import torch

from dino_vit import VisionTransformer, save_backbone
from tests.support.runs import run


@pytest.fixture
def weights(tmp_path):
    """A file with a small backbone for images of 16 pixels."""
    model = VisionTransformer(image_size=16, patch_size=4, width=32, depth=3, heads=2, registers=1)
    save_backbone(model, tmp_path / "a.safetensors", mean=(0.5,) * 3, std=(0.5,) * 3)
    return tmp_path / "a.safetensors"


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A run of the loop, which tests may only add evaluations to."""
    output = tmp_path_factory.mktemp("trained") / "run"
    run(output, {"budget.steps": 5, "optim.warmup_epochs": 0})
    return output


@pytest.fixture
def overflowing(tmp_path):
    """A file with a backbone whose weights are finite, and whose features and attention are not."""
    model = VisionTransformer(image_size=16, patch_size=4, width=32, depth=1, heads=2)
    with torch.no_grad():
        model.blocks[0].attn.qkv.weight.fill_(1e30)
    save_backbone(model, tmp_path / "overflows.safetensors", mean=(0.5,) * 3, std=(0.5,) * 3)
    return tmp_path / "overflows.safetensors"
