"""What the knobs of pretraining must not say together, each with the way out.

The rules see a config alone; `check_run` also knows the number of images and processes, and plans the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING

from dino_vit.config.settings import ConfigError, Problem

if TYPE_CHECKING:
    from dino_vit.config.pretrain import PretrainConfig

# Scaled rates outside of these have not been seen to work for anyone (dino#61, #273).
SANE_LR = {"adamw": (1e-7, 1e-2), "sgd": (1e-6, 10.0), "lars": (1e-6, 50.0)}


def scaled_lr(lr: float, global_batch: int, scaling: str) -> float:
    """Return the rate at `global_batch` images of a rate given for 256."""
    return lr * {"linear": global_batch / 256, "sqrt": sqrt(global_batch / 256), "none": 1.0}[scaling]


def model_rules(config: PretrainConfig) -> Iterator[Problem]:
    """Yield what is wrong with the backbone's size."""
    model = config.model
    own = {"width": model.width, "depth": model.depth, "heads": model.heads}
    given = [f"model.{name}={value}" for name, value in own.items() if value is not None]
    missing = [f"model.{name}" for name, value in own.items() if value is None]
    keys = ("model.arch", "model.width", "model.depth", "model.heads")
    if model.arch and given:
        text = f"model.arch={model.arch} already says width, depth and heads"
        yield Problem(f"{text}; drop it (model.arch=null) or drop {', '.join(given)}", keys)
    elif not model.arch and missing:
        yield Problem(
            f"without model.arch, {', '.join(missing)} must be given too (or name a model.arch)", keys
        )
    elif not model.arch and model.shape[0] % model.shape[2]:
        text = f"model.width={model.width} does not divide into model.heads={model.heads}"
        fitting = [n for n in range(1, model.shape[0] + 1) if model.shape[0] % n == 0]
        near = min(fitting, key=lambda n: abs(n - model.shape[2]))
        yield Problem(f"{text}; take {near} heads, or a width that is a multiple", keys[1::2])


def view_rules(config: PretrainConfig) -> Iterator[Problem]:
    """Yield what is wrong with the views."""
    views, patch = config.views, config.model.patch_size
    sizes = {"global_size": views.global_shape, "local_size": views.local_shape}
    for name, size in sizes.items():
        odd = [side for side in size if side % patch]
        if odd and (name == "global_size" or views.local_count):
            below, above = odd[0] // patch * patch, (odd[0] // patch + 1) * patch
            text = f"views.{name}={getattr(views, name)} does not divide into patches of {patch}"
            ways = f"take {f'{below} or {above}' if below else above}, or another model.patch_size"
            yield Problem(f"{text}; {ways}", (f"views.{name}", "model.patch_size"))
    if views.global_count + views.local_count < 2:
        text = "one view makes no pair to learn from; set views.local_count or views.global_count=2"
        yield Problem(text, ("views.global_count", "views.local_count"))
    spans = {f"views.{name}": getattr(views, name) for name in ("global_scale", "local_scale", "ratio")}
    spans |= {f"photometry.{name}": getattr(config.photometry, name) for name in ("blur_sigma", "noise_std")}
    for key, (low, high) in spans.items():
        if low > high or not high:
            yield Problem(f"{key}=[{low}, {high}] must go from low to high; try [{high}, {low}]", (key,))


def channel_rules(config: PretrainConfig) -> Iterator[Problem]:
    """Yield what does not fit the number of channels."""
    data, photometry = config.data, config.photometry
    for name, given in (("mean", data.mean), ("std", data.std)):
        if given is not None and len(given) != data.channels:
            text = f"data.{name} has {len(given)} values for data.channels={data.channels}"
            ways = f"give one per channel, or data.{name}=null to have it measured"
            yield Problem(f"{text}; {ways}", (f"data.{name}", "data.channels"))
    if data.range and data.range[0] >= data.range[1]:
        low, high = data.range
        yield Problem(f"data.range=[{low}, {high}] must go from a lower value to a higher", ("data.range",))
    coloured = [f"photometry.{name}" for name in ("saturation", "hue", "grey") if getattr(photometry, name)]
    if data.channels != 3 and coloured:
        text = f"{', '.join(coloured)} need the three channels of RGB, not data.channels={data.channels}"
        yield Problem(f"{text}; add {' '.join(f'{key}=0' for key in coloured)}", ("data.channels", *coloured))


def loss_rules(config: PretrainConfig) -> Iterator[Problem]:
    """Yield temperatures with which the teacher cannot lead."""
    loss = config.loss
    for name, given in (
        ("teacher_temp", loss.teacher_temp),
        ("warmup_teacher_temp", loss.warmup_teacher_temp),
    ):
        if given >= loss.student_temp:
            text = f"loss.{name}={given} is not below loss.student_temp={loss.student_temp}"
            yield Problem(
                f"{text}, so there is nothing to learn from; take 0.04 to 0.07",
                (f"loss.{name}", "loss.student_temp"),
            )
    keys = ("loss.warmup_teacher_temp", "loss.teacher_temp", "loss.warmup_teacher_temp_epochs")
    start, end, epochs = loss.warmup_teacher_temp, loss.teacher_temp, loss.warmup_teacher_temp_epochs
    if epochs and start >= end:
        text = f"the teacher's temperature cannot warm up over {epochs} epochs from {start} to {end}"
        yield Problem(f"{text}; raise loss.teacher_temp (0.07), or set {keys[2]}=0", keys)


def rate_rules(config: PretrainConfig) -> Iterator[Problem]:
    """Yield rates that cannot work on any number of processes."""
    optim, teacher = config.optim, config.teacher
    yield from _lr_problems(config, world_size=1, ends=(1,))
    if optim.min_lr > optim.lr:
        keys = ("optim.min_lr", "optim.lr")
        yield Problem(
            f"optim.min_lr={optim.min_lr} is above optim.lr={optim.lr}; it is where the rate ends", keys
        )
    if teacher.momentum > teacher.momentum_end:
        text = f"teacher.momentum={teacher.momentum} is above teacher.momentum_end={teacher.momentum_end}"
        yield Problem(
            f"{text}; the teacher slows down over a run", ("teacher.momentum", "teacher.momentum_end")
        )


def _lr_problems(
    config: PretrainConfig, world_size: int, ends: tuple[int, ...] = (0, 1)
) -> Iterator[Problem]:
    """Yield a scaled rate below (end 0) or above (end 1) the sane range."""
    optim, batch = config.optim, config.data.batch_size * config.optim.accumulate * world_size
    lr, sane = scaled_lr(optim.lr, batch, optim.lr_scaling), SANE_LR[optim.name]
    if (0 in ends and lr < sane[0]) or (1 in ends and lr > sane[1]):
        text = f"optim.lr={optim.lr} is {lr:.3g} at a global batch of {batch} (lr_scaling={optim.lr_scaling})"
        advice = f"{optim.name} learns between {sane[0]:g} and {sane[1]:g}; the recipe's lr is 0.0005"
        yield Problem(f"{text}; {advice}", ("optim.lr", "optim.lr_scaling", "optim.name", "data.batch_size"))


def time_rules(config: PretrainConfig) -> Iterator[Problem]:
    """Yield lengths that do not fit each other."""
    budget, run = config.budget, config.run
    units = {f"budget.{name}": getattr(budget, name) for name in ("epochs", "steps", "images")}
    given = [f"{key}={value}" for key, value in units.items() if value is not None]
    if len(given) != 1:
        text = f"{' and '.join(given)} are both given" if given else "the run has no end"
        yield Problem(f"{text}; give exactly one of {', '.join(units)}", tuple(units))
    elif budget.epochs is not None:
        yield from _phase_problems(config, budget.epochs, "budget.epochs")
    if run.keep_every and run.keep_every % run.checkpoint_every:
        text = (
            f"run.keep_every={run.keep_every} is no multiple of run.checkpoint_every={run.checkpoint_every}"
        )
        yield Problem(f"{text}, so it would keep nothing", ("run.keep_every", "run.checkpoint_every"))


def _phase_problems(config: PretrainConfig, epochs: float, budget_key: str) -> Iterator[Problem]:
    """Yield phases of the start that do not end before the run does."""
    phases: dict[str, float] = {
        "optim.warmup_epochs": config.optim.warmup_epochs,
        "optim.freeze_last_layer_epochs": config.optim.freeze_last_layer_epochs,
        "loss.warmup_teacher_temp_epochs": config.loss.warmup_teacher_temp_epochs,
        "init.head_epochs": config.init.head_epochs if config.init else 0,
    }
    for key, length in phases.items():
        if length and length >= epochs:
            whole = key.startswith("loss.")
            short = int(epochs / 10) if whole else float(f"{epochs / 10:.2g}")
            text = f"{key}={length:g} is not below the {epochs:.3g} epochs of the run"
            yield Problem(f"{text}; set {key}={short}, or a larger {budget_key}", (key, budget_key))


ALL = (model_rules, view_rules, channel_rules, loss_rules, rate_rules, time_rules)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a config plays out on so many images and processes; all lengths in optimiser steps."""

    global_batch: int
    steps_per_epoch: int
    total_steps: int
    warmup_steps: int
    freeze_steps: int
    head_steps: int
    lr: float

    @property
    def epochs(self) -> float:
        """Length of the run in epochs."""
        return self.total_steps / self.steps_per_epoch


def check_run(config: PretrainConfig, images: int, world_size: int) -> Plan:
    """Plan the run, or refuse what does not fit the number of images and processes."""
    optim, budget = config.optim, config.budget
    batch, per_epoch, total = _lengths(config, images, world_size)
    unit = next(name for name in ("epochs", "steps", "images") if getattr(budget, name) is not None)
    problems = [
        *_phase_problems(config, total / per_epoch, f"budget.{unit}"),
        *_lr_problems(config, world_size),
    ]
    lr = scaled_lr(optim.lr, batch, optim.lr_scaling)
    if optim.min_lr > lr:
        text = f"optim.min_lr={optim.min_lr:g} is above the rate of {lr:.3g} at a global batch of {batch}"
        problems.append(Problem(f"{text}; lower it", ("optim.min_lr", "optim.lr")))
    if problems:
        raise ConfigError(problems)
    return Plan(
        global_batch=batch,
        steps_per_epoch=per_epoch,
        total_steps=total,
        warmup_steps=int(optim.warmup_epochs * per_epoch),
        freeze_steps=round(optim.freeze_last_layer_epochs * per_epoch),
        head_steps=round(config.init.head_epochs * per_epoch) if config.init else 0,
        lr=lr,
    )


def _lengths(config: PretrainConfig, images: int, world_size: int) -> tuple[int, int, int]:
    """Return the global batch, the steps of an epoch and the steps of the run."""
    data, optim, budget = config.data, config.optim, config.budget
    batch = data.batch_size * optim.accumulate * world_size
    per_epoch = images // batch
    keys = ("data.batch_size", "optim.accumulate")
    if not per_epoch:
        factors = f"{data.batch_size} x accumulate {optim.accumulate} x {world_size} processes"
        text = f"no step in an epoch: {images} images do not fill a global batch of {batch} ({factors})"
        largest = images // (optim.accumulate * world_size)
        way_out = f"set data.batch_size to at most {largest}" if largest else "use fewer processes"
        raise ConfigError([Problem(f"{text}; {way_out}", keys)])
    total = budget.steps or (budget.images or 0) // batch or (budget.epochs or 0) * per_epoch
    if not total:
        text = f"budget.images={budget.images} is below the global batch of {batch}; raise it"
        raise ConfigError([Problem(text, ("budget.images", *keys))])
    return batch, per_epoch, total
