import json

import pytest

from dino_vit import VisionTransformer, load_backbone, save_backbone
from dino_vit.cli import main


@pytest.fixture
def weights(tmp_path):
    model = VisionTransformer(image_size=32, patch_size=8, width=32, depth=2, heads=2, position_mode="dino")
    path = tmp_path / "mine.safetensors"
    save_backbone(model, path, mean=(0.1, 0.2, 0.3), std=(1.0, 2.0, 3.0), network="teacher", step=12)
    return path


def test_inspect_weights_in_words_and_as_json(weights, capsys):
    assert main(["inspect-weights", str(weights)]) == 0
    said = capsys.readouterr().out
    assert "ViT/8" in said
    assert "0.1, 0.2, 0.3" in said
    assert main(["inspect-weights", str(weights), "as_json=true", "--image-size", "[16, 40]"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["grid"], facts["network"], facts["step"], facts["heads"]) == ([2, 5], "teacher", 12, 2)
    assert facts["parameters"] == sum(
        tensor.numel() for tensor in load_backbone(weights, image_size=(16, 40)).parameters()
    )


def test_what_cannot_be_done_is_a_message(weights, tmp_path, capsys):
    assert main(["inspect-weights", str(weights), "--image-size", "33"]) == 2
    assert "33" in capsys.readouterr().err
    assert main(["export", str(weights), str(tmp_path / "a.npz"), "--format", "timm"]) == 2
    assert "a.npz must end in .pth" in capsys.readouterr().err
