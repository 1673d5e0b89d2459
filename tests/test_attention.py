import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from dino_vit import VisionTransformer, save_backbone
from dino_vit.cli import main
from dino_vit.eval.attention import cls_attention, spread


@pytest.fixture
def weights(tmp_path):
    torch.manual_seed(0)
    model = VisionTransformer(image_size=(32, 48), patch_size=8, width=32, depth=2, heads=2, registers=3)
    save_backbone(model, tmp_path / "a.safetensors", mean=(0.5,) * 3, std=(0.5,) * 3)
    return tmp_path / "a.safetensors"


def test_cls_attention_leaves_registers_out_and_keeps_the_grid():
    model = VisionTransformer(image_size=32, patch_size=8, width=32, depth=2, heads=2, registers=3)
    images = torch.randn(2, 3, 24, 40)
    maps = cls_attention(model, images, block=0)
    (whole,) = model.get_attention(images, [0])
    assert maps.shape == (2, 2, 3, 5)
    for row in range(3):
        for column in range(5):
            assert torch.equal(maps[:, :, row, column], whole[:, :, 0, 4 + row * 5 + column])
    assert model.training, "the mode is as it was"


@pytest.mark.parametrize("command", [["-m", "dino_vit", "attention"], ["eval/attention.py"]])
def test_the_program_writes_a_sheet_and_the_maps(weights, tmp_path, command):
    arguments = [f"weights={weights}", f"output={tmp_path / 'sheet.png'}", "count=3", "block=0"]
    done = subprocess.run(
        [sys.executable, *command, *arguments],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parent.parent,
    )
    assert "3 images, 2 heads of block 0" in done.stdout
    assert np.load(tmp_path / "sheet.npy").shape == (3, 2, 4, 6)
    assert (tmp_path / "sheet.png").read_bytes().startswith(b"\x89PNG")


def test_mistakes_are_said(weights, tmp_path, capsys):
    for arguments, said in (
        ([f"weights={tmp_path}/none.pth"], "none.pth does not exist"),
        ([f"weights={weights}", "source=nowhere"], "is no source"),
        ([f"weights={weights}", "block=7"], "blocks 0 to 1"),
        ([f"weights={weights}", "layer=1"], "did you mean block?"),
        ([], "weights is needed"),
    ):
        assert main(["attention", *arguments]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(("length", "count"), [(1, 5), (7, 7), (1000, 6), (20_000, 12)])
def test_the_chosen_images_are_different_and_all_over(length, count):
    places = spread(length, count)
    assert len(set(places)) == len(places) <= min(length, count)
    assert all(0 <= place < length for place in places)
    if length >= 1000:
        assert max(np.diff([0, *places, length])) < 2.7 * length / count
        assert len({place % 10 for place in places}) > count // 2
