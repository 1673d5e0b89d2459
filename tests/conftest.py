import os

# Before torch is imported, here and in the processes that tests start: tests run side by side, a thread each.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

import pytest
import torch


@pytest.fixture(autouse=True)
def _reproducible() -> None:
    torch.manual_seed(0)
