"""Choose settings that were not given: `recipe=auto` from the images, `init` to keep trained weights good.

Every formula of `auto` runs through two points: the published recipe (1.28 million images of 224 pixels,
batch 512 to 1024, where nothing changes) and what learns from 20,000 images of 32 pixels within minutes.
"""

from collections.abc import Sequence
from math import ceil, log2, sqrt
from typing import Any, NamedTuple, TypeVar, cast

from dino_vit.config.pretrain import PHASES, PretrainConfig, fitting_phase, needing_all_patches, scaled_lr
from dino_vit.config.sections import REDUCTION, START_TEACHER_TEMPERATURE, stem_problem
from dino_vit.config.settings import get, given_keys
from dino_vit.core import height_width
from dino_vit.core.text import plural

T = TypeVar("T")

IMAGENET = 1_280_000  # images
PUBLISHED_STEPS = 125_000  # 100 epochs of ImageNet at batch 1024
PUBLISHED_HALF_LIFE = 173  # steps; an EMA of 0.996
PUBLISHED_WIDTH = 384  # ViT-S
PATCHES = (2, 4, 8, 16)
TIMM_PATCH = 32  # pixels of a cell of the last feature map, of nearly all of timm's models
# Largest side of a view, width and depth of the networks that a run of some minutes chooses from.
LADDER = ((48, 96, 4), (64, 128, 6), (64, 192, 6), (96, 192, 12), (128, 256, 12), (224, 384, 12))
# That the smallest network must see. A network r times as expensive needs r times as many to learn better.
ENOUGH_IMAGES = 300_000
# What method=dinov2 regularises long runs with.
REGULARISATION = (
    *("model.drop_path", "model.drop_path_schedule", "model.layer_scale"),
    *("optim.layer_decay", "optim.patch_embed_lr"),
)
EVALUATIONS = 6  # in a short run
ALIKE = 0.25  # mean correlation of two images from which all are of one kind of thing at one place
SHORT = 30_000  # steps; shorter runs may never leave the uniform state without BatchNorm in the head


class Choice(NamedTuple):
    """A setting that was chosen, and why."""

    key: str
    value: object
    reason: str


class Rung(NamedTuple):
    """A size of the network and of its views, and what an image costs with it, in any unit."""

    settings: dict[str, object]
    cost: float


def network_ladder(config: PretrainConfig, image_size: int) -> list[Rung]:
    """Return the sizes that `budget.minutes` chooses from, the smallest first; none if the user gave one."""
    given = given_keys(config)
    if config.recipe != "auto" or config.init or {"model.arch", "model.width", "model.depth"} & given:
        return []
    rungs = []
    for largest, width, depth in LADDER:
        side = min(3 * image_size // 4, largest)  # images are read whole, and smaller views take less time
        settings: dict[str, object] = {
            "model.arch": None,
            "model.width": width,
            "model.depth": depth,
            "model.heads": width // (32 if depth < 12 else 64),  # at depth 12 those of published ViTs
        }
        views, its_own = config.views, "model.patch_size" in given
        if "views.global_size" in given:
            side = max(views.global_shape)
        else:
            patch = min(_patches(config), key=lambda size: abs(log2(size / _patch(side))))
            patch = config.model.patch_size if its_own else patch
            settings["views.global_size"] = max(side // patch, 2) * patch
        tokens = (side / (config.model.patch_size if its_own else _patch(side))) ** 2
        # A global view passes the teacher and, three times as long, the student; local ones are 3/7 as wide.
        passes = 4 * views.global_count * (1 + tokens / (6 * width)) + 3 * views.local_count * (3 / 7) ** 2
        rungs.append(Rung(settings, tokens * passes * width**2 * depth))
    return rungs


class _Choices:
    """Collect choices for settings that the user did not give."""

    def __init__(self, config: PretrainConfig) -> None:
        self.config, self.given = config, given_keys(config)
        self.made: dict[str, Choice] = {}

    def choose(self, key: str, value: T, reason: str) -> T:
        """Choose `value` unless the user gave one; return the value in force."""
        if key in self.given:
            return cast(T, get(self.config, key))
        self.made[key] = Choice(key, value, reason)
        return value

    def value(self, key: str) -> Any:
        return self.made[key].value if key in self.made else get(self.config, key)


def auto_choices(
    config: PretrainConfig,
    *,
    image_size: int,
    images: int,
    channels: int,
    global_batch: int,
    likeness: float = 0.0,
    steps: int | None = None,
    evaluations: int = EVALUATIONS,
) -> list[Choice]:
    """Return the choices of `recipe=auto`; `image_size` is the shorter side of a typical image.

    `likeness` is how alike images are laid out, the mean correlation of two. `steps` and `evaluations` are
    those that fit into `budget.minutes`.
    """
    if config.recipe != "auto":
        return []
    choices = _Choices(config)
    patch, side = _choose_sizes(choices, image_size)
    _choose_reading(choices, image_size, patch, side)
    steps = _choose_length(choices, images, global_batch, steps, evaluations)
    _choose_head(choices, images)
    if steps < SHORT:
        _choose_gentle(choices, likeness)
    if config.method == "dino" or steps < SHORT:  # for a long run DINOv2 has published its own
        _choose_rates(choices, steps, global_batch)
    elif "loss.teacher_temp" in choices.given and config.loss.teacher_temp <= START_TEACHER_TEMPERATURE:
        reason = f"a temperature is given that does not rise from {START_TEACHER_TEMPERATURE}"
        choices.choose("loss.warmup_teacher_temp_epochs", 0, reason)
    return [*channel_choices(config, channels, "as the images have"), *choices.made.values()]


def channel_choices(config: PretrainConfig, channels: int, reason: str) -> list[Choice]:
    """Return the choices for images of so many channels."""
    choices = _Choices(config)
    channels = choices.choose("data.channels", channels, reason)
    if channels != 3:
        for name in ("mean", "std"):
            choices.choose(f"data.{name}", None, "to be measured, since ImageNet's is for RGB")
        for name in ("saturation", "hue", "grey"):
            choices.choose(f"augment.{name}", 0.0, f"{channels} channels are not RGB")
    return list(choices.made.values())


def _choose_sizes(choices: _Choices, image_size: int) -> tuple[int, int]:
    """Give a small image fewer, smaller patches: 14 x 14 of 16 at 224 pixels, 8 x 8 of 4 at 32.

    Return the sides of a patch and of a global view.
    """
    views = choices.config.views
    given_sides: list[int] = []
    if "views.global_size" in choices.given:
        given_sides += views.global_shape
        image_size = min(views.global_shape)
    if "views.local_size" in choices.given:
        given_sides += views.local_shape
    patch = TIMM_PATCH
    if not choices.config.model.timm:
        sizes = _patches(choices.config)
        fitting = [size for size in sizes if all(side % size == 0 for side in given_sides)] or sizes
        patch = min(fitting, key=lambda size: abs(log2(size / _patch(image_size))))
        patch = choices.choose("model.patch_size", patch, f"for {image_size} pixels: 16 at 224, 4 at 32")
    side = max(min(image_size, 224) // patch, 2) * patch
    reason = f"images of {image_size} pixels in whole patches, up to 224"
    side = min(height_width(choices.choose("views.global_size", side, reason)))
    local = ceil(3 * side / (7 * patch)) * patch
    choices.choose("views.local_size", local, f"3/7 of a global view, in patches of {patch}")
    sigma = (0.1, max(0.1, min(2.0, round(2 * side / 224, 2))))
    choices.choose("augment.blur_sigma", sigma, "in proportion to the view: up to 2 at 224")
    return patch, side


def _choose_reading(choices: _Choices, image_size: int, patch: int, side: int) -> None:
    """Read features from images larger than a view, which shows a part of an image, and so larger things."""
    config = choices.config
    larger = min(5 * image_size // 4, 2 * side, 224) // patch * patch
    square = "views.global_size" not in choices.given or len({*config.views.global_shape}) == 1
    if larger > side and square and not (config.model.timm or config.init):
        reason = "twice a global view, as it shows things larger; at most 5/4 of the images, and 224"
        choices.choose("model.image_size", larger, reason)


def _patches(config: PretrainConfig) -> Sequence[int]:
    """Return the sizes of patches to choose from."""
    return (REDUCTION,) if config.model.stem == "hybrid" else PATCHES


def _patch(image_size: int) -> float:
    """Return the patch size that fits images of some size, which need not be a power of two."""
    return 16 * (min(image_size, 224) / 224) ** (2 / 3)


def _choose_length(
    choices: _Choices, images: int, global_batch: int, steps: int | None, evaluations: int
) -> int:
    """Choose the length of the run and of its warm-up; return the number of steps."""
    budget = choices.config.budget
    if not {"budget.epochs", "budget.steps", "budget.images", "budget.minutes"} & choices.given:
        epochs = min(max(10 * round(10 * (IMAGENET / images) ** 0.25), 30), 800)
        reason = f"more passes over fewer images: 100 x (1.28M / {images:,}) ^ 1/4, from 30 to 800"
        budget = budget.model_copy(update={"epochs": choices.choose("budget.epochs", epochs, reason)})
    steps = steps or max(1, budget.total_steps(images, global_batch))  # 0 is what `make_plan` refuses
    length = steps / max(1, images // global_batch)  # in epochs
    warmup, freeze = _round(min(10.0, length / 10)), _round(min(1.0, length / 20))
    choices.choose("optim.warmup_epochs", warmup, "a tenth of the run, at most 10 epochs")
    choices.choose("optim.freeze_last_layer_epochs", freeze, "a twentieth of the run, at most 1 epoch")
    if "compute.eval_every_steps" not in choices.given:
        interval = _round(min(10.0, length / evaluations))
        choices.choose(
            "compute.eval_every",
            interval,
            f"{plural(evaluations, 'time')} in a run, at least every 10 epochs",
        )
    return steps


def phase_choices(config: PretrainConfig, length: float) -> list[Choice]:
    """Shorten the phases that were not given, in a run of `length` epochs that one of them does not fit."""
    open_phases = [key for key in PHASES if key not in given_keys(config) and get(config, key)]
    values = {key: cast(float, get(config, key)) for key in open_phases}
    if all(value < length for value in values.values()):
        return []
    reason = f"in proportion to a run of {length:.3g} epochs"
    lengths = {key: length / 2 if "freeze" in key else length for key in values}  # as recipe=auto has them
    fitting = {key: min(value, fitting_phase(key, lengths[key])) for key, value in values.items()}
    return [Choice(key, fitting[key], reason) for key in values if fitting[key] != values[key]]


def _choose_head(choices: _Choices, images: int) -> None:
    """Give few images few prototypes, and a narrow network a narrow head and a start from larger weights."""
    prototypes = min(max(2 ** round(log2(65536 * images / IMAGENET)), 256), 65536)
    choices.choose("head.prototypes", prototypes, f"near {images:,} images / 20, from 256 to 65536")
    narrow = min(1.0, _width(choices.config) / PUBLISHED_WIDTH)
    for key, published, least in (("hidden_dim", 2048, 256), ("bottleneck_dim", 256, 64)):
        size = max(2 ** round(log2(published * narrow)), least)
        choices.choose(f"head.{key}", size, f"{published} at width 384, less below; at least {least}")
    if not (choices.config.model.timm or choices.config.init):
        std = _round(0.02 * narrow ** (-2 / 3))  # the sums of a narrow network have fewer terms
        choices.choose("model.init_std", std, "0.02 at width 384, more below: x (384 / width) ^ 2/3")


def _choose_gentle(choices: _Choices, likeness: float) -> None:
    """Keep a short run from the uniform state, and regularise it little; see docs/small-sets.md."""
    choices.choose("loss.centering", "sinkhorn", "a short run learns faster from balanced targets")
    choices.choose("loss.koleo_weight", 0.03, "keeps the effective rank of a short run")
    if not (choices.config.model.timm or choices.config.init):
        reason = "patches learn shapes from the gradients around them, before CLS tokens do"
        choices.choose("loss.gradient_weight", 1.0, reason)
    scales, reason = ((0.25, 1.0), (0.1, 0.4)), "a short run learns faster from views with more of the image"
    alike = likeness >= ALIKE
    if alike:
        scales = (0.6, 1.0), (0.3, 0.7)
        reason = f"images lie alike (correlation {likeness:.2f}), so they differ in where small parts are"
    choices.choose("views.global_scale", scales[0], reason)
    choices.choose("views.local_scale", scales[1], reason)
    if alike:
        _choose_stem(choices)
    sizes = {height_width(choices.value(f"views.{kind}_size")) for kind in ("global", "local")}
    if not (choices.config.model.timm or needing_all_patches(choices.config)) and len(sizes) == 2:
        reason = "a short run sees more images where most of their patches are left out"
        dropped = choices.choose("model.patch_drop", 0.75, reason)
        if dropped and alike:
            reason = "then all patches, as features are read from all"
            choices.choose("model.patch_drop_until", 0.8, reason)
        reason = "a short run learns more from more images than from more views of each"
        choices.choose("views.local_count", 4, reason)
    reason = f"without BatchNorm, runs of fewer than {SHORT:,} steps often collapse"
    choices.choose("head.batch_norm", True, reason)
    defaults = PretrainConfig()
    for key in REGULARISATION:
        if get(choices.config, key) != get(defaults, key):
            choices.choose(key, get(defaults, key), f"DINO's, for a run of fewer than {SHORT:,} steps")


def _choose_stem(choices: _Choices) -> None:
    """Begin with convolutions, which learn shapes in minutes; narrow ones, as their time is that of steps."""
    config = choices.config
    patch = height_width(choices.value("model.patch_size"))
    if config.model.timm or config.init or stem_problem("conv", patch, config.model.resnet_width):
        return
    reason = "images that lie alike differ by shapes, which a short run learns by early convolutions"
    if choices.choose("model.stem", "conv", reason) == "conv":
        reason = "half the width of the tokens: as good, in less than half the time"
        choices.choose("model.stem_width", max(1, choices.config.model.shape[0] // 2), reason)


def _choose_rates(choices: _Choices, steps: int, batch: int) -> None:
    """Let a short run move fast: temperature, half-life of the teacher and learning rate follow its steps."""
    shortness, config = max(1.0, PUBLISHED_STEPS / steps), choices.config
    if "loss.warmup_teacher_temp_epochs" not in choices.given:
        if config.loss.warmup_teacher_temp_epochs:
            choices.choose("loss.warmup_teacher_temp_epochs", 0, "one temperature in a short run")
        reason = "sharper in a short run: 0.04 x (steps / 125,000) ^ 1/9, at least 0.02"
        choices.choose("loss.teacher_temp", _round(max(0.02, 0.04 / shortness ** (1 / 9))), reason)
    half_life = max(20.0, PUBLISHED_HALF_LIFE / shortness**0.4)
    reason = f"half-life of {half_life:.0f} steps for a run of {steps:,}: 173 x (steps / 125,000) ^ 0.4"
    choices.choose("teacher.momentum", round(2 ** (-1 / half_life), 4), reason)
    if config.optim.name != "adamw":
        return
    published = min(max(batch, 512), 1024)  # the batches for which linear scaling was published
    rate = 1e-3 * published / 512 * sqrt(batch / published)
    rate *= sqrt(max(1.0, PUBLISHED_WIDTH / _width(config)))
    rate = min(rate * shortness ** (1 / 6), 5e-3)
    reason = f"{rate:.2g} at batch {batch}: the recipe's, raised below width 384 and below 125,000 steps"
    choices.choose("optim.lr", _round(rate / scaled_lr(1.0, batch, config.optim.lr_scaling)), reason)


def _width(config: PretrainConfig) -> int:
    """Return the width of the backbone; that of timm's, still unknown, counts as the published one."""
    return PUBLISHED_WIDTH if config.model.timm else config.model.shape[0]


def init_choices(config: PretrainConfig) -> list[Choice]:
    """Return the choices for a run from trained weights; they come before those of `recipe=auto`."""
    if config.init is None:
        return []
    choices = _Choices(config)
    if config.optim.name == "adamw":
        choices.choose("optim.lr", 5e-5, "a tenth of the recipe's, to keep what the weights have learned")
    choices.choose("optim.layer_decay", 0.75, "early blocks are general already and move least")
    choices.choose("teacher.momentum", 0.9995, "a slow teacher stays near the weights it started from")
    return list(choices.made.values())


def _round(value: float) -> float:
    return float(f"{value:.3g}")
