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

from dino_vit.core.storage import OWN_KEY, StorageError, read_tensors, write_tensors

log = logging.getLogger("dino_vit")

NAME = re.compile(r"step-(\d{8,})\.safetensors")
LAST = 2  # checkpoints kept behind each other, so that a damaged one has one before it


@dataclass(frozen=True)
class Checkpoint:
    """What was read: tensors by name, and what the file says of them."""

    path: Path
    tensors: dict[str, Tensor]
    metadata: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.metadata["step"])


class Checkpoints:
    """The checkpoints of a run, in its folder `checkpoints`."""

    def __init__(self, run: Path, *, keep_every: int | None = None) -> None:
        self.folder = run / "checkpoints"
        self.keep_every = keep_every

    def save(self, step: int, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> Path:
        """Write the state after `step` steps, then remove what need not be kept; refuse a broken state."""
        broken = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
        if broken:
            raise NotFinite(f"{len(broken)} tensors are not finite, the first is {broken[0]}")
        path = self.folder / f"step-{step:08d}.safetensors"
        described = {**metadata, "kind": "checkpoint", "step": step}
        write_tensors(path, tensors, json.dumps(described, sort_keys=True))
        self._remove_superfluous(step, best=metadata.get("best"))
        return path

    def newest(self, *, up_to: int | None = None) -> Checkpoint | None:
        """Return the newest whole checkpoint, up to a step, naming broken ones; none if there is none."""
        paths = {step: path for step, path in self._by_step().items() if up_to is None or step <= up_to}
        for path in reversed(paths.values()):
            try:
                tensors, metadata = read_tensors(path)
                if OWN_KEY not in metadata:
                    raise StorageError(f"{path} does not say what it is")
            except StorageError as error:
                log.warning("passed over a checkpoint: %s", error)
            else:
                return Checkpoint(path, tensors, json.loads(metadata[OWN_KEY]))
        if paths:
            raise StorageError(
                f"none of the {len(paths)} checkpoints in {self.folder} can be read; move the folder "
                "away to start again"
            )
        return None

    def paths(self) -> list[Path]:
        """Return the checkpoint files, unverified, the oldest step first."""
        return list(self._by_step().values())

    def _by_step(self) -> dict[int, Path]:
        found = ((NAME.fullmatch(path.name), path) for path in self.folder.glob("*.safetensors"))
        return dict(sorted((int(match[1]), path) for match, path in found if match))

    def _remove_superfluous(self, newest: int, best: Mapping[str, Any] | None) -> None:
        """Remove what is neither among the last, nor the best, nor due; what lies ahead was given up."""
        by_step = self._by_step()
        last = [step for step in by_step if step <= newest][-LAST:]
        kept = {*last, best["step"] if best else None}
        for step, path in by_step.items():
            due = step <= newest and self.keep_every and step % self.keep_every == 0
            if step not in kept and not due:
                path.unlink(missing_ok=True)


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
    places, found = collect(modules, optimizer, names), checkpoint.tensors
    faults = [f"{name} is missing" for name in sorted(places.keys() - found.keys())]
    faults += [f"{name} has no place here" for name in sorted(found.keys() - places.keys())]
    faults += [
        f"{name} is {tuple(found[name].shape)} in the file and {tuple(place.shape)} here"
        for name, place in places.items()
        if name in found and found[name].shape != place.shape
    ]
    if faults:
        more = f" (and {len(faults) - 3} more)" if len(faults) > 3 else ""
        said = f"{', '.join(faults[:3])}{more}"
        raise StorageError(f"{checkpoint.path} is of another network or optimiser: {said}")
    for name, place in places.items():
        place.copy_(found[name])


def optimizer_names(optimizer: Optimizer, module: nn.Module) -> list[str]:
    """Return the names that the optimiser's parameters have in a module, in the optimiser's order."""
    by_identity = {parameter: name for name, parameter in module.named_parameters()}
    return [by_identity[parameter] for parameter in _parameters(optimizer)]


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
