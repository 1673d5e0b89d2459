"""Compiled networks, and whether a run repays the seconds that they take to compile."""

import os
import shutil
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from dino_vit.models.student_teacher import Network

# 1.5 times 18 s of compiling, over the 4 ms that a step saved: 49 to 45 for ViT-S/16, 64 images, on an H200.
COMPILED_STEPS = 6_750


def choose_compile(wanted: bool | Literal["auto"], device: torch.device, steps: int) -> bool:
    """Return whether to compile; "auto" does so on CUDA, in runs long enough to repay it."""
    return device.type == "cuda" and steps >= COMPILED_STEPS if wanted == "auto" else wanted


def missing_for_compile() -> str | None:
    """Return what this machine lacks to compile for a GPU; None if it has all."""
    from torch.utils._triton import has_triton

    if not has_triton():
        return "there is no Triton for this GPU"
    # Triton compiles what starts a kernel, against Python's headers.
    compilers = os.environ.get("CC", "gcc clang cc").split()
    if not any(map(shutil.which, compilers)):
        return "there is no C compiler (gcc or clang)"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "Python's headers are not installed (python3-dev)"
    return None


def compile_networks(networks: Sequence[Network], *, whole: bool) -> None:
    """Compile whole networks, or their blocks, which are alike: their few graphs compile in seconds."""
    from torch._dynamo import config  # slow

    config.optimize_ddp = False  # graphs would be split after every 25 MB of DistributedDataParallel's
    network: Any
    for network in networks:
        if whole:
            network.run_backbone = torch.compile(network.run_backbone, dynamic=False)
            continue
        for block in network.backbone.blocks:
            block.forward, block.compiled = torch.compile(block.forward, dynamic=False), True
