"""Checkpoints of a run: everything a step depends on, in one verified file.

They hold no random state, because every random number is a function of the step.
"""

import json
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dino_vit.core import log
from dino_vit.core.distributed import copy_from_rank_0, from_rank_0, in_all_processes
from dino_vit.core.storage import (
    FORMAT_VERSION,
    OWN_KEY,
    StorageError,
    check_version,
    read_tensors,
    write_tensors,
)

NAME = re.compile(r"step-\d{8,}\.safetensors")
LAST = 2  # newest checkpoints to keep: if the last one is damaged, there is another before it


class NotFinite(ValueError):
    """The state contains infinities or NaNs, and must not replace a good checkpoint."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read: its tensors by name, and its metadata."""

    path: Path
    tensors: dict[str, Tensor]
    metadata: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.metadata["step"])


def read_checkpoint(path: Path) -> Checkpoint:
    """Return a checkpoint, or raise StorageError if it is damaged."""
    tensors, metadata = read_tensors(path)
    if OWN_KEY not in metadata:
        raise StorageError(f"{path} was not written by dino-vit")
    description = json.loads(metadata[OWN_KEY])
    check_version(path, description)
    return Checkpoint(path, tensors, description)


class Checkpoints:
    """The checkpoints in the folder of a run."""

    def __init__(self, run: Path, *, keep_every: int | None = None) -> None:
        self.folder = run / "checkpoints"
        self.keep_every = keep_every
        self.kept_steps = set[int]()  # steps that stay, whatever an earlier start kept them for

    def save(self, step: int, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> Path:
        """Write the state after `step` steps, then remove the checkpoints that are no longer needed."""
        broken = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
        if broken:
            count = f"{len(broken)} tensors are" if len(broken) > 1 else "1 tensor is"
            raise NotFinite(f"{count} not finite; the first is {broken[0]}")
        path = self.path(step)
        if self.keep_every:
            on_disk = map(_step, self.paths())
            self.kept_steps |= {
                each for each in (*on_disk, step) if each % self.keep_every == 0 and each <= step
            }
        described = {**metadata, "kind": "checkpoint", "version": FORMAT_VERSION, "step": step}
        described["kept_steps"] = sorted(self.kept_steps)
        write_tensors(path, tensors, json.dumps(described, sort_keys=True))
        self._prune(step, best=metadata.get("best"))  # only now: the new file is complete and on the disk
        return path

    def newest(self) -> Checkpoint | None:
        """Return the newest checkpoint that is undamaged, or None if there are no checkpoints."""
        for path in reversed(self.paths()):
            try:
                return read_checkpoint(path)
            except StorageError as error:
                log.warning("skipped a checkpoint: %s", error)
        if self.paths():
            advice = "move the folder away to start again"
            raise StorageError(f"none of the checkpoints in {self.folder} can be read; {advice}")
        return None

    def newest_of_rank_0(self) -> Checkpoint | None:
        """Return the newest checkpoint as `newest` does; in other processes than rank 0 without values.

        `restore` gives them these, so that one process reads and checks them.
        """
        read = list[Checkpoint | None]()

        def outline() -> Checkpoint | None:
            read.append(newest := self.newest())
            shapes = {name: tensor.to("meta") for name, tensor in newest.tensors.items()} if newest else {}
            return newest and replace(newest, tensors=shapes)

        with in_all_processes():
            outlined = from_rank_0(outline)
        return read[0] if read else outlined

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}.safetensors"

    def paths(self) -> list[Path]:
        """Return the checkpoint files, unverified, the oldest step first."""
        checkpoints = [path for path in self.folder.glob("*.safetensors") if NAME.fullmatch(path.name)]
        return sorted(checkpoints, key=_step)

    def _prune(self, newest: int, best: Mapping[str, Any] | None) -> None:
        """Keep the last ones, the best one and those to be kept; later steps are of an abandoned run."""
        steps = [step for path in self.paths() if (step := _step(path)) <= newest]
        wanted = {*steps[-LAST:], *(self.kept_steps & {*steps}), best["step"] if best else None}
        outdated = [path for path in self.paths() if _step(path) not in wanted]
        for path in (*outdated, *self.folder.glob(".step-*.partial")):  # of a process that was killed
            path.unlink(missing_ok=True)


class BackgroundWriter:
    """Write checkpoints in a thread, one at a time, from a copy on the host that the next one overwrites."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self.checkpoints = checkpoints
        # Of the checkpoint that was begun last.
        self.step = 0
        self.metadata: Mapping[str, Any] = {}
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[Path] | None = None
        self._copy: dict[str, Tensor] = {}

    def begin(self, step: int, tensors: Iterable[tuple[str, Tensor]], metadata: Mapping[str, Any]) -> None:
        """Copy the tensors and begin to write them; `finish` the checkpoint before this one first."""
        assert self._writing is None
        self.step, self.metadata = step, metadata
        for name, tensor in tensors:
            if name not in self._copy:
                self._copy[name] = torch.empty_like(tensor, device="cpu")
            self._copy[name].copy_(tensor.detach())
        self._writing = self.thread.submit(self.checkpoints.save, step, self._copy, metadata)

    def finish(self, *, wait: bool) -> Path | None:
        """Return the path of a checkpoint that has come to the disk since the last call, or raise why not."""
        writing = self._writing
        if writing is None or not (wait or writing.done()):
            return None
        error = writing.exception()  # a second ctrl-C may raise here: then it is still being written
        self._writing = None
        if error is not None:
            raise error
        return writing.result()


def _step(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def collect(modules: Mapping[str, nn.Module], optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the tensors of modules and optimiser; its parameters are named as in their module."""
    tensors: dict[str, Tensor] = {}
    names: dict[Tensor, str] = {}
    for prefix, module in modules.items():
        tensors |= {f"{prefix}.{name}": tensor for name, tensor in module.state_dict().items()}
        names |= {parameter: name for name, parameter in module.named_parameters()}
    for parameter, state in optimizer.state.items():
        tensors |= {f"optimizer.{key}.{names[parameter]}": value for key, value in state.items()}
    return tensors


@torch.no_grad()
def restore(checkpoint: Checkpoint, modules: Mapping[str, nn.Module], optimizer: Optimizer) -> None:
    """Restore modules and optimiser from a checkpoint of rank 0 that has exactly their tensors."""
    targets, tensors = collect(modules, optimizer), checkpoint.tensors
    shapes = {name: tuple(tensor.shape) for name, tensor in targets.items()}
    saved = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wrong = [name for name in sorted({*shapes, *saved}) if shapes.get(name) != saved.get(name)]
    if wrong:
        name, more = wrong[0], f"; and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise StorageError(
            f"{checkpoint.path} belongs to a different network or optimiser: {name} is "
            f"{saved.get(name, 'missing')} in the file and {shapes.get(name, 'missing')} here{more}. "
            f"For a new run from its weights give another output and init.weights={checkpoint.path}"
        )
    # Nothing was changed so far: a checkpoint that does not fit leaves everything as it is.
    for name, target in targets.items():
        copy_from_rank_0(target, tensors[name])
