"""How a run meets the machine: processes, device, precision, and the signals that ask it to leave."""

from __future__ import annotations

import logging
import os
import platform
import re
import signal
from collections.abc import Iterable, MutableMapping
from pathlib import Path
from types import FrameType
from typing import Literal

import torch
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import DistributedDataParallelKwargs, ProjectConfiguration

from dino_vit.core.distributed import rank

Precision = Literal["no", "bf16", "fp16"]
DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LEAVE_AND_REQUEUE = 75  # EX_TEMPFAIL: not done, try again


def start_processes(*, trackers: tuple[str, ...], folder: Path) -> Accelerator:
    """Join the processes of the launch, whichever launcher it was; alone there is no process group."""
    check_trackers(trackers)
    adopt_slurm(os.environ)
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    # Told nothing, Accelerate takes the processes of a machine without GPUs for as many runs of one.
    cpu = launched > 1 and not torch.cuda.is_available()
    if cpu and "OMP_NUM_THREADS" not in os.environ:  # or all of them would take all cores
        os.environ["OMP_NUM_THREADS"] = str(cores_of_a_process(launched))
        torch.set_num_threads(cores_of_a_process(launched))
    accelerator = Accelerator(
        cpu=cpu,
        mixed_precision="no",  # autocast stands in the loop, where one reads what it covers
        log_with=list(trackers) or None,
        project_config=ProjectConfiguration(project_dir=str(folder), logging_dir=str(folder)),
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
    )
    if accelerator.num_processes < launched:
        raise ValueError(
            f"{launched} processes were launched, but each runs alone on {accelerator.device.type}; "
            "launch one, or hide the device (ACCELERATE_USE_CPU=1)"
        )
    if not accelerator.is_main_process:
        logging.getLogger("dino_vit").setLevel(logging.ERROR)  # log on rank 0 only
    return accelerator


def cores_of_a_process(processes: int) -> int:
    """Return how many cores each of so many processes has for itself, at least one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    here, of_task = processes, os.environ.get("SLURM_CPUS_PER_TASK")
    if of_task:  # a task of srun, which is one process unless it is a launcher
        cores, here = min(cores, int(of_task)), 1
    return max(cores // int(os.environ.get("LOCAL_WORLD_SIZE", here)), 1)


def adopt_slurm(environ: MutableMapping[str, str]) -> None:
    """Let a plain `srun` launch as torchrun would: one process a task, told by SLURM's variables."""
    tasks = int(environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", "1")))
    if "RANK" in environ or "SLURM_PROCID" not in environ or "SLURM_STEP_ID" not in environ or tasks == 1:
        return
    environ["RANK"] = environ["SLURM_PROCID"]
    environ["LOCAL_RANK"] = environ["SLURM_LOCALID"]
    environ["WORLD_SIZE"] = str(tasks)
    nodes = environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_JOB_NODELIST", "127.0.0.1"))
    environ.setdefault("MASTER_ADDR", first_host(nodes))
    # Below the ports that systems hand out by themselves.
    environ.setdefault("MASTER_PORT", str(10_000 + int(environ.get("SLURM_JOB_ID", "0")) % 20_000))


def first_host(nodes: str) -> str:
    """Return the first host of a list as SLURM writes it, such as `gpu[003-005,9],login`."""
    return re.sub(r"^([^,\[]*)(?:\[([^],-]*)[^]]*\])?([^,\[]*).*$", r"\1\2\3", nodes)


def check_trackers(names: Iterable[str]) -> None:
    """Refuse a tracker that Accelerate does not know, or would leave out because it is not installed."""
    known = sorted(LOGGER_TYPE_TO_CLASS)
    installed = {str(name) for name in get_available_trackers()}
    for name in names:
        if name not in known:
            raise ValueError(f"run.trackers: Accelerate knows no {name}; it knows {', '.join(known)}")
        if name not in installed:
            raise ValueError(
                f"run.trackers: {name} is not installed. Run `pip install {name}`, or take another one "
                f"(installed here: {', '.join(sorted(installed)) or 'none'}; run.trackers=[] for none)"
            )


def device_name(device: torch.device) -> str:
    """Return what a device is sold as, as far as it tells."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def choose_precision(wanted: Literal["auto", "no", "bf16", "fp16"], device: torch.device) -> Precision:
    """Return the precision to compute in: unless told, bfloat16 where the device has it natively."""
    if wanted != "auto":
        return wanted
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    if device.type == "cpu" and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()):
        return "bf16"
    return "no"


class Interruption:
    """Remember a signal until the step is over; a second ctrl-C interrupts at once."""

    SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    def __enter__(self) -> Interruption:
        self._before = {number: signal.signal(number, self._remember) for number in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and self.received is not None:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
        if number == signal.SIGINT and rank() == 0:
            os.write(2, b"\nSaving after this step; press ctrl-C again to leave at once, without.\n")

    @property
    def asked(self) -> bool:
        """Tell whether this process was asked to leave."""
        return self.received is not None

    @property
    def exit_code(self) -> int:
        """Return the code with which to leave: a scheduler's signal asks to be queued again."""
        return 130 if self.received == signal.SIGINT else LEAVE_AND_REQUEUE
