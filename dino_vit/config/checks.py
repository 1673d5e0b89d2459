"""Combinations of pretraining settings that are refused, each with a way out.

These checks see the settings alone. `training.plan` also knows the number of images and processes.
"""

from collections.abc import Iterator
from math import sqrt

from dino_vit.config.sections import (
    HEAD_CHANNELS,
    OF_OUR_TRANSFORMERS,
    STUDENT_TEMPERATURE,
    AugmentSettings,
    Budget,
    Data,
    Head,
    Init,
    Loss,
    Model,
    Optim,
    Run,
    Views,
)
from dino_vit.config.settings import Problem

# No scaled learning rate outside of these is known to have worked (dino#61, #273).
SANE_LR = {"adamw": (1e-7, 1e-2), "sgd": (1e-6, 10.0), "lars": (1e-6, 50.0)}


def scaled_lr(lr: float, global_batch: int, scaling: str) -> float:
    """Return the learning rate at `global_batch` images of one given for 256."""
    return lr * {"linear": global_batch / 256, "sqrt": sqrt(global_batch / 256), "none": 1.0}[scaling]


def check_model(model: Model, optim: Optim) -> Iterator[Problem]:
    """Check the size of the backbone, and that what a model of timm ignores is not given."""
    sizes = {"model.width": model.width, "model.depth": model.depth, "model.heads": model.heads}
    given = [f"{key}={value}" for key, value in sizes.items() if value is not None]
    missing = [key for key in ("model.width", "model.depth") if sizes[key] is None]
    keys = ("model.arch", *sizes)
    if model.timm and "." in model.timm:
        text = f"model.arch={model.arch} names weights, but model.arch is a network without any"
        bare = model.timm.partition(".")[0]
        yield Problem(f"{text}; give init.weights={model.arch}, or model.arch=timm:{bare}", keys[:1])
    elif model.timm:
        unused = [key for key in sorted(OF_OUR_TRANSFORMERS) if _is_changed(key, model, optim)]
        if given or unused:
            text = f"model.arch={model.arch} is built as timm defines it"
            yield Problem(f"{text}; remove {', '.join([*given, *unused])}", ("model.arch", *unused))
    elif model.arch and given:
        text = f"model.arch={model.arch} already sets width, depth and heads"
        yield Problem(f"{text}; remove it (model.arch=null) or remove {', '.join(given)}", keys)
    elif model.arch:
        return
    elif missing:
        yield Problem(f"without model.arch, {', '.join(missing)} must be given too; or give model.arch", keys)
    else:
        yield from _check_heads(model)


def _is_changed(key: str, model: Model, optim: Optim) -> bool:
    section, _, name = key.partition(".")
    settings = model if section == "model" else optim
    return bool(getattr(settings, name) != type(settings).model_fields[name].default)


def _check_heads(model: Model) -> Iterator[Problem]:
    width, _, heads = model.shape
    keys = ("model.width", "model.heads")
    if not model.heads and width % HEAD_CHANNELS:
        text = f"model.width={width} is not a multiple of the {HEAD_CHANNELS} channels of a head"
        yield Problem(f"{text}; give model.heads, or another width", keys)
    elif width % heads:
        near = min((n for n in range(1, width + 1) if width % n == 0), key=lambda n: abs(n - heads))
        text = f"model.width={width} is not divisible by model.heads={heads}"
        yield Problem(f"{text}; use {near} heads, or a width that is a multiple of {heads}", keys)
    elif model.positions == "rotary" and width // heads % 4:
        text = f"model.positions=rotary needs heads of 4, 8, ... channels, not of {width // heads}"
        yield Problem(f"{text}; use other model.heads", ("model.positions", *keys))


def check_views(views: Views, augment: AugmentSettings, model: Model) -> Iterator[Problem]:
    """Check sizes, counts and ranges of the views."""
    patch = 1 if model.timm else model.patch_size  # what timm's take is known once they are built
    for name, size in (("global_size", views.global_shape), ("local_size", views.local_shape)):
        odd = [side for side in size if side % patch]
        if odd and (name == "global_size" or views.local_count):
            below, above = odd[0] // patch * patch, (odd[0] // patch + 1) * patch
            text = f"views.{name}={getattr(views, name)} is not divisible by model.patch_size={patch}"
            nearest = f"{below} or {above}" if below else above
            yield Problem(
                f"{text}; use {nearest}, or another patch size", (f"views.{name}", "model.patch_size")
            )
    if views.global_count + views.local_count < 2:
        text = "DINO needs at least two views per image; set views.local_count or views.global_count=2"
        yield Problem(text, ("views.global_count", "views.local_count"))
    ranges = {f"views.{name}": getattr(views, name) for name in ("global_scale", "local_scale")}
    ranges |= {"augment.blur_sigma": augment.blur_sigma}
    for key, (low, high) in ranges.items():
        if low > high:
            yield Problem(f"{key}=[{low}, {high}] must go from low to high; try [{high}, {low}]", (key,))


def check_channels(data: Data, augment: AugmentSettings) -> Iterator[Problem]:
    """Check what depends on the number of channels."""
    for name, values in (("mean", data.mean), ("std", data.std)):
        if values is not None and len(values) != data.channels:
            text = (
                f"data.{name}={list(values)} does not fit data.channels={data.channels}; give one value per "
            )
            text += f"channel, or data.{name}=null to have it measured"
            yield Problem(text, (f"data.{name}", "data.channels"))
    if data.range and data.range[0] >= data.range[1]:
        yield Problem(f"data.range={list(data.range)} must go from low to high", ("data.range",))
    coloured = [f"augment.{name}" for name in ("saturation", "hue", "grey") if getattr(augment, name)]
    if data.channels != 3 and coloured:
        text = f"data.channels={data.channels} is not RGB; set {' '.join(f'{key}=0' for key in coloured)}"
        yield Problem(text, ("data.channels", *coloured))


def check_temperatures(loss: Loss) -> Iterator[Problem]:
    """Refuse temperatures with which the teacher's targets are no sharper than the student's outputs."""
    for name in ("teacher_temp", "warmup_teacher_temp"):
        if getattr(loss, name) >= STUDENT_TEMPERATURE:
            text = f"loss.{name}={getattr(loss, name)} is not below the student's {STUDENT_TEMPERATURE}"
            yield Problem(f"{text}; use 0.04 to 0.07", (f"loss.{name}",))
    epochs, start, end = loss.warmup_teacher_temp_epochs, loss.warmup_teacher_temp, loss.teacher_temp
    if epochs and start >= end:
        keys = ("loss.warmup_teacher_temp", "loss.teacher_temp", "loss.warmup_teacher_temp_epochs")
        text = f"the teacher's temperature cannot warm up over {epochs} epochs from {start} to {end}"
        yield Problem(f"{text}; raise loss.teacher_temp (0.07), or set {keys[2]}=0", keys)


def check_masks(loss: Loss, head: Head, views: Views, model: Model) -> Iterator[Problem]:
    """Refuse masks that hide nothing, and what would have no effect without them."""
    if not loss.patch_weight and not head.shared:
        text = "head.shared=false is a head for masked patches, but loss.patch_weight=0 masks none"
        yield Problem(f"{text}; set loss.patch_weight=1, or head.shared=true", ("head.shared",))
    elif loss.patch_weight and model.timm:
        text = f"loss.patch_weight={loss.patch_weight} hides patches, which {model.arch} cannot"
        yield Problem(f"{text}; set loss.patch_weight=0, or take one of our sizes", ("loss.patch_weight",))
    elif loss.patch_weight:
        rows, columns = (side // model.patch_size for side in views.global_shape)
        if min(rows, columns) < 2 or rows * columns < 10:  # at least a tenth of the patches is masked
            text = f"views.global_size={views.global_size} has {rows} x {columns} patches, too few for masks"
            keys = ("views.global_size", "model.patch_size", "loss.patch_weight")
            yield Problem(f"{text}; use smaller patches, or loss.patch_weight=0", keys)


def check_rates(optim: Optim, data: Data) -> Iterator[Problem]:
    """Refuse rates that cannot work on any number of processes."""
    yield from check_scaled_lr(optim, data.batch_size * optim.accumulate, too_low=False)
    if optim.min_lr > optim.lr:
        text = f"optim.min_lr={optim.min_lr} is above optim.lr={optim.lr}"
        yield Problem(f"{text}; it is the learning rate at the end", ("optim.min_lr", "optim.lr"))


def check_scaled_lr(optim: Optim, global_batch: int, *, too_low: bool = True) -> Iterator[Problem]:
    """Refuse a scaled learning rate above the sane range, or below it if `too_low`."""
    lr = scaled_lr(optim.lr, global_batch, optim.lr_scaling)
    lowest, highest = SANE_LR[optim.name]
    if lr > highest or (too_low and lr < lowest):
        text = f"optim.lr={optim.lr} is {lr:.3g} at a global batch of {global_batch} (lr_scaling="
        text += f"{optim.lr_scaling}); {optim.name} learns between {lowest:g} and {highest:g}"
        keys = ("optim.lr", "optim.lr_scaling", "optim.name", "optim.accumulate", "data.batch_size")
        yield Problem(text, keys)


def check_lengths(budget: Budget, run: Run) -> Iterator[Problem]:
    """Check the length of the run and the intervals in it."""
    units = {f"budget.{name}": value for name, value in budget}
    given = [f"{key}={value}" for key, value in units.items() if value is not None]
    if len(given) != 1:
        text = f"{' and '.join(given)} are both given" if given else "the run has no length"
        yield Problem(f"{text}; give exactly one of {', '.join(units)}", tuple(units))
    if run.eval_every and run.eval_every_steps:
        keys = ("run.eval_every", "run.eval_every_steps")
        yield Problem(f"{' and '.join(keys)} are both given; give one", keys)
    if run.keep_every and run.keep_every % run.checkpoint_every:
        text = f"run.keep_every={run.keep_every} is not a multiple of run.checkpoint_every="
        yield Problem(f"{text}{run.checkpoint_every}", ("run.keep_every", "run.checkpoint_every"))


def check_phases(
    optim: Optim, loss: Loss, init: Init | None, epochs: float, budget_key: str
) -> Iterator[Problem]:
    """Refuse phases at the start of a run that are as long as the run."""
    phases: dict[str, float] = {
        "optim.warmup_epochs": optim.warmup_epochs,
        "optim.freeze_last_layer_epochs": optim.freeze_last_layer_epochs,
        "loss.warmup_teacher_temp_epochs": loss.warmup_teacher_temp_epochs,
        "init.head_epochs": init.head_epochs if init else 0,
    }
    for key, length in phases.items():
        if length and length >= epochs:
            # The temperature's warm-up counts whole epochs.
            short = int(epochs / 10) if key.startswith("loss.") else float(f"{epochs / 10:.2g}")
            text = f"{key}={length:g} is not shorter than the run ({epochs:.3g} epochs)"
            yield Problem(f"{text}; set {key}={short}, or a larger {budget_key}", (key, budget_key))
