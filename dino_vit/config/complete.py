"""Decide every setting of a run, each with its reason: what was given, what a checkpoint keeps, what weights
decide, `recipe=auto`, the defaults, in this order. The first that decides on a setting counts: `Draft.choose`
respects what was decided, `Draft.override` does not.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dino_vit.config.auto import choose_all, network_ladder
from dino_vit.config.draft import Choice, Draft
from dino_vit.config.facts import RunFacts, check_images, refused_by_facts
from dino_vit.config.inherited import (
    check_settings,
    choices_since,
    choose_by_checkpoint,
    choose_by_teacher,
    choose_by_weights,
)
from dino_vit.config.length import global_batch, run_length
from dino_vit.config.loading import load, write_yaml
from dino_vit.config.pretrain import PHASES, PretrainConfig, fitting_phase, refused
from dino_vit.config.settings import ConfigError
from dino_vit.core.text import plural

GLOBAL_ORDER = 2**26  # images: an order of all takes 16 bytes of each in every process
# What may differ between the processes of a run.
HOST_SETTINGS = {"output", "data.source", "data.labels", "data.workers", "data.cache"}
HOST_SETTINGS |= {"data.cache_gb", "augment.module"}


@dataclass(frozen=True, kw_only=True)
class DecidedRun:
    """A run as a value: every setting, why each was chosen, and what follows from both."""

    config: PretrainConfig
    choices: tuple[Choice, ...]  # to print; of a run that resumes only what changed
    chosen: frozenset[str]  # keys of all choices; the run keeps their values when it resumes
    notes: tuple[str, ...]
    precision: str  # what compute.precision means here
    global_batch: int
    steps_per_epoch: int
    length: int  # in steps; with budget.minutes as many as are expected
    evaluated_images: int  # of an evaluation, at most
    shared: Mapping[str, str]  # what all ranks must have alike, by the name of each


def complete(config: PretrainConfig, facts: RunFacts) -> DecidedRun:
    """Decide every setting, and refuse a run that cannot be."""
    draft = decide(config, facts)
    if facts.checkpoint:
        check_settings(draft, facts.checkpoint)
    check_images(draft.config, facts.images)
    completed, batch = load(PretrainConfig, None, draft.values), global_batch(draft, facts)
    length = run_length(draft, facts)
    problems = list(refused(completed)) or list(refused_by_facts(completed, facts, length.steps, batch))
    if problems:
        raise ConfigError(problems)
    given = completed.compute.precision
    precision = facts.precision if given == "auto" else given
    shared = {key: write_yaml(value) for key, value in draft.values.items() if key not in HOST_SETTINGS}
    shared |= {"compute.precision": precision, "the length of the run": str(length.steps)}
    return DecidedRun(
        config=completed,
        choices=tuple(choices_since(draft, facts.checkpoint) if facts.checkpoint else draft.choices.values()),
        chosen=frozenset(draft.choices),
        notes=tuple(_notes(draft, completed, facts)),
        precision=precision,
        global_batch=batch,
        steps_per_epoch=facts.images.count // batch,
        length=length.steps,
        evaluated_images=length.images,
        shared=shared,
    )


def decide(config: PretrainConfig, facts: RunFacts) -> Draft:
    """Decide every setting, so far as facts are known; nothing is validated."""
    draft = Draft(config, facts.checkpoint.settings if facts.checkpoint else None)
    if facts.checkpoint:  # what was chosen stays; Draft.choose keeps the rest
        choose_by_checkpoint(draft, facts.checkpoint, facts.processes)
    if facts.teacher:
        choose_by_teacher(draft, facts.teacher)
    if facts.weights:
        choose_by_weights(draft, facts.weights)
    if config.init:
        _choose_gentle_rates(draft)
    if config.recipe == "auto":
        draft = choose_all(draft, facts)
    if not facts.checkpoint:
        _shorten_phases(draft, facts)
    _choose_reading(draft, facts)
    return draft


def _choose_gentle_rates(draft: Draft) -> None:
    """Learn slowly from trained weights; SGD keeps its rate."""
    if draft["optim.name"] == "adamw":
        draft.choose("optim.lr", 5e-5, "a tenth of DINO's, to keep what the weights have learned")
    draft.choose("optim.layer_decay", 0.75, "early blocks are general already and move least")
    draft.choose("teacher.momentum", 0.9995, "a slow teacher stays near the weights it started from")


def _shorten_phases(draft: Draft, facts: RunFacts) -> None:
    """Shorten the phases that were not given, in a run that one of them does not fit."""
    steps, images = run_length(draft, facts).steps, facts.images.count
    epochs = steps / max(1, images // min(global_batch(draft, facts), images))
    phases = {key: draft[key] for key in PHASES if draft.is_open(key) and draft[key]}
    if all(value < epochs for value in phases.values()):
        return
    for key, value in phases.items():
        longest = epochs / 2 if "freeze" in key else epochs  # as recipe=auto has them
        shorter = min(value, fitting_phase(key, longest))
        if shorter != value:
            draft.choose(key, shorter, f"in proportion to a run of {epochs:.3g} epochs")


def _choose_reading(draft: Draft, facts: RunFacts) -> None:
    """Choose how images are read, in which order, and normalise them as they are where that is open."""
    images, measured = facts.images, facts.images.measured
    if draft["data.bits"] is None:
        draft.override("data.bits", images.bits, "as the images have")
    # Through remote shards one after another, as their copies on the disk come, and through very many images.
    by_shard = images.shards and (images.is_remote or images.count > GLOBAL_ORDER)
    if by_shard and draft["data.order"] is None and not facts.checkpoint:
        shards = plural(images.shards, "remote shard" if images.is_remote else "local shard")
        reason = f"of {shards}, {draft['data.window']} at a time are mixed (data.window)"
        draft.override("data.order", "window", reason)
    for name in ("mean", "std"):
        if draft[f"data.{name}"] is None and measured:
            numbers = tuple(float(f"{number:.4g}") for number in getattr(measured, name))
            draft.override(f"data.{name}", numbers, f"measured on {measured.images} images")


def _notes(draft: Draft, config: PretrainConfig, facts: RunFacts) -> Iterator[str]:
    """Yield what a user should know of images and network before the first step."""
    measured, is_new = facts.images.measured, not facts.checkpoint
    if measured and measured.highest < 0.25:
        yield (
            f"no value is above {measured.highest:.1%} of the scale, where brightness, contrast and solarise "
            "have little effect; data.range=[low, high] sets the values of black and white"
        )
    if config.budget.minutes is None and is_new and facts.device == "cpu" and network_ladder(draft, 1):
        yield (
            "the network is the published ViT-S, which is slow on a CPU; with budget.minutes recipe=auto "
            "chooses one that this machine can train in the time"
        )
