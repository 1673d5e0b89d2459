"""Optimisers, their schedules, gradient clipping and the EMA update; nothing here waits for the device."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dino_vit.core.distributed import all_reduce_mean, full_tensor, local_tensor
from dino_vit.models.backbone import Backbone

# Where the fused kernels skip a step that is not finite; elsewhere the host waits to know it.
SKIPPING_DEVICES = ("cpu", "cuda")

ParameterGroup = dict[str, Any]  # params: list, decay_scale: float, lr_scale: float


def parameter_groups(
    backbone: Backbone, *heads: nn.Module, layer_decay: float | None = None, patch_embed_lr: float = 1.0
) -> list[ParameterGroup]:
    """Group the trainable parameters by weight decay (none for biases and 1-d tensors) and learning rate.

    With `layer_decay` the rate shrinks by that factor per block: from 1 for the heads and all that follows
    the last block, down to what comes before the first: patch embedding, tokens, positions.
    `patch_embed_lr` is a further factor on the rate of the patch embedding.
    """
    layers = {} if layer_decay is None else backbone.layers()
    last = max(layers.values(), default=0)
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for module in (backbone, *heads):
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                decay = 0.0 if parameter.ndim == 1 or name.endswith("bias") else 1.0
                layer = layers.get(name, last) if module is backbone else last
                scale = (layer_decay or 1.0) ** (last - layer)
                if name.startswith("patch_embed."):
                    scale *= patch_embed_lr
                groups.setdefault((scale, decay), []).append(parameter)
    return [
        {"params": params, "decay_scale": decay, "lr_scale": scale}
        for (scale, decay), params in groups.items()
    ]


def build_optimizer(name: str, groups: list[ParameterGroup]) -> Optimizer:
    """Return the optimiser "adamw" or "sgd"; `set_rates` sets the rates of each step."""
    optimizer: Optimizer
    fused = groups[0]["params"][0].device.type in SKIPPING_DEVICES
    if name == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=0.0, weight_decay=0.0, fused=fused)
    else:
        optimizer = torch.optim.SGD(groups, lr=0.0, momentum=0.9, fused=fused)
    # Create the whole state now: a checkpoint then has the same tensors at every step, and if the first step
    # is skipped, the momentum of SGD is not left uninitialised.
    keys = ("exp_avg", "exp_avg_sq") if name == "adamw" else ("momentum_buffer",)
    for parameter in (parameter for group in groups for parameter in group["params"]):
        optimizer.state[parameter] = {key: torch.zeros_like(parameter) for key in keys}
        if name == "adamw":
            # On a device, only the fused kernel reads it without making the host wait.
            device = parameter.device if fused else "cpu"
            optimizer.state[parameter]["step"] = torch.zeros((), device=device)
    return optimizer


def set_rates(optimizer: Optimizer, *, lr: float, weight_decay: float) -> None:
    """Set the learning rate and the weight decay, scaled per group."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]
        group["weight_decay"] = weight_decay * group["decay_scale"]


def step_if_finite(optimizer: Optimizer, finite: Tensor) -> None:
    """Step if `finite`, else change nothing; the host waits for the answer only without a fused kernel."""
    if optimizer.defaults["fused"]:
        # GradScaler skips a fused step in this way: the kernel reads the flag on the device.
        optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
        optimizer.step()
        del optimizer.found_inf  # type: ignore[attr-defined]
    elif finite:
        optimizer.step()


def snapshot(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of tensors for `revert_if_nonfinite`, joined by dtype, which takes few kernels."""
    return [_flat(group) for group in _by_dtype(tensors)]


@torch.no_grad()
def revert_if_nonfinite(finite: Tensor, tensors: Sequence[Tensor], before: Sequence[Tensor]) -> None:
    """Set tensors back to their snapshot before a step, unless it was finite; the host does not wait."""
    for group, old in zip(_by_dtype(tensors), before, strict=True):
        torch._foreach_copy_(group, _split_as(torch.where(finite, _flat(group), old), group))


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _split_as(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _scale_each_(tensors: list[Tensor], factors: Tensor) -> None:
    """Multiply each tensor by its own factor."""
    each: list[Tensor] | tuple[Tensor, ...] = factors.unbind()
    if factors.is_cuda:  # there lists of the same shapes go through few kernels; others take one a tensor
        pairs = zip(each, tensors, strict=True)
        each = _split_as(torch.cat([factor.expand(tensor.numel()) for factor, tensor in pairs]), tensors)
    torch._foreach_mul_(tensors, each)


@torch.no_grad()
def clip_gradients(modules: Sequence[Sequence[Tensor]], *, mode: str, max_norm: float) -> Tensor:
    """Limit the norms of the gradients of modules' parameters; return the norm of all gradients before.

    "tensor" limits the norm of each gradient, "module" of each module, "global" of all, "none" no norm.
    """
    per_module = [[p.grad for p in parameters if p.grad is not None] for parameters in modules]
    gradients = [gradient for part in per_module for gradient in part]
    norms = full_tensor(torch.stack(torch._foreach_norm(gradients)))
    total: Tensor = torch.linalg.vector_norm(norms)
    if mode == "module":
        parts = torch.split(norms, [len(part) for part in per_module])
        norms = torch.cat([torch.linalg.vector_norm(part).expand_as(part) for part in parts])
    factors = torch.clamp(max_norm / ((total if mode == "global" else norms) + 1e-6), max=1.0)
    if mode == "global":
        torch._foreach_mul_(gradients, factors)
    elif mode != "none":
        # The factors are no shards, and tensors of both kinds do not mix.
        _scale_each_([local_tensor(gradient) for gradient in gradients], factors)
    return total


def reduce_loss(loss: Tensor, gradient_norm: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean loss, and (0-d bool) whether loss and gradients are finite in all processes."""
    finite = torch.stack([loss.detach(), gradient_norm]).isfinite().all()
    # In one collective; `finite` is equal in all processes, or their weights would diverge.
    mean, share = all_reduce_mean(torch.stack([loss.detach(), finite.to(loss.dtype)])).unbind()
    return mean, share == 1


@torch.no_grad()
def ema_update(teacher: Sequence[Tensor], student: Sequence[Tensor], momentum: float) -> None:
    """Update the teacher's tensors: momentum * teacher + (1 - momentum) * student; integers are copied."""
    # Statistics of BatchNorm are no shards, and tensors of both kinds do not mix.
    parts = (_by_dtype([local_tensor(tensor) for tensor in tensors]) for tensors in (teacher, student))
    for ours, theirs in zip(*parts, strict=True):
        if ours[0].is_floating_point():
            torch._foreach_lerp_(ours, theirs, 1 - momentum)
        else:
            torch._foreach_copy_(ours, theirs)


def warmup_cosine(step: float, *, base: float, final: float, total: int, warmup: int = 0) -> float:
    """Return the value at `step`: `warmup` linear steps from 0 to `base`, then a cosine to `final`.

    The last step of the warm-up has `base`, and so does the first of the cosine; `final` is reached at step
    `total`, one after the last, and stays from there on.
    """
    if step < warmup:
        return _ramp(step, 0.0, base, warmup)
    if step >= total:
        return final
    progress = (step - warmup) / (total - warmup)
    return final + 0.5 * (base - final) * (1 + math.cos(math.pi * progress))


def warmup_constant(epoch: int, *, start: float, final: float, warmup: int) -> float:
    """Return the value at `epoch`: `warmup` linear epochs from `start` to `final`, then `final`."""
    return _ramp(epoch, start, final, warmup) if epoch < warmup else final


def _ramp(index: float, start: float, end: float, count: int) -> float:
    """Return entry `index` of `count` evenly spaced values from `start` to `end`, both included."""
    # A position in time may lie beyond the last entry.
    return start + (end - start) * min(index / (count - 1), 1.0) if count > 1 else start
