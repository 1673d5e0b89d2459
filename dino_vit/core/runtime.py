"""Set up a run on its machine: processes, device, precision."""

import atexit
import logging
import os
import platform
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs, ProjectConfiguration

from dino_vit.core import log
from dino_vit.core.distributed import SETUP_TIMEOUT, end_processes

Precision = Literal["no", "bf16", "fp16"]
DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def start_processes(*, trackers: tuple[str, ...] = (), folder: Path = Path()) -> Accelerator:
    """Join the processes of `accelerate launch` or torchrun; a single process has no process group.

    Trackers write to `folder`.
    """
    check_trackers(trackers)
    atexit.register(end_processes)
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    # Without cpu=True, Accelerate would start each process on a machine without GPUs as a run of its own.
    cpu = launched > 1 and not torch.cuda.is_available()
    if cpu and "OMP_NUM_THREADS" not in os.environ:  # otherwise each process would use all cores
        os.environ["OMP_NUM_THREADS"] = str(cores_of_a_process(launched))
        torch.set_num_threads(cores_of_a_process(launched))
    accelerator = Accelerator(
        cpu=cpu,
        mixed_precision="no",  # autocast is explicit in the loop
        log_with=list(trackers) or None,
        project_config=ProjectConfiguration(project_dir=str(folder), logging_dir=str(folder)),
        kwargs_handlers=[
            DistributedDataParallelKwargs(gradient_as_bucket_view=True),
            InitProcessGroupKwargs(timeout=SETUP_TIMEOUT),
        ],
    )
    if not accelerator.is_main_process:
        log.setLevel(logging.ERROR)  # log on rank 0 only
    return accelerator


def launched_for_fsdp() -> bool:
    """Tell whether Accelerate's launcher was told to use FSDP."""
    return os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true", "yes")


def free_memory() -> int:
    """Return the bytes of memory that are free on this host and in this container."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    limit, used = (Path("/sys/fs/cgroup") / f"memory.{name}" for name in ("max", "current"))
    try:
        return max(0, min(free, int(limit.read_text()) - int(used.read_text())))
    except (OSError, ValueError):  # no container, or one without a limit
        return free


def cores_of_a_process(processes: int) -> int:
    """Return the number of cores for each process on this machine, at least one."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    return max(cores // int(os.environ.get("LOCAL_WORLD_SIZE", processes)), 1)


def check_trackers(names: Iterable[str]) -> None:
    """Refuse trackers that are not installed, which Accelerate would skip silently."""
    installed = sorted(str(name) for name in get_available_trackers())
    for name in names:
        if name not in installed:
            raise ValueError(
                f"compute.trackers: {name} is not installed. Install it, choose from the installed trackers "
                f"({', '.join(installed) or 'none'}), or set compute.trackers=[]"
            )


def device_name(device: torch.device) -> str:
    """Return the product name of a GPU or CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    name = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text() if cpuinfo.exists() else "")
    return name[1] if name else platform.processor() or platform.machine()


def choose_precision(wanted: Literal["auto", "no", "bf16", "fp16"], device: torch.device) -> Precision:
    """Return the precision to compute in; "auto" is bfloat16 where the device supports it natively."""
    if wanted != "auto":
        return wanted
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    if device.type == "cpu" and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()):
        return "bf16"
    return "no"
