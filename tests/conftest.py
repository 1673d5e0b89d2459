import os
import sys
from pathlib import Path

# Before torch is imported, here and in the processes that tests start: tests run side by side, a thread each.
os.environ["OMP_NUM_THREADS"] = os.environ.get("DINO_VIT_TEST_THREADS", "1")
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

import pytest
import torch

from dino_vit import VisionTransformer, save_backbone
from tests.support.textures import draw_once


def pytest_configure(config: pytest.Config) -> None:
    """Let tests and their processes import this checkout, and compute on the CPU unless run with `-m gpu`."""
    draw_once()
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if config.option.markexpr.strip() == "gpu":
        os.environ["NVIDIA_TF32_OVERRIDE"] = "0"  # float32 is compared with the CPU's
        return
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if sys.platform == "darwin":  # Accelerate would choose mps, which no variable hides
        os.environ["ACCELERATE_USE_CPU"] = "true"


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep indices out of the user's cache, in the processes that tests start too."""
    os.environ["DINO_VIT_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def _reproducible() -> None:
    torch.manual_seed(0)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A file with a small backbone for images of 16 pixels."""
    model = VisionTransformer(image_size=16, patch_size=4, width=32, depth=3, heads=2, registers=1)
    save_backbone(model, tmp_path / "a.safetensors", mean=(0.5,) * 3, std=(0.5,) * 3)
    return tmp_path / "a.safetensors"
