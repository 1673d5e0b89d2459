import os

# Before torch is imported, here and in the processes that tests start: tests run side by side, a thread each.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep indices out of the user's cache, in the processes that tests start too."""
    os.environ["DINO_VIT_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def _reproducible() -> None:
    torch.manual_seed(0)
