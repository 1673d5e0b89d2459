"""What a run inherits: from the checkpoint that it resumes from, weights to start from, a frozen teacher."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from dino_vit.config.draft import Choice, Draft
from dino_vit.config.facts import CheckpointFacts, TeacherFacts, WeightsFacts
from dino_vit.config.loading import write_yaml
from dino_vit.config.pretrain import PHASES, PretrainConfig
from dino_vit.config.sections import Model
from dino_vit.config.settings import settings_of
from dino_vit.core import height_width


def choose_by_checkpoint(draft: Draft, checkpoint: CheckpointFacts, processes: int) -> None:
    """Keep what was measured or chosen when a run started that resumes, and its global batch."""
    keys = (checkpoint.chosen | {"data.order", *PHASES}) - {"optim.accumulate"}
    for key in sorted(keys & checkpoint.settings.keys()):
        excluded = settings_of(PretrainConfig)[key].rivals & draft.given
        if not excluded and (draft[key] is None or key not in draft.given):
            draft.override(key, checkpoint.settings[key], "as the run started")
    batch = checkpoint.global_batch
    accumulate = batch // (draft["data.batch_size"] * processes)
    if accumulate not in (0, draft["optim.accumulate"]):
        draft.override("optim.accumulate", accumulate, f"keeps the global batch of {batch}")


def choices_since(draft: Draft, checkpoint: CheckpointFacts) -> Iterator[Choice]:
    """Yield the choices that differ from the start of a run, and what was changed since then."""
    before = checkpoint.settings
    new = {key: choice for key, choice in draft.choices.items() if before.get(key) != choice.value}
    yield from new.values()
    for key in _changed(draft, before):
        if key not in new:
            yield Choice(key, draft[key], f"changed at step {checkpoint.step:,}")


def check_settings(draft: Draft, checkpoint: CheckpointFacts) -> None:
    """Check that a run resumes with its settings.

    This comes before all other checks: what the user changed may contradict what the run chose.
    """
    before = checkpoint.settings
    values = ((key, write_yaml(before.get(key)), write_yaml(draft[key])) for key in _changed(draft, before))
    changes = [f"{key} was {then} and is {now}" for key, then, now in values]
    check_same(draft.config, checkpoint.step, changes)


def check_same(config: PretrainConfig, step: int, changes: list[str]) -> None:
    """Raise for what has changed since a run started, unless that is asked for."""
    if changes and config.compute.resume != "changed":
        raise ValueError(
            f"{config.output} holds a run at step {step:,} with other settings: {'; '.join(changes)}. "
            "Give another output, or compute.resume=changed to resume anyway"
        )


def _changed(draft: Draft, before: Mapping[str, Any]) -> Iterator[str]:
    """Yield the settings that differ, but for those that may."""
    for key, info in sorted(settings_of(PretrainConfig).items()):
        if not info.resumable and before.get(key) != draft[key]:
            yield key


def choose_by_teacher(draft: Draft, teacher: TeacherFacts) -> None:
    """Take from a frozen teacher what its student must share; settings that the user gave must agree."""
    name, is_auto = f"teacher.weights={draft['teacher.weights']}", draft["recipe"] == "auto"
    shared = {**teacher.pixels, **teacher.heads}
    if not draft["loss.patch_weight"]:
        shared.pop("head.shared", None)
    elif not teacher.has_patch_head:
        raise ValueError(f"{name} has no head that learned masked patches; set loss.patch_weight=0")
    _check_agreement(draft, shared, name)
    for key, value in shared.items():
        might_change = is_auto and draft.is_open(key)
        if value != draft[key] or might_change:
            draft.override(key, value, "as the teacher of teacher.weights has")
    if is_auto and teacher.patch:  # up to 224 pixels, in patches of its size
        side = max(min(224, *teacher.image_size) // teacher.patch, 2) * teacher.patch
        draft.choose("views.global_size", side, "as teacher.weights have")
        if not draft.config.model.timm:
            draft.choose("model.patch_size", teacher.patch, "as teacher.weights have")
    draft.choose("model.drop_path", 0.0, "none where a frozen teacher is learned from")


def choose_by_weights(draft: Draft, weights: WeightsFacts) -> None:
    """Take the network from trained weights, and how they saw images; what the user gave must agree."""
    trained, config = weights.architecture, draft.config
    name, reason = f"init.weights={draft['init.weights']}", "as the trained weights have"
    is_auto, sizes = config.recipe == "auto", {"views.global_size", "model.image_size"}
    settings: dict[str, Any] = {}
    if "name" in trained:
        settings["model.arch"] = f"timm:{trained['name']}"
    else:
        settings |= _vit_settings(draft, trained, name)
    _check_agreement(draft, settings, name)
    if is_auto and weights.is_read and not sizes & draft.given:  # a run that resumes keeps its own
        height, width = height_width(trained["image_size"])
        if height == width and not weights.settings and "name" not in trained:
            patch = settings["model.patch_size"]
            height = width = min(height, 224 // patch * patch)  # DINOv2's grid is for 518 pixels
        settings["model.image_size"] = size = height if height == width else (height, width)
        settings["views.global_size"] = weights.settings.get("views.global_size", size)
    if weights.is_read and not draft["teacher.weights"] and weights.mean and weights.std:
        same = weights.range == config.data.range  # or they are measured again
        for key, value in (("data.mean", weights.mean), ("data.std", weights.std)):
            draft.choose(key, value if same else None, reason)  # a frozen teacher's images go before
    choose_channels(draft, trained["channels"], reason)
    for key, value in settings.items():
        if draft.is_open(key) or draft[key] is None:
            draft.override(key, value, reason)


def _vit_settings(draft: Draft, trained: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the settings of a vision transformer."""
    config, defaults = draft.config, Model()
    height, width = patch = height_width(trained["patch_size"])
    if height != width:
        raise ValueError(f"{name} has patches of {patch}, but they must be square")
    shape = {key: trained[key] for key in ("width", "depth", "heads")}
    if config.model.arch and (config.model.timm or config.model.shape != tuple(shape.values())):
        _check_agreement(draft, {"model.arch": shape}, name)
    settings: dict[str, Any] = {f"model.{key}": value for key, value in shape.items()}
    settings |= {"model.patch_size": height, "model.registers": trained["registers"]}
    local = math.ceil(max(config.views.local_shape) / height) * height
    is_open = config.recipe != "auto" and draft.is_open("views.local_size")
    if is_open and local not in config.views.local_shape:
        settings["views.local_size"] = local
    for key in ("stem", "stem_width", "resnet_layers", "resnet_width", "positions", "qk_scale"):
        if trained[key] != getattr(defaults, key) or f"model.{key}" in draft.given:
            settings[f"model.{key}"] = trained[key]
    return settings


def choose_channels(draft: Draft, channels: int, reason: str) -> None:
    """Choose the number of channels, and what depends on it."""
    channels = draft.choose("data.channels", channels, reason)
    if channels != 3:
        for name in ("mean", "std"):
            draft.choose(f"data.{name}", None, "to be measured, since ImageNet's is for RGB")
        for name in ("saturation", "hue", "grey") if draft["augment.module"] is None else ():
            draft.choose(f"augment.{name}", 0.0, f"{channels} channels are not RGB")


def _check_agreement(draft: Draft, settings: Mapping[str, object], weights: str) -> None:
    """Check that the user gave no other values than those of weights."""
    wrong = [key for key in settings if key in draft.given and draft[key] not in (None, settings[key])]
    if wrong:
        text = ", ".join(f"{key}={draft[key]} (there {settings[key]})" for key in wrong)
        raise ValueError(f"{text} does not match {weights}; leave it out")
