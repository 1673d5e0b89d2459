"""Optimisers, and what happens to gradients and parameters around their step, all without a host read."""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dino_vit.core.distributed import all_reduce_mean

ParameterGroup = dict[str, Any]  # params: list, decayed: bool, lr_scale: float

_BLOCK = re.compile(r"blocks\.(\d+)\.")


def parameter_groups(
    backbone: nn.Module, *heads: nn.Module, layer_decay: float | None = None
) -> list[ParameterGroup]:
    """Group the trainable parameters by weight decay (none for biases and 1-d tensors) and by rate.

    With `layer_decay` the rate shrinks by that factor per block: from 1 for what follows the last block, the
    heads included, down to what is registered before the first one: patch embedding, tokens, positions.
    """
    scales = {} if layer_decay is None else _layer_scales(backbone, layer_decay)
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for module in (backbone, *heads):
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                decayed = parameter.ndim != 1 and not name.endswith("bias")
                groups.setdefault((scales.get(parameter, 1.0), decayed), []).append(parameter)
    return [
        {"params": params, "decayed": decayed, "lr_scale": scale}
        for (scale, decayed), params in groups.items()
    ]


def _layer_scales(backbone: nn.Module, layer_decay: float) -> dict[nn.Parameter, float]:
    """Return decay ** (depth + 1 - layer): layer 0 before the blocks, i + 1 for block i, then depth + 1."""
    blocks = [_BLOCK.match(name) for name, _ in backbone.named_parameters()]
    depth = 1 + max((int(block[1]) for block in blocks if block), default=-1)
    if depth == 0:
        raise ValueError(
            f"layer_decay={layer_decay} goes by blocks, but {type(backbone).__name__} has none: leave it out."
        )
    scales, outside = {}, 0
    for parameter, block in zip(backbone.parameters(), blocks, strict=True):
        if block:
            outside = depth + 1
        scales[parameter] = layer_decay ** (depth + 1 - (int(block[1]) + 1 if block else outside))
    return scales


def build_optimizer(name: str, groups: list[ParameterGroup]) -> Optimizer:
    """Return the optimiser "adamw", "sgd" or "lars"; `set_rates` gives each of its steps the rates."""
    optimizer: Optimizer
    match name:
        case "adamw":
            optimizer = torch.optim.AdamW(groups, lr=0.0, weight_decay=0.0, fused=True)
        case "sgd":
            optimizer = torch.optim.SGD(groups, lr=0.0, momentum=0.9, fused=True)
        case "lars":
            optimizer = LARS(groups)
        case _:
            raise ValueError(f'There is no optimizer "{name}": choose "adamw", "sgd" or "lars".')
    # All state from the start, as a checkpoint then holds the same tensors at every step, whatever learned so
    # far, and SGD's momentum would stay uninitialised if the step that creates it were skipped.
    for parameter in (parameter for group in groups for parameter in group["params"]):
        keys = ("exp_avg", "exp_avg_sq") if name == "adamw" else ("momentum_buffer",)
        optimizer.state[parameter] = {key: torch.zeros_like(parameter) for key in keys}
        if name == "adamw":
            optimizer.state[parameter]["step"] = torch.zeros((), device=parameter.device)
    return optimizer


def set_rates(optimizer: Optimizer, *, lr: float, weight_decay: float) -> None:
    """Set this step's learning rate, scaled per group, and the weight decay of the groups that have one."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]
        group["weight_decay"] = weight_decay if group["decayed"] else 0.0


def step_if_finite(optimizer: Optimizer, finite: Tensor) -> None:
    """Take the step of an optimiser built here, or change nothing if not `finite`; the host never asks."""
    optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]  # GradScaler's way to tell a fused step
    optimizer.step()
    del optimizer.found_inf  # type: ignore[attr-defined]


class LARS(Optimizer):
    """SGD with momentum, where the step of each decayed tensor is proportional to the tensor's norm.

    `build_optimizer` gives it its state.
    """

    def __init__(self, groups: list[ParameterGroup], *, eta: float = 0.001, momentum: float = 0.9) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0, "eta": eta, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            momenta = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
            updates = [parameter.grad for parameter in parameters]
            if group["decayed"]:
                updates = _adapt(parameters, updates, group["weight_decay"], group["eta"])
            momentum, lr = group["momentum"], group["lr"]
            if (found_inf := getattr(self, "found_inf", None)) is not None:
                skip = found_inf > 0
                updates = [torch.where(skip, 0.0, update) for update in updates]
                momentum, lr = torch.where(skip, 1.0, momentum), torch.where(skip, 0.0, lr)
            torch._foreach_mul_(momenta, momentum)
            torch._foreach_add_(momenta, updates)
            torch._foreach_add_(parameters, torch._foreach_mul(momenta, -lr))


def _adapt(
    parameters: list[Tensor], gradients: list[Tensor], weight_decay: float, eta: float
) -> list[Tensor]:
    """Return the decayed gradients scaled to `eta` times the parameter's norm, where both have one."""
    updates = torch._foreach_add(gradients, parameters, alpha=weight_decay)
    parameter_norms = torch.stack(torch._foreach_norm(parameters))
    update_norms = torch.stack(torch._foreach_norm(updates))
    both = (parameter_norms > 0) & (update_norms > 0)
    scales = torch.where(both, eta * parameter_norms / update_norms, 1.0)
    return list(torch._foreach_mul(updates, scales.unbind()))


@torch.no_grad()
def clip_gradients(modules: Sequence[nn.Module], *, mode: str, max_norm: float) -> Tensor:
    """Limit gradient norms to `max_norm`, return the norm of all of them from before.

    "tensor" limits every gradient on its own, "module" each module's, "global" all together, "none" nothing.
    """
    per_module = [[p.grad for p in module.parameters() if p.grad is not None] for module in modules]
    gradients = [gradient for part in per_module for gradient in part]
    norms = torch.stack(torch._foreach_norm(gradients))
    total: Tensor = torch.linalg.vector_norm(norms)
    match mode:
        case "tensor":
            torch._foreach_mul_(gradients, _shrinkage(norms, max_norm).unbind())
        case "module":
            sizes = [len(part) for part in per_module]
            for part, part_norms in zip(per_module, torch.split(norms, sizes), strict=True):
                if part:
                    torch._foreach_mul_(part, _shrinkage(torch.linalg.vector_norm(part_norms), max_norm))
        case "global":
            torch._foreach_mul_(gradients, _shrinkage(total, max_norm))
        case "none":
            pass
        case _:
            raise ValueError(
                f'There is no clip mode "{mode}": choose "tensor", "module", "global" or "none".'
            )
    return total


def _shrinkage(norms: Tensor, max_norm: float) -> Tensor:
    return torch.clamp(max_norm / (norms + 1e-6), max=1.0)


def all_finite(loss: Tensor, gradient_norm: Tensor) -> Tensor:
    """Tell (0-d bool) whether loss and gradients, seen through their norm, are finite in all processes."""
    finite = torch.stack([loss.detach(), gradient_norm]).isfinite().all()
    return all_reduce_mean(finite.float()) == 1  # the same answer everywhere, or the processes part for good


def freeze_last_layer(last_layer: nn.Module) -> None:
    """Drop the gradients of the prototypes, so that the optimiser's step passes them by."""
    for parameter in last_layer.parameters():
        parameter.grad = None


@torch.no_grad()
def ema_update(teacher: nn.Module, student: nn.Module, momentum: float) -> None:
    """Move the teacher's parameters towards the student's: momentum * teacher + (1 - momentum) * student."""
    teachers, students = dict(teacher.named_parameters()), dict(student.named_parameters())
    assert teachers.keys() == students.keys(), teachers.keys() ^ students.keys()
    torch._foreach_lerp_(list(teachers.values()), list(students.values()), 1 - momentum)
