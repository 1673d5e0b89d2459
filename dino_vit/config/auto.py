"""Fill in what the user left open: `recipe: auto` from the data, `init` so that trained weights stay good.

Every formula of `auto` runs through two points: the published recipe (1.28 million images of 224 pixels,
batch 512 to 1024, where nothing changes) and what learns from 20,000 images of 32 in minutes, uncollapsed.
"""

from collections.abc import Collection
from math import ceil, log2, sqrt
from typing import NamedTuple, TypeVar, cast

from dino_vit.config.checks import scaled_lr
from dino_vit.config.loading import replace
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.config.settings import get
from dino_vit.core.sizes import height_width

T = TypeVar("T")

IMAGENET = 1_280_000  # images
PUBLISHED_STEPS = 125_000  # 100 epochs of ImageNet at batch 1024
PUBLISHED_HALF_LIFE = 173  # steps; an EMA of 0.996
PUBLISHED_WIDTH = 384  # ViT-S
SHORT = 30_000  # steps; so few leave no time to leave the uniform state, so the head's layers are normalised


class Choice(NamedTuple):
    """A value that was filled in, and why."""

    key: str
    value: object
    reason: str


class _Open:
    """Collect choices for what the user did not give."""

    def __init__(self, config: PretrainConfig, given: Collection[str]) -> None:
        self.config, self.given = config, given
        self.choices: list[Choice] = []

    def fill(self, key: str, value: T, reason: str) -> T:
        """Choose `value` unless the user gave one, and return the value in force."""
        if key in self.given:
            return cast(T, get(self.config, key))
        self.choices.append(Choice(key, value, reason))
        return value

    def resolved(self) -> tuple[PretrainConfig, list[Choice]]:
        return replace(self.config, {choice.key: choice.value for choice in self.choices}), self.choices


def resolve_auto(
    config: PretrainConfig,
    given: Collection[str],
    *,
    image_size: int,
    images: int,
    channels: int,
    global_batch: int,
    batch_norm: bool = True,
) -> tuple[PretrainConfig, list[Choice]]:
    """Fill the open settings of `recipe: auto`; `image_size` is the shorter side of a typical image.

    Without `batch_norm` the processes cannot take its statistics over all of them.
    """
    if config.recipe != "auto":
        return config, []
    chosen = _Open(config, given)
    _fill_channels(chosen, channels)
    _fill_sizes(chosen, image_size)
    prototypes = 2 ** round(log2(65536 * images / IMAGENET))
    reason = f"a power of two near {images} images / 20, as in ImageNet's 65536, from 256 on"
    chosen.fill("head.prototypes", min(max(prototypes, 256), 65536), reason)
    epochs = _fill_epochs(chosen, images, global_batch)
    steps = round(epochs * images / global_batch)
    _fill_head(chosen, steps, batch_norm)
    _fill_rates(chosen, steps=steps, batch=global_batch)
    return chosen.resolved()


def _fill_channels(chosen: _Open, channels: int) -> None:
    channels = chosen.fill("data.channels", channels, "as the images have")
    if channels != 3:
        for name in ("mean", "std"):
            chosen.fill(f"data.{name}", None, "to be measured, since ImageNet's is for RGB")
        for name in ("saturation", "hue", "grey"):
            chosen.fill(f"photometry.{name}", 0.0, f"{channels} channels are not RGB")


def _fill_sizes(chosen: _Open, image_size: int) -> None:
    """Give a small image fewer, smaller patches: 14 x 14 of 16 at 224 pixels, 8 x 8 of 4 at 32."""
    views = chosen.config.views
    fixed: list[int] = []
    if "views.global_size" in chosen.given:
        fixed += views.global_shape
        image_size = min(views.global_shape)
    if "views.local_size" in chosen.given:
        fixed += views.local_shape
    wanted = log2(16 * (min(image_size, 224) / 224) ** (2 / 3))
    fitting = [p for p in (2, 4, 8, 16) if all(side % p == 0 for side in fixed)] or [2, 4, 8, 16]
    patch = min(fitting, key=lambda p: abs(log2(p) - wanted))
    patch = chosen.fill("model.patch_size", patch, f"detail of {image_size} pixels: 16 at 224, 4 at 32")
    side = max(min(image_size, 224) // patch, 2) * patch
    reason = f"images of {image_size} pixels in whole patches, up to 224"
    side = min(height_width(chosen.fill("views.global_size", side, reason)))
    local = ceil(3 * side / (7 * patch)) * patch
    chosen.fill("views.local_size", local, f"3/7 of a global view, as 96 of 224, in whole patches of {patch}")
    sigma = (0.1, max(0.1, min(2.0, round(2 * side / 224, 2))))
    chosen.fill("photometry.blur_sigma", sigma, "in proportion to the view: up to 2 at 224")


def _fill_epochs(chosen: _Open, images: int, global_batch: int) -> float:
    """Choose how long to train and the phases of the start; return the epochs in force."""
    budget = chosen.config.budget
    if {"budget.epochs", "budget.steps", "budget.images"} & set(chosen.given):
        drawn = (budget.epochs or 0) * images or (budget.steps or 0) * global_batch or budget.images or 0
        epochs = drawn / images
    else:
        longer = 10 * round(10 * (IMAGENET / images) ** 0.25)
        reason = f"a small set needs more passes: 100 x (1.28M / {images}) ^ 1/4, from 30 to 800"
        epochs = chosen.fill("budget.epochs", min(max(longer, 30), 800), reason)
    warmup, freeze = _round(min(10.0, epochs / 10)), _round(min(1.0, epochs / 20))
    chosen.fill("optim.warmup_epochs", warmup, "a tenth of the run, at most 10 epochs")
    chosen.fill("optim.freeze_last_layer_epochs", freeze, "a twentieth of the run, at most 1 epoch")
    return epochs


def _fill_head(chosen: _Open, steps: int, batch_norm: bool) -> None:
    """Make the head of a narrow network narrow too, and keep that of a short run from the uniform state."""
    narrow = min(1.0, chosen.config.model.shape[0] / PUBLISHED_WIDTH)
    for key, published, least in (("hidden_dim", 2048, 256), ("bottleneck_dim", 256, 64)):
        size = max(2 ** round(log2(published * narrow)), least)
        chosen.fill(f"head.{key}", size, f"{published} at width 384, less below, from {least} on")
    if steps < SHORT and batch_norm:
        chosen.fill("head.batch_norm", True, f"without it runs of fewer than {SHORT} steps often collapse")
    if {"loss.warmup_teacher_temp", "loss.warmup_teacher_temp_epochs"} & set(chosen.given):
        return
    sharp = max(0.02, 0.04 / _shortness(steps) ** (1 / 9))
    reason = "sharper in a short run: 0.04 x (steps / 125000) ^ 1/9, from 0.02 on"
    chosen.fill("loss.teacher_temp", _round(sharp), reason)


def _shortness(steps: int) -> float:
    """Return how many times shorter than the published run so many steps are; 1 if they are not."""
    return max(1.0, PUBLISHED_STEPS / max(steps, 1))


def _fill_rates(chosen: _Open, steps: int, batch: int) -> None:
    """Let a short run move fast: the teacher's half-life and the rate follow the number of steps."""
    shortness = _shortness(steps)
    half_life = max(20.0, PUBLISHED_HALF_LIFE / shortness**0.4)
    formula = "173 x (steps / 125000) ^ 0.4, from 20 to 173"
    reason = f"half-life of {half_life:.0f} steps for a run of {steps}: {formula}"
    chosen.fill("teacher.momentum", round(2 ** (-1 / half_life), 4), reason)
    if chosen.config.optim.name != "adamw":
        return
    published = min(max(batch, 512), 1024)  # the batches for which linear scaling was published
    width = chosen.config.model.shape[0]
    rate = (
        1e-3
        * published
        / 512
        * sqrt(batch / published)
        * sqrt(max(1.0, PUBLISHED_WIDTH / width))
        * shortness ** (1 / 6)
    )
    rate = min(rate, 5e-3)
    reason = f"{rate:.2g} at batch {batch}: the recipe's, raised below width 384 and below 125000 steps"
    chosen.fill("optim.lr", _round(rate / scaled_lr(1.0, batch, chosen.config.optim.lr_scaling)), reason)


def resolve_init(config: PretrainConfig, given: Collection[str]) -> tuple[PretrainConfig, list[Choice]]:
    """Fill the open settings of a run from trained weights; its choices come before `resolve_auto`'s."""
    if config.init is None:
        return config, []
    chosen = _Open(config, given)
    if config.optim.name == "adamw":
        chosen.fill("optim.lr", 5e-5, "a tenth of the recipe's, to keep what the weights know")
    chosen.fill("optim.layer_decay", 0.75, "early blocks are general already and move least")
    chosen.fill("teacher.momentum", 0.9995, "a slow teacher stays near the weights it began with")
    return chosen.resolved()


def _round(value: float) -> float:
    return float(f"{value:.3g}")
