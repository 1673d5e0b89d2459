"""How every setting of a run is decided, and why; nothing here reads an image."""

import re
from dataclasses import replace
from typing import Any

import pytest

from dino_vit.config.auto import ENOUGH_IMAGES, SHORT, network_ladder
from dino_vit.config.complete import DecidedRun, complete, decide
from dino_vit.config.draft import Draft
from dino_vit.config.facts import CheckpointFacts, RunFacts, TeacherFacts, WeightsFacts
from dino_vit.config.length import BETWEEN, evaluation_seconds, step_seconds
from dino_vit.config.loading import load
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.config.settings import ConfigError, values
from tests.support.facts import facts_of, run_of, slowed

CIFAR = {"size": 32, "images": 50_000, "processes": 2}


def test_recipe_dino_is_left_alone() -> None:
    assert [choice.key for choice in run_of(**CIFAR).choices] == ["data.bits"]


WEIGHTS = WeightsFacts(
    architecture={
        "width": 64,
        "depth": 3,
        "heads": 4,
        "patch_size": 8,
        "registers": 0,
        "stem": "patch",
        "stem_width": None,
        "resnet_layers": (3, 4, 9),
        "resnet_width": 64,
        "positions": "learned",
        "qk_scale": None,
        "channels": 3,
        "image_size": (32, 32),
    },
    mean=(0.1, 0.2, 0.3),
    std=(0.4, 0.5, 0.6),
)


def test_weights_decide_on_the_network_and_go_before_auto() -> None:
    run = run_of("recipe=auto", "init.weights=x.pth", **CIFAR, weights=WEIGHTS)
    config = run.config
    assert config.model.shape == (64, 3, 4)
    assert (config.optim.lr, config.optim.layer_decay, config.teacher.momentum) == (5e-5, 0.75, 0.9995)
    assert (config.data.mean, config.model.patch_size, config.views.global_size) == ((0.1, 0.2, 0.3), 8, 32)
    grey = facts_of(channels=1, weights=WEIGHTS)
    auto = load(PretrainConfig, None, ["data.source=photos", "recipe=auto", "init.weights=x.pth"])
    assert decide(auto, grey)["data.channels"] == 3, "grey images are repeated"
    given = run_of("init.weights=x.pth", "teacher.momentum=0.99", **CIFAR, weights=WEIGHTS).config
    assert (given.optim.lr, given.teacher.momentum, given.views.local_size) == (5e-5, 0.99, 96)
    with pytest.raises(ValueError, match=r"model.width=32 \(there 64\) does not match init.weights=x.pth"):
        run_of(
            "init.weights=x.pth", "model.width=32", "model.depth=3", "model.heads=4", **CIFAR, weights=WEIGHTS
        )


@pytest.mark.parametrize(("patch", "side", "views"), [(14, 518, 224), (16, 384, 224), (16, 96, 96)])
def test_published_weights_see_views_of_224_pixels_at_most(patch: int, side: int, views: int) -> None:
    """DINOv2's positions are for images of 518."""
    architecture = {**WEIGHTS.architecture, "patch_size": patch, "image_size": (side, side)}
    published = replace(WEIGHTS, architecture=architecture)
    config = run_of("recipe=auto", "init.weights=x.pth", **CIFAR, weights=published).config
    assert (config.views.global_size, config.model.image_size) == (views, views)


def test_a_frozen_teacher_goes_before_weights() -> None:
    pixels = {"data.channels": 3, "data.bits": 8, "data.mean": (0.7,) * 3, "data.std": (0.2,) * 3}
    teacher = TeacherFacts(
        pixels={**pixels, "data.range": None},
        heads={"head.prototypes": 99, "head.shared": True},
        has_patch_head=False,
        patch=8,
        image_size=(64, 64),
    )
    given = ["init.weights=x.pth", "teacher.weights=y"]
    config = run_of(*given, **CIFAR, weights=WEIGHTS, teacher=teacher).config
    assert (config.data.mean, config.head.prototypes, config.model.drop_path) == ((0.7,) * 3, 99, 0)
    views = run_of(*given[1:], "recipe=auto", **CIFAR, teacher=teacher).config
    assert (views.views.global_size, views.model.patch_size, views.head.prototypes) == (64, 8, 99)
    with pytest.raises(ValueError, match="has no head that learned masked patches"):
        run_of(*given, "loss.patch_weight=1", **CIFAR, weights=WEIGHTS, teacher=teacher)


def test_a_published_recipe_gets_shorter_phases_only_where_one_does_not_fit() -> None:
    def phases(length: int, *settings: str) -> dict[str, object]:
        run = run_of(f"budget.epochs={length}", *settings)
        return {choice.key: choice.value for choice in run.choices if choice.key != "data.bits"}

    assert phases(5) == {"optim.warmup_epochs": 0.5, "optim.freeze_last_layer_epochs": 0.25}
    assert phases(11) == {}
    assert phases(5, "optim.warmup_epochs=2") == {}  # the other one fits
    shortened = phases(25, "method=dinov2")
    assert shortened == {"optim.warmup_epochs": 2.5, "loss.warmup_teacher_temp_epochs": 2}


def test_what_auto_leaves_contradictory_is_refused() -> None:
    given = ["loss.warmup_teacher_temp_epochs=5", "budget.epochs=50"]  # auto leaves 0.04
    with pytest.raises(ConfigError, match=r"loss\.teacher_temp=0\.04 must exceed 0\.04"):
        run_of("recipe=auto", *given, images=20, size=32, processes=1, likeness=0.0, channels=3)


@pytest.mark.parametrize(
    ("overrides", "facts", "message"),
    [
        ([], {"images": 100, "processes": 2}, "100 images do not fill a global batch of 128"),
        (["loss.teacher_temp=0.07", "loss.warmup_teacher_temp_epochs=100"], {}, "shorter than the run (100"),
        (
            ["budget.epochs=1", "optim.freeze_last_layer_epochs=1"],
            {},
            "set optim.freeze_last_layer_epochs=0.1",
        ),
        (["init.weights=x.pth", "init.head_epochs=200"], {}, "or a larger budget"),
        (["budget.steps=100", "optim.warmup_epochs=10"], {"images": 64_000}, "set optim.warmup_epochs=0.01"),
        (
            ["budget.steps=29", "optim.warmup_epochs=0.287", "optim.freeze_last_layer_epochs=0"],
            {"images": 6400},
            "0.287 is not shorter than the run (0.29 epochs, 29 steps)",
        ),
        (["optim.lr=5e-3"], {"images": 100_000, "processes": 16}, "is 0.02 at a global batch of 1024"),
        (["optim.lr=2e-7", "optim.min_lr=0"], {}, "learns between"),
        (["optim.lr=2e-6"], {}, "optim.min_lr=1e-06 is above the peak of 5e-07"),
        (
            ["data.channels=5", "data.mean=null", "data.std=null"],
            {},
            "but the images of photos have 3 channels",
        ),
        (
            ["budget.minutes=1", "optim.warmup_epochs=50"],
            {"speed": slowed(10)},
            "optim.warmup_epochs=50 is not shorter than the run",
        ),
    ],
)
def test_what_only_shows_with_the_facts_is_refused(
    overrides: list[str], facts: dict[str, Any], message: str
) -> None:
    colours = [f"augment.{name}=0" for name in ("saturation", "hue", "grey")]
    with pytest.raises(ValueError, match=re.escape(message)):
        run_of(*overrides, *colours, **facts)


def minutes(slowness: float, *overrides: str, images: int = 400, size: int = 224) -> DecidedRun:
    """Complete a run of ten minutes, on a device that is so many times as slow as by default."""
    given = ["recipe=auto", "budget.minutes=10", "data.batch_size=8", *overrides]
    return run_of(*given, images=images, size=size, speed=slowed(slowness))


def test_the_network_is_the_largest_that_sees_enough_images() -> None:
    runs = [minutes(slowness) for slowness in (100, 1, 0.1, 0.01, 1e-3, 1e-6)]
    widths = [run.config.model.width for run in runs]
    assert widths == sorted(widths, key=lambda width: width or 0)
    assert (widths[0], widths[-1]) == (96, 384)
    seen = [run.length * run.global_batch for run in runs]
    assert seen[0] < ENOUGH_IMAGES <= min(seen[3:])
    reasons = [{choice.key: choice.reason for choice in run.choices}["model.width"] for run in runs]
    assert reasons[0].startswith("the smallest: sees about")
    assert all("in 10 minutes on this machine" in reason for reason in reasons)


def test_a_run_has_the_steps_that_fit_beside_its_evaluations() -> None:
    run, facts = minutes(0.2), facts_of(images=400, speed=slowed(0.2))
    step = step_seconds(run.config, facts, are_decoded=False)
    later, first = (evaluation_seconds(run.config, facts, 400, is_first=first) for first in (False, True))
    assert run.length == pytest.approx((600 - first - 6 * later) / step, rel=0.01)
    assert run.config.compute.eval_every == pytest.approx(
        min(10, run.length / run.steps_per_epoch / 6), rel=0.01
    )
    without = minutes(0.2, "compute.eval_every=null")
    assert without.length == pytest.approx(600 / step, rel=0.01)


@pytest.mark.parametrize("keeps_images", [False, True])
def test_images_that_are_kept_are_decoded_in_the_first_epoch_alone(keeps_images: bool) -> None:
    given = ["budget.minutes=10", "compute.eval_every=null", "optim.warmup_epochs=0.1", "model.arch=vit_tiny"]
    known = facts_of(images=6400, speed=slowed(0.1, keeps_images=keeps_images))
    known = replace(known, images=replace(known.images, seconds=0.05))
    run = complete(load(PretrainConfig, None, ["data.source=photos", *given]), known)
    slow, fast = (step_seconds(run.config, known, are_decoded=are) for are in (False, True))
    assert slow == pytest.approx(fast + BETWEEN * 64 * 0.05 / 2)
    expected = 100 + (600 - 100 * slow) / fast if keeps_images else 600 / slow
    assert run.length == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("slowness", "evaluations", "images"), [(0.1, 6, 3586), (1, 4, 3586), (20, 1, 417), (1e4, 1, 250)]
)
def test_evaluations_take_a_tenth_of_the_minutes(slowness: float, evaluations: int, images: int) -> None:
    given = ["recipe=auto", "budget.minutes=10"]
    run = run_of(*given, images=3586, speed=slowed(slowness))
    assert run.evaluated_images == pytest.approx(images, rel=0.3)
    reasons = {choice.key: choice.reason for choice in run.choices}
    times = "1 time" if evaluations == 1 else f"{evaluations} times"
    assert reasons["compute.eval_every"].startswith(f"{times} in a run")
    for minutes in ("budget.minutes=10", "budget.minutes=90"):
        again = resumed(run, "recipe=auto", minutes, "compute.resume=changed", images=3586)
        assert again.evaluated_images == run.evaluated_images
    assert run_of("recipe=auto", "budget.steps=9", images=3586).evaluated_images == 5000


def test_a_run_is_long_if_it_has_as_many_steps_with_all_views_and_patches() -> None:
    """Between both it is short, and has the steps that it takes as a short one."""

    def run(slowness: float) -> DecidedRun:
        return minutes(slowness, "model.arch=vit_tiny", "compute.eval_every=null")

    short, between, long = run(0.1), run(0.013), run(0.001)
    assert short.length < SHORT < between.length < long.length
    assert [each.config.model.patch_drop for each in (short, between, long)] == [0.75, 0.75, 0.0]
    assert [each.config.views.local_count for each in (short, between, long)] == [4, 4, 8]


def test_the_ladder_fits_the_images() -> None:
    def ladder(size: int, *given: str) -> list[Any]:
        config = load(PretrainConfig, None, ["recipe=auto", "budget.minutes=10", *given])
        return network_ladder(Draft(config), size)

    rungs = ladder(500)
    assert rungs[0]["model.width"] == 96
    assert rungs[-1]["views.global_size"] == 224
    for size, view in {32: 24, 4: 4, 2: 4}.items():
        assert {one["views.global_size"] for one in ladder(size)} == {view}
    assert (rungs[-1]["model.width"], rungs[-1]["model.heads"]) == (384, 6)  # ViT-S
    assert all(one["views.global_size"] % 14 == 0 for one in ladder(500, "model.patch_size=14"))
    assert not any("views.global_size" in one for one in ladder(500, "views.global_size=224"))
    assert ladder(500, "model.arch=vit_tiny") == []


def test_without_minutes_a_cpu_hears_of_the_network_that_they_would_choose() -> None:
    (note,) = run_of("recipe=auto", "budget.steps=100").notes
    assert note.startswith("the network is the published ViT-S, which is slow on a CPU; with budget.minutes")
    for given in (["recipe=auto", "model.arch=vit_tiny"], ["recipe=dino"]):
        assert run_of(*given, "budget.steps=8000").notes == ()
    assert run_of("recipe=auto", device="cuda").notes == ()


def resumed(run: DecidedRun, *overrides: str, **changes: Any) -> DecidedRun:
    """Complete the run that resumes from a checkpoint of another at its step 40, after 100 seconds."""
    facts: dict[str, Any] = {"step": 40, "seconds": 100.0, "settings": values(run.config)}
    facts |= {"chosen": run.chosen, "length": run.length, "global_batch": run.global_batch}
    facts["evaluated_images"] = run.evaluated_images
    return run_of(*overrides, **changes, checkpoint=CheckpointFacts(**facts))


def test_a_run_that_resumes_keeps_what_was_chosen_and_gives_way_to_what_is_given() -> None:
    start = run_of("recipe=auto", "teacher.momentum=0.97", **CIFAR)
    again = resumed(start, "recipe=auto", **CIFAR | {"images": 60_000, "likeness": 0.9})
    assert again.config == start.config, "also what was given then, where auto would choose"
    assert again.choices == ()
    # A length in another unit: not both.
    changes = ["compute.resume=changed", "budget.steps=16000"]
    other = resumed(start, "recipe=auto", *changes, **CIFAR)
    assert other.config.budget.epochs is None
    assert (other.length, other.config.teacher.momentum) == (16_000, 0.97)
    reasons = {choice.key: choice.reason for choice in other.choices}
    assert reasons["budget.steps"] == "changed at step 40"


def test_a_changed_setting_is_named_and_not_what_the_run_chose() -> None:
    """Nobody gave patches of 4, or patch_drop, which equal views contradict."""
    auto = {"images": 400, "size": 32}
    start = run_of("recipe=auto", "budget.steps=100", **auto)
    assert start.config.model.patch_drop
    assert start.config.views.local_size == 16
    for given, was in {
        "views.global_size=16": 32,
        "views.local_size=30": 16,
        "model.patch_size=64": 4,
    }.items():
        key, _, value = given.partition("=")
        with pytest.raises(ValueError, match=rf"with other settings: {key} was {was} and is {value}\. Give"):
            resumed(start, "recipe=auto", "budget.steps=100", given, **auto)


def test_a_run_that_resumes_keeps_its_global_batch() -> None:
    start = run_of(**CIFAR)
    again = resumed(start, **CIFAR | {"processes": 1})
    assert (again.config.optim.accumulate, again.global_batch) == (2, 128)
    third = resumed(again, **CIFAR)
    assert (third.config.optim.accumulate, third.global_batch) == (1, 128)


def test_minutes_that_change_change_the_length_in_proportion() -> None:
    start = minutes(1.0, "model.arch=vit_tiny")
    given = ["recipe=auto", "model.arch=vit_tiny", "data.batch_size=8", "compute.resume=changed"]
    facts = {"images": 400, "size": 224}
    assert resumed(start, *given, "budget.minutes=10", **facts).length == start.length
    assert resumed(start, *given, "budget.minutes=20", **facts).length == 480, "at 40 steps in 100 seconds"


def test_an_order_follows_from_where_shards_lie() -> None:
    config = load(PretrainConfig, None, ["data.source=photos"])
    base = facts_of()

    def order(**changes: Any) -> object:
        images = type(base.images)(**{**vars(base.images), **changes})
        return decide(config, RunFacts(images=images))["data.order"]

    assert order(shards=3) is None
    assert order(shards=3, is_remote=True) == order(shards=3, count=2**27) == "window"


def test_facts_and_a_run_are_values() -> None:
    config = load(PretrainConfig, None, ["data.source=photos", "recipe=auto"])
    assert facts_of(**CIFAR) == facts_of(**CIFAR)
    assert "ImageFacts(count=50000" in repr(facts_of(**CIFAR))
    first, second = (complete(config, facts_of(**CIFAR)) for _ in range(2))
    assert first == second
    assert first.shared == second.shared != complete(config, facts_of(size=400, images=1_281_167)).shared
    assert len(config.given) == 2
