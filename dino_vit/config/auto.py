"""Fit the settings of a run to its images, its network and its length (`recipe=auto`), each with its reason.

Every formula runs through two points: the published recipe (1.28 million images of 224 pixels, batch 512 to
1024, where nothing changes) and what learns from 20,000 images of 32 pixels within minutes.
"""

from collections.abc import Mapping, Sequence
from math import ceil, log2, sqrt

from dino_vit.config.draft import Draft
from dino_vit.config.facts import ImageFacts, RunFacts
from dino_vit.config.inherited import choose_channels
from dino_vit.config.length import Length, forward_flops, global_batch, run_length
from dino_vit.config.pretrain import PretrainConfig, needing_all_patches, scaled_lr
from dino_vit.config.sections import REDUCTION, START_TEACHER_TEMPERATURE, stem_problem
from dino_vit.config.settings import values
from dino_vit.core import height_width
from dino_vit.core.text import plural

IMAGENET = 1_280_000  # images
SHORT = 30_000  # steps; shorter runs get `_choose_for_short`
PUBLISHED_STEPS = 125_000  # 100 epochs of ImageNet at batch 1024
PUBLISHED_LR = 1e-3  # at batch 512
PUBLISHED_HALF_LIFE = 173  # steps; an EMA of 0.996
PUBLISHED_WIDTH = 384  # ViT-S
# What method=dinov2 regularises long runs with.
REGULARISATION = (
    *("model.drop_path", "model.drop_path_schedule", "model.layer_scale"),
    *("optim.layer_decay", "optim.patch_embed_lr"),
)
# Mean correlation of two images; from here on, all show the same kind of thing in the same place.
ALIKE = 0.25
PATCHES = (2, 4, 8, 16)
TIMM_PATCH = 32  # pixels of a cell of the last feature map, of nearly all of timm's models
# Largest side of a view, width and depth of the networks that a run of some minutes chooses from.
LADDER = ((48, 96, 4), (64, 128, 6), (64, 192, 6), (96, 192, 12), (128, 256, 12), (224, 384, 12))
# Images that a run must see to train the smallest network well. One with r times the operations needs r times
# as many to learn better features.
ENOUGH_IMAGES = 300_000


def choose_all(draft: Draft, facts: RunFacts) -> Draft:
    """Return the settings with whatever is open fitted to the images and to the length of the run."""
    choose_channels(draft, facts.images.channels, "as the images have")
    _choose_epochs(draft, facts)
    draft, length, is_short = _choose_network(draft, facts)
    _choose_schedule(draft, facts, length)
    if draft["method"] == "dino" or is_short:  # a short DINOv2 run takes DINO's
        _choose_rates(draft, length.steps, global_batch(draft, facts))
    elif "loss.teacher_temp" in draft.given and draft["loss.teacher_temp"] <= START_TEACHER_TEMPERATURE:
        reason = f"a temperature is given that does not rise from {START_TEACHER_TEMPERATURE}"
        draft.choose("loss.warmup_teacher_temp_epochs", 0, reason)
    return draft


def _choose_network(draft: Draft, facts: RunFacts) -> tuple[Draft, Length, bool]:
    """Choose the largest network that sees enough images, where `budget.minutes` may choose one."""
    minutes, batch = draft["budget.minutes"], global_batch(draft, facts)
    ladder = network_ladder(draft, facts.images.size) if minutes and not facts.checkpoint else []
    if not ladder:
        return _fit(draft, facts, {})
    smallest = forward_flops(_fit(draft, facts, ladder[0])[0].config)
    for rung in reversed(ladder):
        fitted, length, _ = _fit(draft, facts, rung)
        images, larger = length.steps * batch, forward_flops(fitted.config) / smallest
        if images >= ENOUGH_IMAGES * larger:
            break
    count = float(f"{images:.2g}")
    reason = f"sees about {count:,.0f} images in {minutes:g} minutes on this machine"
    if rung is ladder[0] and count < ENOUGH_IMAGES:
        reason = f"the smallest: {reason}, fewer than the {ENOUGH_IMAGES:,} it needs"
    return _fit(draft, facts, rung, reason)


def _fit(
    draft: Draft, facts: RunFacts, network: Mapping[str, object], reason: str = ""
) -> tuple[Draft, Length, bool]:
    """Choose what a step's time depends on as for a long run, or for a short one if that would be one.

    Return these settings, the length of the run with them, and whether it is a short one.
    """
    for is_short in (False, True):
        fitted = draft.copy()
        for key, value in network.items():
            fitted.choose(key, value, reason)
        _choose_sizes(fitted, facts.images)
        _choose_head(fitted, facts.images.count)
        if is_short:
            _choose_for_short(fitted, facts.images.likeness)
        if (length := run_length(fitted, facts)).steps >= SHORT:
            break
    return fitted, length, is_short


def network_ladder(draft: Draft, image_size: int) -> list[dict[str, object]]:
    """Return the sizes that `budget.minutes` chooses from, the smallest first; none if one was given."""
    config = draft.config
    is_open = all(map(draft.is_open, ("model.arch", "model.width", "model.depth")))
    if config.recipe != "auto" or config.init or not is_open:
        return []
    rungs = list[dict[str, object]]()
    for largest, width, depth in LADDER:
        side = min(3 * image_size // 4, largest)  # images are read whole, and smaller views take less time
        rung: dict[str, object] = {
            "model.arch": None,
            "model.width": width,
            "model.depth": depth,
            "model.heads": width // (32 if depth < 12 else 64),  # at depth 12 those of published ViTs
        }
        if draft.is_open("views.global_size"):
            is_given = not draft.is_open("model.patch_size")
            patch = config.model.patch_size if is_given else _nearest_patch(_patches(config), side)
            rung["views.global_size"] = max(side // patch, 2) * patch
        rungs.append(rung)
    return rungs


def _choose_sizes(draft: Draft, images: ImageFacts) -> None:
    """Give a small image fewer, smaller patches: 14 x 14 of 16 at 224 pixels, 8 x 8 of 4 at 32.

    Features are read from images larger than a view, which shows a part of an image, and so larger things.
    """
    config, image_size = draft.config, images.size
    is_square, given_sides = True, list[int]()
    if not draft.is_open("views.global_size"):
        given_sides += config.views.global_shape
        image_size, is_square = min(given_sides), len({*given_sides}) == 1
    if not draft.is_open("views.local_size"):
        given_sides += config.views.local_shape
    patch = TIMM_PATCH
    if not config.model.timm:
        sizes = _patches(config)
        fitting = [size for size in sizes if all(side % size == 0 for side in given_sides)] or sizes
        patch = _nearest_patch(fitting, image_size)
        patch = draft.choose("model.patch_size", patch, f"for {image_size} pixels: 16 at 224, 4 at 32")
    side = max(min(image_size, 224) // patch, 2) * patch
    reason = f"images of {image_size} pixels in whole patches, up to 224"
    side = min(height_width(draft.choose("views.global_size", side, reason)))
    local = ceil(3 * side / (7 * patch)) * patch
    draft.choose("views.local_size", local, f"3/7 of a global view, in patches of {patch}")
    if draft["augment.module"] is None:
        sigma = (0.1, max(0.1, min(2.0, round(2 * side / 224, 2))))
        draft.choose("augment.blur_sigma", sigma, "in proportion to the view: up to 2 at 224")
    larger = min(5 * images.size // 4, 2 * side, 224) // patch * patch
    if larger > side and is_square and not (config.model.timm or config.init):
        reason = "twice a global view, as it shows things larger; at most 5/4 of the images, and 224"
        draft.choose("model.image_size", larger, reason)


def _patches(config: PretrainConfig) -> Sequence[int]:
    """Return the sizes of patches to choose from."""
    return (REDUCTION,) if config.model.stem == "hybrid" else PATCHES


def _nearest_patch(sizes: Sequence[int], image_size: int) -> int:
    """Return the size of patches that fits images of some size best."""
    fitting = 16 * (min(image_size, 224) / 224) ** (2 / 3)
    return min(sizes, key=lambda size: abs(log2(size / fitting)))


def _choose_epochs(draft: Draft, facts: RunFacts) -> None:
    """Choose the length of a run that was given none."""
    images = facts.images.count
    if all(map(draft.is_open, ("budget.epochs", "budget.steps", "budget.minutes"))):
        passes = 10 * round(10 * (IMAGENET / images) ** 0.25)
        reason = f"more passes over fewer images: 100 x (1.28M / {images:,}) ^ 1/4, from 30 to 800"
        draft.choose("budget.epochs", min(max(passes, 30), 800), reason)


def _choose_schedule(draft: Draft, facts: RunFacts, length: Length) -> None:
    """Choose warm-up, freeze and evaluations by the length of the run."""
    epochs = length.steps / max(1, facts.images.count // global_batch(draft, facts))
    warmup, freeze = _round(min(10.0, epochs / 10)), _round(min(1.0, epochs / 20))
    draft.choose("optim.warmup_epochs", warmup, "a tenth of the run, at most 10 epochs")
    draft.choose("optim.freeze_last_layer_epochs", freeze, "a twentieth of the run, at most 1 epoch")
    reason = f"{plural(length.evaluations, 'time')} in a run, at least every 10 epochs"
    draft.choose("compute.eval_every", _round(min(10.0, epochs / length.evaluations)), reason)


def _choose_head(draft: Draft, images: int) -> None:
    """Give few images few prototypes, and a narrow network a narrow head and a start from larger weights."""
    prototypes = min(max(2 ** round(log2(65536 * images / IMAGENET)), 256), 65536)
    draft.choose("head.prototypes", prototypes, f"near {images:,} images / 20, from 256 to 65536")
    config = draft.config
    narrow = min(1.0, _width(config) / PUBLISHED_WIDTH)
    for key, published, least in (("hidden_dim", 2048, 256), ("bottleneck_dim", 256, 64)):
        size = max(2 ** round(log2(published * narrow)), least)
        draft.choose(f"head.{key}", size, f"{published} at width 384, less below; at least {least}")
    if not (config.model.timm or config.init):
        std = _round(0.02 * narrow ** (-2 / 3))  # the sums of a narrow network have fewer terms
        draft.choose("model.init_std", std, "0.02 at width 384, more below: x (384 / width) ^ 2/3")


def _choose_for_short(draft: Draft, likeness: float) -> None:
    """Keep a short run from the uniform state, and regularise it little; see docs/small-sets.md."""
    reason = "a short run learns faster from balanced targets; over some steps, as one has few images"
    draft.choose("loss.centering", "sinkhorn_ema", reason)
    draft.choose("loss.koleo_weight", 0.03, "keeps the effective rank of a short run")
    if not (draft["init.weights"] or draft.config.model.timm):
        reason = "patches learn shapes from the edges around them, before CLS tokens do"
        draft.choose("loss.edge_weight", 2.0, reason)
    reason = "a short run learns faster from views with more of the image"
    draft.choose("views.global_scale", (0.25, 1.0), reason)
    draft.choose("views.local_scale", (0.1, 0.4), reason)
    config = draft.config
    if likeness >= ALIKE:
        _choose_stem(draft, config, likeness)
    same_size = config.views.global_shape == config.views.local_shape
    if not (config.model.timm or needing_all_patches(config) or same_size):
        reason = "a short run sees more images where most of their patches are left out"
        draft.choose("model.patch_drop", 0.75, reason)
        reason = "a short run learns more from more images than from more views of each"
        draft.choose("views.local_count", 4, reason)
    reason = f"without BatchNorm, runs of fewer than {SHORT:,} steps often collapse"
    draft.choose("head.batch_norm", True, reason)
    defaults = values(PretrainConfig())
    for key in REGULARISATION:
        if draft[key] != defaults[key]:
            draft.choose(key, defaults[key], f"DINO's, for a run of fewer than {SHORT:,} steps")


def _choose_stem(draft: Draft, config: PretrainConfig, likeness: float) -> None:
    """Begin with convolutions, which learn shapes in minutes; narrow ones, as their time is that of steps."""
    patch = height_width(draft["model.patch_size"])
    if config.model.timm or config.init or stem_problem("conv", patch, config.model.resnet_width):
        return
    reason = f"images lie alike (correlation {likeness:.2f}), so they differ by shapes, which a short run "
    reason += "learns by early convolutions"
    if draft.choose("model.stem", "conv", reason) == "conv":
        reason = "half the width of the tokens: as good, in less than half the time"
        draft.choose("model.stem_width", max(1, config.model.shape[0] // 2), reason)


def _choose_rates(draft: Draft, steps: int, batch: int) -> None:
    """Choose temperature, momentum and learning rate by the steps; from 125,000 on, the published."""
    shortness = max(1.0, PUBLISHED_STEPS / steps)
    _choose_temperature(draft, shortness)
    half_life = max(20.0, PUBLISHED_HALF_LIFE / shortness**0.4)
    reason = f"half-life of {half_life:.0f} steps for a run of {steps:,}: 173 x (steps / 125,000) ^ 0.4"
    draft.choose("teacher.momentum", round(2 ** (-1 / half_life), 4), reason)
    if draft["optim.name"] == "adamw":
        _choose_learning_rate(draft, steps, batch)


def _choose_temperature(draft: Draft, shortness: float) -> None:
    """Sharpen the targets of a short run, which at the published temperature may stay uniform.

    It has no time for a warm-up. A warm-up that was given rises to the temperature of the user.
    """
    if not draft.is_open("loss.warmup_teacher_temp_epochs"):
        return
    if draft["loss.warmup_teacher_temp_epochs"]:
        draft.choose("loss.warmup_teacher_temp_epochs", 0, "one temperature in a short run")
    reason = "sharper in a short run: 0.04 x (steps / 125,000) ^ 1/9, at least 0.02"
    draft.choose("loss.teacher_temp", _round(max(0.02, 0.04 / shortness ** (1 / 9))), reason)


def _choose_learning_rate(draft: Draft, steps: int, batch: int) -> None:
    """Raise the published learning rate for a narrow network and for a short run."""
    width, scaling = _width(draft.config), draft["optim.lr_scaling"]
    # Linear scaling was published for batches of 512 to 1024; beyond them the rate grows as the root.
    nearest_published_batch = min(max(batch, 512), 1024)
    rate = PUBLISHED_LR * nearest_published_batch / 512 * sqrt(batch / nearest_published_batch)
    rate *= sqrt(max(1.0, PUBLISHED_WIDTH / width))
    rate = min(rate * max(1.0, PUBLISHED_STEPS / steps) ** (1 / 6), 5e-3)
    stated = "" if scaling == "none" else " (optim.lr is for 256)"
    reason = f"{rate:.2g} at batch {batch}{stated}, width {width} and {steps:,} steps: 1e-3 at 512, 384 and "
    reason += "125,000, more for larger batches, narrower networks and shorter runs, at most 5e-3"
    lr = rate / scaled_lr(1.0, batch, scaling)  # as optim.lr is stated for batch 256
    draft.choose("optim.lr", _round(lr), reason)


def _width(config: PretrainConfig) -> int:
    """Return the width of the backbone; that of timm's, still unknown, counts as the published one."""
    return PUBLISHED_WIDTH if config.model.timm else config.model.shape[0]


def _round(value: float) -> float:
    return float(f"{value:.3g}")
