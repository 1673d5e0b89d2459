"""How a run meets the machine: processes, device, precision, and the signals that ask it to leave."""

from __future__ import annotations

import os
import signal
from collections.abc import MutableMapping
from pathlib import Path
from types import FrameType
from typing import Literal

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, ProjectConfiguration

from dino_vit.distributed import any_process

Precision = Literal["no", "bf16", "fp16"]
DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LEAVE_AND_REQUEUE = 75  # EX_TEMPFAIL: not done, try again


def start_processes(*, trackers: tuple[str, ...], folder: Path, sync_buffers: bool) -> Accelerator:
    """Join the processes of the launch, whichever launcher it was; alone there is no process group."""
    adopt_slurm(os.environ)
    return Accelerator(
        mixed_precision="no",  # autocast stands in the loop, where one reads what it covers
        log_with=list(trackers),
        project_config=ProjectConfiguration(project_dir=str(folder), logging_dir=str(folder)),
        kwargs_handlers=[
            DistributedDataParallelKwargs(broadcast_buffers=sync_buffers, gradient_as_bucket_view=True)
        ],
    )


def adopt_slurm(environ: MutableMapping[str, str]) -> None:
    """Let a plain `srun` launch as torchrun would: one process a task, told by SLURM's variables."""
    tasks = int(environ.get("SLURM_NTASKS", "1"))
    if "RANK" in environ or "SLURM_PROCID" not in environ or "SLURM_STEP_ID" not in environ or tasks == 1:
        return
    environ["RANK"] = environ["SLURM_PROCID"]
    environ["LOCAL_RANK"] = environ["SLURM_LOCALID"]
    environ["WORLD_SIZE"] = str(tasks)
    environ.setdefault("MASTER_ADDR", environ.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1"))
    environ.setdefault("MASTER_PORT", str(20_000 + int(environ.get("SLURM_JOB_ID", "0")) % 20_000))


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

    def asked_of_any_process(self) -> bool:
        """Tell whether any process was asked to leave, so that all leave after the same step."""
        return any_process(self.received is not None)

    @property
    def exit_code(self) -> int:
        """Return the code with which to leave: a scheduler's signal asks to be queued again."""
        return 130 if self.received == signal.SIGINT else LEAVE_AND_REQUEUE
