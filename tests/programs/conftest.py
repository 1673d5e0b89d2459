import pytest

from dino_vit import VisionTransformer, save_backbone


@pytest.fixture
def weights(tmp_path):
    """A file with a small backbone for images of 16 pixels."""
    model = VisionTransformer(image_size=16, patch_size=4, width=32, depth=3, heads=2, registers=1)
    save_backbone(model, tmp_path / "weights" / "a.safetensors", mean=(0.5,) * 3, std=(0.5,) * 3)
    return tmp_path / "weights" / "a.safetensors"
