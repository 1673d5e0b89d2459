"""Decide every setting of a run, each with its reason: what was given, what a checkpoint keeps, what weights
decide, `recipe=auto`, the defaults, in this order. The first that decides on a setting counts.

Every formula of `auto` runs through two points: the published recipe (1.28 million images of 224 pixels,
batch 512 to 1024, where nothing changes) and what learns from 20,000 images of 32 pixels within minutes.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from math import log2, sqrt

from dino_vit.config.draft import Choice, Draft
from dino_vit.config.earlier import (
    choices_since,
    choose_by_checkpoint,
    choose_by_teacher,
    choose_by_weights,
    choose_channels,
)
from dino_vit.config.facts import Facts, check_batch, check_images, refused_by_facts
from dino_vit.config.loading import load, write_yaml
from dino_vit.config.pretrain import (
    PHASES,
    PretrainConfig,
    fitting_phase,
    needing_all_patches,
    scaled_lr,
)
from dino_vit.config.sections import START_TEACHER_TEMPERATURE, stem_problem
from dino_vit.config.settings import ConfigError, values
from dino_vit.config.sizes import choose_rung, choose_sizes, network_ladder
from dino_vit.core import height_width
from dino_vit.core.text import plural

IMAGENET = 1_280_000  # images
PUBLISHED_STEPS = 125_000  # 100 epochs of ImageNet at batch 1024
PUBLISHED_HALF_LIFE = 173  # steps; an EMA of 0.996
PUBLISHED_WIDTH = 384  # ViT-S
# What method=dinov2 regularises long runs with.
REGULARISATION = (
    *("model.drop_path", "model.drop_path_schedule", "model.layer_scale"),
    *("optim.layer_decay", "optim.patch_embed_lr"),
)
EVALUATIONS = 6  # in a short run
EVALUATED = 0.1  # share of the time of a run of some minutes, at most
ALIKE = 0.25  # mean correlation of two images from which all are of one kind of thing at one place
SHORT = 30_000  # steps; shorter runs may never leave the uniform state without BatchNorm in the head
GLOBAL_ORDER = 2**26  # images: an order of all takes 16 bytes of each in every process
# What may differ between the processes of a run.
HOST_SETTINGS = {"output", "data.source", "data.labels", "data.workers", "data.cache"}
HOST_SETTINGS |= {"data.cache_gb", "augment.module"}


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run as a value: every setting, why each was chosen, and what follows from both."""

    config: PretrainConfig
    choices: tuple[Choice, ...]  # of this start
    chosen: frozenset[str]  # settings that nobody gave, which the run keeps when it resumes
    notes: tuple[str, ...]
    precision: str  # what compute.precision means here
    global_batch: int
    steps_per_epoch: int
    length: int  # in steps; with budget.minutes as many as are expected
    shared: Mapping[str, str]  # what all ranks must have alike, by the name of each

    @property
    def digest(self) -> str:
        """The digest of what all ranks must have alike."""
        return sha256(json.dumps(self.shared, sort_keys=True).encode()).hexdigest()


def complete(config: PretrainConfig, facts: Facts) -> Run:
    """Decide every setting, and refuse a run that cannot be."""
    draft, images = decide(config, facts), facts.images
    check_images(draft.config, images)
    completed, batch = load(PretrainConfig, None, draft.values), _batch(draft, facts)
    length, _ = _length(draft, facts)
    if problems := list(refused_by_facts(completed, facts, length, batch)):
        raise ConfigError(problem.text for problem in problems)
    return _as_run(draft, completed, facts, length)


def sketch(config: PretrainConfig, facts: Facts, changes: Mapping[str, object]) -> Run:
    """Return a run to time a step of, with some other settings: of the smallest network, unvalidated."""
    draft = decide(config, facts)
    check_images(draft.config, facts.images)
    if problems := list(check_batch(draft.config, facts, _batch(draft, facts))):
        raise ConfigError(problem.text for problem in problems)
    for key, value in changes.items():
        draft.set(key, value, "to time a step")
    return _as_run(draft, draft.config, facts, SHORT)


def _as_run(draft: Draft, config: PretrainConfig, facts: Facts, length: int) -> Run:
    launch, batch = facts.launch, _batch(draft, facts)
    per_epoch = facts.images.count // batch
    precision = launch.precision if config.compute.precision == "auto" else config.compute.precision
    shared = {key: write_yaml(value) for key, value in draft.values.items() if key not in HOST_SETTINGS}
    shared |= {"compute.precision": precision, "the length of the run": str(length)}
    shared |= {f"the version of {name}": version for name, version in launch.versions.items()}
    shared |= {f"the image {name}": digest for name, digest in facts.samples.items()}
    news = choices_since(draft, facts.checkpoint) if facts.checkpoint else draft.choices.values()
    return Run(
        config=config,
        choices=tuple(news),
        chosen=frozenset(draft.choices),
        notes=tuple(_notes(config, facts, length, per_epoch)),
        precision=precision,
        global_batch=batch,
        steps_per_epoch=per_epoch,
        length=length,
        shared=shared,
    )


def decide(config: PretrainConfig, facts: Facts) -> Draft:
    """Decide every setting, so far as facts are known; nothing is validated."""
    draft = Draft(config, facts.checkpoint.settings if facts.checkpoint else None)
    if facts.checkpoint:
        choose_by_checkpoint(draft, facts.checkpoint, facts.launch.processes)
    if facts.teacher:
        choose_by_teacher(draft, facts.teacher)
    if facts.weights:
        choose_by_weights(draft, facts.weights)
    if config.init:
        _choose_gentle_rates(draft)
    if config.recipe == "auto":
        _choose_all(draft, facts)
    if not facts.checkpoint:
        _shorten_phases(draft, facts)
    _choose_reading(draft, facts)
    return draft


def _choose_gentle_rates(draft: Draft) -> None:
    """Keep what trained weights have learned."""
    if draft["optim.name"] == "adamw":
        draft.choose("optim.lr", 5e-5, "a tenth of the recipe's, to keep what the weights have learned")
    draft.choose("optim.layer_decay", 0.75, "early blocks are general already and move least")
    draft.choose("teacher.momentum", 0.9995, "a slow teacher stays near the weights it started from")


def _choose_all(draft: Draft, facts: Facts) -> None:
    """Fit to the images and to the length of the run whatever is open (`recipe=auto`)."""
    images, method = facts.images, draft["method"]
    _choose_network(draft, facts)
    choose_sizes(draft, images)
    steps = _choose_length(draft, facts)
    _choose_head(draft, images.count)
    if steps < SHORT:
        _choose_for_short(draft, images.likeness)
    if method == "dino" or steps < SHORT:  # for a long run DINOv2 has published its own
        _choose_rates(draft, steps, _batch(draft, facts))
    elif "loss.teacher_temp" in draft.given and draft["loss.teacher_temp"] <= START_TEACHER_TEMPERATURE:
        reason = f"a temperature is given that does not rise from {START_TEACHER_TEMPERATURE}"
        draft.choose("loss.warmup_teacher_temp_epochs", 0, reason)
    choose_channels(draft, images.channels, "as the images have")


def _choose_network(draft: Draft, facts: Facts) -> None:
    """Choose the largest network that sees enough images in the minutes; the smallest, to time its step."""
    minutes = draft["budget.minutes"]
    ladder = network_ladder(draft, facts.images.size) if minutes and not facts.checkpoint else []
    if not ladder:
        return
    chosen, count = ladder[0], 0.0
    if facts.step_time:
        seen = 60 * minutes / facts.step_time.step * _batch(draft, facts)  # by the smallest
        chosen = choose_rung(ladder, seen)
        count = float(f"{seen * ladder[0].cost / chosen.cost:.2g}")
    for key, value in chosen.settings.items():
        draft.choose(key, value, f"sees about {count:,.0f} images in {minutes:g} minutes on this machine")
    draft.slowdown = chosen.cost / ladder[0].cost


def _length(draft: Draft, facts: Facts) -> tuple[int, int]:
    """Return the steps of a run, and its evaluations; with `budget.minutes` as many as are expected."""
    minutes, checkpoint, time = draft["budget.minutes"], facts.checkpoint, facts.step_time
    if minutes is None or (time is None and checkpoint is None):
        batch = min(_batch(draft, facts), facts.images.count)  # more is refused
        return max(1, draft.config.budget.total_steps(facts.images.count, batch)), EVALUATIONS
    if checkpoint:
        if minutes == checkpoint.settings["budget.minutes"]:
            return checkpoint.length, EVALUATIONS
        return max(1, round(60 * minutes * checkpoint.step / max(checkpoint.seconds, 1e-6))), EVALUATIONS
    assert time is not None
    step, evaluation = draft.slowdown * time.step, draft.slowdown * time.evaluation
    count = max(1, min(EVALUATIONS, int(EVALUATED * 60 * minutes / max(evaluation, 1e-6)) - 1))
    # Measuring and evaluations, of which one is before the first step, are part of the minutes.
    seconds = 60 * minutes - time.measuring - (count + 1) * evaluation
    return max(1, int(seconds / step)), count


def _batch(draft: Draft, facts: Facts) -> int:
    """Return the images of a step."""
    return draft["data.batch_size"] * draft["optim.accumulate"] * facts.launch.processes


def _choose_length(draft: Draft, facts: Facts) -> int:
    """Choose the length of the run, of its warm-up and between evaluations; return the number of steps."""
    images, batch = facts.images.count, _batch(draft, facts)
    if all(map(draft.is_open, ("budget.epochs", "budget.steps", "budget.images", "budget.minutes"))):
        epochs = min(max(10 * round(10 * (IMAGENET / images) ** 0.25), 30), 800)
        reason = f"more passes over fewer images: 100 x (1.28M / {images:,}) ^ 1/4, from 30 to 800"
        draft.choose("budget.epochs", epochs, reason)
    steps, evaluations = _length(draft, facts)
    length = steps / max(1, images // batch)  # in epochs
    warmup, freeze = _round(min(10.0, length / 10)), _round(min(1.0, length / 20))
    draft.choose("optim.warmup_epochs", warmup, "a tenth of the run, at most 10 epochs")
    draft.choose("optim.freeze_last_layer_epochs", freeze, "a twentieth of the run, at most 1 epoch")
    if draft.is_open("compute.eval_every_steps"):
        reason = f"{plural(evaluations, 'time')} in a run, at least every 10 epochs"
        draft.choose("compute.eval_every", _round(min(10.0, length / evaluations)), reason)
    return steps


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
    draft.choose("loss.centering", "sinkhorn", "a short run learns faster from balanced targets")
    draft.choose("loss.koleo_weight", 0.03, "keeps the effective rank of a short run")
    if not (draft["init.weights"] or draft.config.model.timm):
        reason = "patches learn shapes from the gradients around them, before CLS tokens do"
        draft.choose("loss.gradient_weight", 2.0, reason)
    scales, reason = ((0.25, 1.0), (0.1, 0.4)), "a short run learns faster from views with more of the image"
    alike = likeness >= ALIKE
    if alike:
        scales = (0.6, 1.0), (0.3, 0.7)
        reason = f"images lie alike (correlation {likeness:.2f}), so they differ in where small parts are"
    draft.choose("views.global_scale", scales[0], reason)
    draft.choose("views.local_scale", scales[1], reason)
    config = draft.config
    if alike:
        _choose_stem(draft, config)
    sizes = {height_width(draft[f"views.{kind}_size"]) for kind in ("global", "local")}
    if not (config.model.timm or needing_all_patches(config)) and len(sizes) == 2:
        reason = "a short run sees more images where most of their patches are left out"
        dropped = draft.choose("model.patch_drop", 0.75, reason)
        if dropped and alike:
            reason = "then all patches, as features are read from all"
            draft.choose("model.patch_drop_until", 0.8, reason)
        reason = "a short run learns more from more images than from more views of each"
        draft.choose("views.local_count", 4, reason)
    reason = f"without BatchNorm, runs of fewer than {SHORT:,} steps often collapse"
    draft.choose("head.batch_norm", True, reason)
    defaults = values(PretrainConfig())
    for key in REGULARISATION:
        if draft[key] != defaults[key]:
            draft.choose(key, defaults[key], f"DINO's, for a run of fewer than {SHORT:,} steps")


def _choose_stem(draft: Draft, config: PretrainConfig) -> None:
    """Begin with convolutions, which learn shapes in minutes; narrow ones, as their time is that of steps."""
    patch = height_width(draft["model.patch_size"])
    if config.model.timm or config.init or stem_problem("conv", patch, config.model.resnet_width):
        return
    reason = "images that lie alike differ by shapes, which a short run learns by early convolutions"
    if draft.choose("model.stem", "conv", reason) == "conv":
        reason = "half the width of the tokens: as good, in less than half the time"
        draft.choose("model.stem_width", max(1, config.model.shape[0] // 2), reason)


def _choose_rates(draft: Draft, steps: int, batch: int) -> None:
    """Let a short run move fast: temperature, half-life of the teacher and learning rate follow its steps."""
    shortness, config = max(1.0, PUBLISHED_STEPS / steps), draft.config
    if draft.is_open("loss.warmup_teacher_temp_epochs"):
        if config.loss.warmup_teacher_temp_epochs:
            draft.choose("loss.warmup_teacher_temp_epochs", 0, "one temperature in a short run")
        reason = "sharper in a short run: 0.04 x (steps / 125,000) ^ 1/9, at least 0.02"
        draft.choose("loss.teacher_temp", _round(max(0.02, 0.04 / shortness ** (1 / 9))), reason)
    half_life = max(20.0, PUBLISHED_HALF_LIFE / shortness**0.4)
    reason = f"half-life of {half_life:.0f} steps for a run of {steps:,}: 173 x (steps / 125,000) ^ 0.4"
    draft.choose("teacher.momentum", round(2 ** (-1 / half_life), 4), reason)
    if config.optim.name != "adamw":
        return
    published = min(max(batch, 512), 1024)  # the batches for which linear scaling was published
    rate = 1e-3 * published / 512 * sqrt(batch / published)
    rate *= sqrt(max(1.0, PUBLISHED_WIDTH / _width(config)))
    rate = min(rate * shortness ** (1 / 6), 5e-3)
    reason = f"{rate:.2g} at batch {batch}: the recipe's, raised below width 384 and below 125,000 steps"
    draft.choose("optim.lr", _round(rate / scaled_lr(1.0, batch, config.optim.lr_scaling)), reason)


def _width(config: PretrainConfig) -> int:
    """Return the width of the backbone; that of timm's, still unknown, counts as the published one."""
    return PUBLISHED_WIDTH if config.model.timm else config.model.shape[0]


def _shorten_phases(draft: Draft, facts: Facts) -> None:
    """Shorten the phases that were not given, in a run that one of them does not fit."""
    steps, images = _length(draft, facts)[0], facts.images.count
    length = steps / max(1, images // min(_batch(draft, facts), images))
    phases = {key: draft[key] for key in PHASES if draft.is_open(key) and draft[key]}
    if all(value < length for value in phases.values()):
        return
    for key, value in phases.items():
        half = length / 2 if "freeze" in key else length  # as recipe=auto has them
        shorter = min(value, fitting_phase(key, half))
        if shorter != value:
            draft.choose(key, shorter, f"in proportion to a run of {length:.3g} epochs")


def _choose_reading(draft: Draft, facts: Facts) -> None:
    """Choose how images are read, in which order, and normalise them as they are where that is open."""
    images, measured = facts.images, facts.images.measured
    if draft["data.bits"] is None:
        draft.set("data.bits", images.bits, "as the images have")
    # Through remote shards one after another, as their copies on the disk come, and through very many images.
    by_shard = images.shards and (images.is_remote or (images.total or images.count) > GLOBAL_ORDER)
    if by_shard and draft["data.order"] is None and not facts.checkpoint:
        shards = plural(images.shards, "remote shard" if images.is_remote else "local shard")
        reason = f"of {shards}, {draft['data.window']} at a time are mixed (data.window)"
        draft.set("data.order", "window", reason)
    for name in ("mean", "std"):
        if draft[f"data.{name}"] is None and measured:
            numbers = tuple(float(f"{number:.4g}") for number in getattr(measured, name))
            draft.set(f"data.{name}", numbers, f"measured on {measured.images} images")


def _notes(config: PretrainConfig, facts: Facts, length: int, per_epoch: int) -> Iterator[str]:
    """Yield what a user should know of images and minutes before the first step."""
    measured, minutes, time = facts.images.measured, config.budget.minutes, facts.step_time
    if measured and measured.highest < 0.25:
        yield (
            f"no value is above {measured.highest:.1%} of the scale, where brightness, contrast and solarise "
            "have little effect; data.range=[low, high] sets the values of black and white"
        )
    if minutes and time and length < per_epoch:
        needed = float(f"{minutes * per_epoch / length:.2g}")
        yield (
            f"budget.minutes={minutes:g} has time for about {plural(length, 'step')} of the {per_epoch:,} in "
            f"an epoch, so not every image is seen; budget.minutes={needed:g} would be an epoch"
        )


def _round(value: float) -> float:
    return float(f"{value:.3g}")
