"""Combinations of pretraining settings that are refused, each with a way out.

These checks see the settings alone. `training.plan` also knows the number of images and processes.
"""

from collections.abc import Iterator
from math import ceil, prod, sqrt

from dino_vit.config.sections import (
    HEAD_CHANNELS,
    OF_OUR_TRANSFORMERS,
    Budget,
    Data,
    Head,
    Init,
    Loss,
    Masks,
    Model,
    Optim,
    Photometry,
    Run,
    Teacher,
    Views,
)
from dino_vit.config.settings import Problem
from dino_vit.core.progress import plural

MOST_PARAMETERS = 1e11  # of a backbone or a head; no machine trains more
# No scaled learning rate outside of these is known to have worked (dino#61, #273).
SANE_LR = {"adamw": (1e-7, 1e-2), "sgd": (1e-6, 10.0), "lars": (1e-6, 50.0)}


def scaled_lr(lr: float, global_batch: int, scaling: str) -> float:
    """Return the learning rate at `global_batch` images of one given for 256."""
    return lr * {"linear": global_batch / 256, "sqrt": sqrt(global_batch / 256), "none": 1.0}[scaling]


def check_model(model: Model, optim: Optim) -> Iterator[Problem]:
    """Check the size of the backbone, and that what a model of timm ignores is not given."""
    sizes = {"width": model.width, "depth": model.depth, "heads": model.heads}
    given = [f"model.{name}={value}" for name, value in sizes.items() if value is not None]
    missing = [f"model.{name}" for name in ("width", "depth") if sizes[name] is None]
    keys = ("model.arch", "model.width", "model.depth", "model.heads")
    if model.timm and "." in model.timm:
        text = f"model.arch={model.arch} names weights, but model.arch is a network without any"
        bare = model.timm.partition(".")[0]
        advice = f"start from them by init.weights={model.arch}, or give model.arch=timm:{bare}"
        yield Problem(f"{text}; {advice}", keys[:1])
    elif model.timm:
        sections: dict[str, Model | Optim] = {"model": model, "optim": optim}
        unused = []
        for key in sorted(OF_OUR_TRANSFORMERS):
            section, name = key.split(".")
            if getattr(sections[section], name) != type(sections[section]).model_fields[name].default:
                unused.append(key)
        if given or unused:
            text = f"model.arch={model.arch} is built as timm defines it"
            named = ", ".join([*given, *unused])
            yield Problem(f"{text}; remove {named}", ("model.arch", *unused))
    elif model.arch and given:
        text = f"model.arch={model.arch} already sets width, depth and heads"
        yield Problem(f"{text}; remove it (model.arch=null) or remove {', '.join(given)}", keys)
    elif not model.arch and missing:
        yield Problem(f"without model.arch, {', '.join(missing)} must be given too; or give model.arch", keys)
    elif not model.arch and not model.heads and model.shape[0] % HEAD_CHANNELS:
        text = f"model.width={model.width} is not a multiple of the {HEAD_CHANNELS} channels of a head"
        yield Problem(f"{text}; give model.heads, or another width", keys[1::2])
    elif not model.arch and model.shape[0] % model.shape[2]:  # each head gets an equal part of the width
        width, _, heads = model.shape
        near = min((n for n in range(1, width + 1) if width % n == 0), key=lambda n: abs(n - heads))
        text = f"model.width={width} is not divisible by model.heads={heads}"
        yield Problem(f"{text}; use {near} heads, or a width that is a multiple of {heads}", keys[1::2])
    elif model.positions == "rotary" and model.shape[0] // model.shape[2] % 4:
        text = "model.positions=rotary turns the channels of a head in fours"
        yield Problem(
            f"{text}, but a head has {model.shape[0] // model.shape[2]}; use other model.heads",
            ("model.positions", *keys[1::2]),
        )


def check_parameters(model: Model, head: Head) -> Iterator[Problem]:
    """Refuse a network that no machine could hold."""
    width, depth, _ = (0, 0, 0) if model.timm else model.shape
    hidden, layers = head.hidden_dim, head.layers
    bottleneck, prototypes = head.bottleneck_dim, head.prototypes
    parts = (
        (12 * width**2 * depth, {"model.width": width, "model.depth": depth}),
        (hidden**2 * layers, {"head.hidden_dim": hidden, "head.layers": layers}),
        (bottleneck * prototypes, {"head.bottleneck_dim": bottleneck, "head.prototypes": prototypes}),
    )
    for count, sizes in parts:
        if count > MOST_PARAMETERS:
            text = " and ".join(f"{key}={size}" for key, size in sizes.items())
            yield Problem(
                f"{text} make {count:.1e} parameters; lower them to below {MOST_PARAMETERS:.0e}", tuple(sizes)
            )


def check_views(views: Views, photometry: Photometry, model: Model) -> Iterator[Problem]:
    """Check sizes, counts and ranges of the views."""
    patch = 1 if model.timm else model.patch_size  # what timm's take is known once they are built
    for name, size in (("global_size", views.global_shape), ("local_size", views.local_shape)):
        odd = [side for side in size if side % patch]
        if odd and (name == "global_size" or views.local_count):
            below, above = odd[0] // patch * patch, (odd[0] // patch + 1) * patch
            text = f"views.{name}={getattr(views, name)} is not divisible by model.patch_size={patch}"
            nearest = f"{below} or {above}" if below else str(above)
            yield Problem(
                f"{text}; use {nearest}, or another patch size", (f"views.{name}", "model.patch_size")
            )
    if views.global_count + views.local_count < 2:
        text = "a single view has no other view to agree with; set views.local_count or views.global_count=2"
        yield Problem(text, ("views.global_count", "views.local_count"))
    ranges = {f"views.{name}": getattr(views, name) for name in ("global_scale", "local_scale", "ratio")}
    ranges |= {f"photometry.{name}": getattr(photometry, name) for name in ("blur_sigma", "noise_std")}
    for key, (low, high) in ranges.items():
        if low > high:
            yield Problem(f"{key}=[{low}, {high}] must go from low to high; try [{high}, {low}]", (key,))


def check_channels(data: Data, photometry: Photometry) -> Iterator[Problem]:
    """Check what depends on the number of channels."""
    for name, values in (("mean", data.mean), ("std", data.std)):
        if values is not None and len(values) != data.channels:
            text = f"data.{name}={list(values)} does not fit data.channels={data.channels}"
            advice = f"give one value per channel, or data.{name}=null to have it measured"
            yield Problem(f"{text}; {advice}", (f"data.{name}", "data.channels"))
    if data.range and data.range[0] >= data.range[1]:
        low, high = data.range
        yield Problem(f"data.range=[{low}, {high}] must go from low to high", ("data.range",))
    coloured = [f"photometry.{name}" for name in ("saturation", "hue", "grey") if getattr(photometry, name)]
    if data.channels != 3 and coloured:
        text = f"{', '.join(coloured)} need RGB images, but data.channels={data.channels}"
        advice = " ".join(f"{key}=0" for key in coloured)
        yield Problem(f"{text}; set {advice}", ("data.channels", *coloured))


def check_temperatures(loss: Loss) -> Iterator[Problem]:
    """Refuse temperatures with which the teacher's targets are no sharper than the student's outputs."""
    for name in ("teacher_temp", "warmup_teacher_temp"):
        given = getattr(loss, name)
        if given >= loss.student_temp:
            text = f"loss.{name}={given} is not below loss.student_temp={loss.student_temp}"
            advice = "the teacher must be sharper than the student; use 0.04 to 0.07"
            yield Problem(f"{text}; {advice}", (f"loss.{name}", "loss.student_temp"))
    epochs, start, end = loss.warmup_teacher_temp_epochs, loss.warmup_teacher_temp, loss.teacher_temp
    if epochs and start >= end:
        keys = ("loss.warmup_teacher_temp", "loss.teacher_temp", "loss.warmup_teacher_temp_epochs")
        text = f"the teacher's temperature cannot warm up over {epochs} epochs from {start} to {end}"
        yield Problem(f"{text}; raise loss.teacher_temp (0.07), or set {keys[2]}=0", keys)


def check_masks(loss: Loss, masks: Masks, head: Head, views: Views, model: Model) -> Iterator[Problem]:
    """Refuse masks that hide nothing, and what would have no effect without them."""
    patch = model.patch_size
    if loss.patch_weight and model.timm:
        text = f"loss.patch_weight={loss.patch_weight} hides patches, which {model.arch} cannot"
        yield Problem(f"{text}; set loss.patch_weight=0, or take one of our sizes", ("loss.patch_weight",))
        return
    if not loss.patch_weight:
        if not head.shared:
            text = "head.shared=false is a head for masked patches, but loss.patch_weight=0 masks none"
            yield Problem(f"{text}; set loss.patch_weight=1, or head.shared=true", ("head.shared",))
        return
    low, high = masks.ratio
    if low > high:
        text = f"masks.ratio=[{low}, {high}] must go from low to high; try [{high}, {low}]"
        yield Problem(text, ("masks.ratio",))
    if not masks.probability:
        text = f"loss.patch_weight={loss.patch_weight} needs masks, but masks.probability=0 masks no view"
        yield Problem(f"{text}; use 0.5, or loss.patch_weight=0", ("masks.probability", "loss.patch_weight"))
    patches = prod(side // patch for side in views.global_shape)
    if min(views.global_shape) // patch < 2:
        text = f"views.global_size={views.global_size} has one row of patches of {patch}"
        advice = "masks are rectangles smaller than a view: use smaller patches, or loss.patch_weight=0"
        yield Problem(f"{text}; {advice}", ("views.global_size", "model.patch_size", "loss.patch_weight"))
    if int(low * patches) < 1:
        text = f"masks.ratio={list(masks.ratio)} of {plural(patches, 'patch', 'patches')} may mask none"
        advice = f"start it at {ceil(100 / max(patches, 1)) / 100:g} or more, or use smaller patches"
        yield Problem(f"{text}; {advice}", ("masks.ratio", "model.patch_size", "views.global_size"))


def check_rates(optim: Optim, teacher: Teacher, data: Data) -> Iterator[Problem]:
    """Refuse rates that cannot work on any number of processes."""
    yield from check_scaled_lr(optim, data.batch_size * optim.accumulate, too_low=False)
    if optim.min_lr > optim.lr:
        text = f"optim.min_lr={optim.min_lr} is above optim.lr={optim.lr}"
        yield Problem(f"{text}; it is the learning rate at the end", ("optim.min_lr", "optim.lr"))
    if teacher.momentum > teacher.momentum_end:
        text = f"teacher.momentum={teacher.momentum} is above teacher.momentum_end={teacher.momentum_end}"
        keys = ("teacher.momentum", "teacher.momentum_end")
        yield Problem(f"{text}; the teacher must slow down over a run", keys)


def check_scaled_lr(optim: Optim, global_batch: int, *, too_low: bool = True) -> Iterator[Problem]:
    """Refuse a scaled learning rate above the sane range, or below it if `too_low`."""
    lr = scaled_lr(optim.lr, global_batch, optim.lr_scaling)
    lowest, highest = SANE_LR[optim.name]
    if lr > highest or (too_low and lr < lowest):
        text = (
            f"optim.lr={optim.lr} is {lr:.3g} at a global batch of {global_batch} "
            f"(lr_scaling={optim.lr_scaling})"
        )
        advice = f"{optim.name} learns between {lowest:g} and {highest:g}; the recipe's lr is 0.0005"
        keys = ("optim.lr", "optim.lr_scaling", "optim.name", "optim.accumulate", "data.batch_size")
        yield Problem(f"{text}; {advice}", keys)


def check_lengths(budget: Budget, run: Run) -> Iterator[Problem]:
    """Check the length of the run and the intervals in it."""
    units = {f"budget.{name}": getattr(budget, name) for name in ("epochs", "steps", "images", "minutes")}
    given = [f"{key}={value}" for key, value in units.items() if value is not None]
    if len(given) != 1:
        text = f"{' and '.join(given)} are both given" if given else "the run has no length"
        yield Problem(f"{text}; give exactly one of {', '.join(units)}", tuple(units))
    if run.eval_every and run.eval_every_steps:
        text = (
            f"run.eval_every={run.eval_every} and run.eval_every_steps={run.eval_every_steps} are both given"
        )
        yield Problem(f"{text}; give one of them", ("run.eval_every", "run.eval_every_steps"))
    if run.keep_every and run.keep_every % run.checkpoint_every:
        text = (
            f"run.keep_every={run.keep_every} is not a multiple of "
            f"run.checkpoint_every={run.checkpoint_every}, so nothing would be kept"
        )
        yield Problem(text, ("run.keep_every", "run.checkpoint_every"))


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
