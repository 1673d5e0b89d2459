"""A run's state on disk: all that a step depends on, in one verified file.

There is no random state in it, as every random number is a function of the step.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dino_vit.storage import OWN_KEY, StorageError, read_tensors, write_tensors

log = logging.getLogger("dino_vit")

NAME = re.compile(r"step-(\d{8,})\.safetensors")
LAST = 2  # checkpoints kept behind each other, so that a damaged one has one before it


@dataclass(frozen=True)
class Checkpoint:
    """What was read: tensors by name, and what the file says of them."""

    path: Path
    tensors: dict[str, Tensor]
    about: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.about["step"])


class Checkpoints:
    """The checkpoints of a run, in its folder `checkpoints`."""

    def __init__(self, run: Path, *, keep_every: int | None = None) -> None:
        self.folder = run / "checkpoints"
        self.keep_every = keep_every

    def save(self, step: int, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> Path:
        """Write the state after `step` steps, then remove what need not be kept; refuse a broken state."""
        broken = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
        if broken:
            raise NotFinite(f"{len(broken)} tensors are not finite, the first is {broken[0]}")
        path = self.folder / f"step-{step:08d}.safetensors"
        described = {**about, "kind": "checkpoint", "step": step}
        write_tensors(path, tensors, json.dumps(described, sort_keys=True))
        self._remove_superfluous(best=about.get("best"))
        return path

    def newest(self) -> Checkpoint | None:
        """Return the newest checkpoint that is whole, naming those that are not; none if there is none."""
        for path in sorted(self.paths(), reverse=True):
            try:
                tensors, metadata = read_tensors(path)
                if OWN_KEY not in metadata:
                    raise StorageError(f"{path} does not say what it is")
            except StorageError as error:
                log.warning("passed over a checkpoint: %s", error)
            else:
                return Checkpoint(path, tensors, json.loads(metadata[OWN_KEY]))
        if self.paths():
            raise StorageError(
                f"none of the {len(self.paths())} checkpoints in {self.folder} can be read; move the folder "
                "away to start again"
            )
        return None

    def paths(self) -> list[Path]:
        """Return the checkpoint files, unverified."""
        return [path for path in self.folder.glob("*.safetensors") if NAME.fullmatch(path.name)]

    def _remove_superfluous(self, best: Mapping[str, Any] | None) -> None:
        steps = sorted(int(NAME.fullmatch(path.name)[1]) for path in self.paths())  # type: ignore[index]
        kept = {*steps[-LAST:], best["step"] if best else None}
        for step in steps:
            if step not in kept and not (self.keep_every and step % self.keep_every == 0):
                (self.folder / f"step-{step:08d}.safetensors").unlink()


class NotFinite(ValueError):
    """The state holds infinities or NaNs, which must not replace a good checkpoint."""


def collect(modules: Mapping[str, nn.Module], optimizer: Optimizer, names: list[str]) -> dict[str, Tensor]:
    """Return the tensors of modules and optimiser; `names` are those of the optimiser's parameters."""
    tensors = {
        f"{prefix}.{name}": tensor
        for prefix, module in modules.items()
        for name, tensor in module.state_dict().items()
    }
    for name, parameter in zip(names, _parameters(optimizer), strict=True):
        for key, value in optimizer.state[parameter].items():
            tensors[f"optimizer.{key}.{name}"] = value
    return tensors


@torch.no_grad()
def restore(
    checkpoint: Checkpoint, modules: Mapping[str, nn.Module], optimizer: Optimizer, names: list[str]
) -> None:
    """Put a checkpoint's tensors back; every one must find its place, and every place must be filled."""
    left = dict(checkpoint.tensors)
    for prefix, module in modules.items():
        state = {name: left.pop(f"{prefix}.{name}", None) for name in module.state_dict()}
        missing = [name for name, tensor in state.items() if tensor is None]
        if missing:
            raise StorageError(f"{checkpoint.path} lacks {len(missing)} tensors of {prefix}: {missing[:5]}")
        module.load_state_dict(state)
    by_name = dict(zip(names, _parameters(optimizer), strict=True))
    for full in [name for name in left if name.startswith("optimizer.")]:
        _, key, name = full.split(".", 2)
        if name in by_name:
            parameter = by_name[name]
            optimizer.state[parameter][key] = left.pop(full).to(parameter.device)
    if left:
        raise StorageError(f"{checkpoint.path} has {len(left)} tensors without a place: {list(left)[:5]}")


def optimizer_names(optimizer: Optimizer, module: nn.Module) -> list[str]:
    """Return the names that the optimiser's parameters have in a module, in the optimiser's order."""
    by_identity = {parameter: name for name, parameter in module.named_parameters()}
    return [by_identity[parameter] for parameter in _parameters(optimizer)]


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
