"""Copies to a device, and waiting for it."""

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to a device; the host does not wait."""
    # CUDA copies in the background only from pinned memory.
    if device.type == "cuda" and tensor.is_cpu:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def wait_for_device(device: torch.device) -> None:
    """Wait until an accelerator has done its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize()
