"""How every setting of a run is decided, and why; nothing here reads an image."""

import re
from typing import Any

import pytest

from dino_vit.config.auto import network_ladder
from dino_vit.config.complete import DecidedRun, complete, decide
from dino_vit.config.draft import Draft
from dino_vit.config.facts import CheckpointFacts, Facts, StepTime, TeacherFacts, WeightsFacts
from dino_vit.config.loading import load
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.config.settings import ConfigError, values
from tests.support.facts import facts_of, run_of

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
    given = run_of("init.weights=x.pth", "teacher.momentum=0.99", **CIFAR, weights=WEIGHTS).config
    assert (given.optim.lr, given.teacher.momentum, given.views.local_size) == (5e-5, 0.99, 96)
    with pytest.raises(ValueError, match=r"model.width=32 \(there 64\) does not match init.weights=x.pth"):
        run_of(
            "init.weights=x.pth", "model.width=32", "model.depth=3", "model.heads=4", **CIFAR, weights=WEIGHTS
        )


def test_a_fixed_teacher_goes_before_weights() -> None:
    pixels = {"data.channels": 3, "data.bits": 8, "data.mean": (0.7,) * 3, "data.std": (0.2,) * 3}
    teacher = TeacherFacts(
        pixels={**pixels, "data.range": None},
        heads={"head.prototypes": 99, "head.shared": True},
        has_patch_head=False,
        has_patches=True,
        patch=8,
        image_size=(64, 64),
    )
    given = ["init.weights=x.pth", "teacher.weights=y"]
    config = run_of(*given, **CIFAR, weights=WEIGHTS, teacher=teacher).config
    assert (config.data.mean, config.head.prototypes, config.model.drop_path) == ((0.7,) * 3, 99, 0)
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
        (["budget.steps=100", "optim.warmup_epochs=10"], {"images": 64_000}, "set optim.warmup_epochs=0.01"),
        (
            ["budget.steps=29", "optim.warmup_epochs=0.287", "optim.freeze_last_layer_epochs=0"],
            {"images": 6400},
            "0.287 is not shorter than the run (0.29 epochs, both of 29 steps)",
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
            {"step_time": StepTime(1.0)},
            "or a larger budget.minutes",
        ),
    ],
)
def test_what_only_shows_with_the_facts_is_refused(
    overrides: list[str], facts: dict[str, Any], message: str
) -> None:
    colours = [f"augment.{name}=0" for name in ("saturation", "hue", "grey")]
    with pytest.raises(ValueError, match=re.escape(message)):
        run_of(*overrides, *colours, **facts)


def minutes(step: float, *overrides: str, images: int = 400, size: int = 224) -> DecidedRun:
    """Complete a run of ten minutes, of which a step of the smallest network takes some seconds."""
    given = ["recipe=auto", "budget.minutes=10", "data.batch_size=8", *overrides]
    return run_of(*given, images=images, size=size, step_time=StepTime(step, 15.0, 5.0))


@pytest.mark.parametrize(("speed", "width"), [(10, 96), (1e9, 384)])
def test_the_network_is_chosen_from_one_measured_step(speed: float, width: int) -> None:
    run = minutes(8 / speed)
    assert run.config.model.width == width
    reasons = {choice.key: choice.reason for choice in run.choices}
    assert "in 10 minutes on this machine" in reasons["model.width"]
    if width == 96:
        assert run.length == pytest.approx((600 - 5 - 4 * 15) * speed / 8, rel=0.02)
        assert run.config.compute.eval_every == pytest.approx(run.length / run.steps_per_epoch / 2, rel=0.01)


@pytest.mark.parametrize(
    ("minutes", "images", "evaluations"), [(1, 717, 1), (3, 2151, 1), (10, 5000, 4), (60, 5000, 6)]
)
def test_evaluations_take_a_tenth_of_the_minutes(minutes: int, images: int, evaluations: int) -> None:
    """The first one also evaluates what needs no network."""
    time = StepTime(0.5, 10.0, 2.0, evaluated_images=3586)
    run = run_of("recipe=auto", f"budget.minutes={minutes}", images=3586, step_time=time)
    assert run.evaluated_images == images
    reasons = {choice.key: choice.reason for choice in run.choices}
    times = "1 time" if evaluations == 1 else f"{evaluations} times"
    assert reasons["compute.eval_every"].startswith(f"{times} in a run")
    slow = run_of("recipe=auto", f"budget.minutes={minutes}", images=3586, step_time=StepTime(5.0, 1e4))
    assert slow.evaluated_images == 250
    for given in (f"budget.minutes={minutes}", "budget.minutes=90"):
        again = resumed(run, "recipe=auto", given, "compute.resume=changed", images=3586)
        assert again.evaluated_images == images
    assert run_of("recipe=auto", "budget.steps=9", images=3586).evaluated_images == 5000


def test_a_long_run_of_minutes_has_the_steps_that_it_takes_and_not_those_of_a_short_one() -> None:
    """The step that is timed is a short run's: 4 local views, a quarter of the patches of global ones."""

    def run(step: float, *given: str) -> DecidedRun:
        return minutes(step, "model.arch=vit_tiny", *given)

    full = ["views.local_count=8", "model.patch_drop=0"]
    short, long = 1e-4 * run(1e-4, *full).length, 1e-4 * run(1e-4).length
    passes = {"short": 2 * (1 + 3 / 4) + 4 * 3 * (3 / 7) ** 2, "long": 2 * (1 + 3) + 8 * 3 * (3 / 7) ** 2}
    assert short / long == pytest.approx(passes["long"] / passes["short"], rel=1e-3)
    between = run(0.012)  # 44,600 steps of a short run, 20,500 of a long one
    assert (between.length, between.config.model.patch_drop) == (29_999, 0.75)
    assert run(0.012, *full).length == run(0.012, "recipe=dino", "compute.eval_every=5").length > 40_000


def test_the_network_is_the_largest_that_sees_enough_images() -> None:
    def ladder(size: int, *given: str) -> list[Any]:
        config = load(PretrainConfig, None, ["recipe=auto", "budget.minutes=10", *given])
        return network_ladder(Draft(config), size)

    rungs = ladder(500)
    assert [one.cost for one in rungs] == sorted(one.cost for one in rungs)
    assert rungs[0].settings["model.width"] == 96
    assert rungs[-1].settings["views.global_size"] == 224
    for size, view in {32: 24, 4: 4, 2: 4}.items():
        assert {one.settings["views.global_size"] for one in ladder(size)} == {view}
    assert (rungs[-1].settings["model.width"], rungs[-1].settings["model.heads"]) == (384, 6)  # ViT-S
    assert all(one.settings["views.global_size"] % 14 == 0 for one in ladder(500, "model.patch_size=14"))
    costs = [one.cost for one in ladder(500, "views.global_size=224")]
    assert costs[-1] / costs[0] > 30, "the patches are those of the view, whatever the network"
    assert ladder(500, "model.arch=vit_tiny") == []


def test_a_run_that_sees_few_images_says_so() -> None:
    given = [
        "recipe=dino",
        "optim.warmup_epochs=0",
        "optim.freeze_last_layer_epochs=0",
        "compute.eval_every=null",
    ]
    (note,) = minutes(170.0, *given, images=64).notes
    assert note.startswith("budget.minutes=10 has time for about 3 steps of the 8 in an epoch")
    assert note.endswith("budget.minutes=27 would be one epoch")


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
    # An interval in steps instead of epochs, a length in another unit: not both.
    changes = ["compute.resume=changed", "budget.steps=16000", "compute.eval_every_steps=8"]
    other = resumed(start, "recipe=auto", *changes, **CIFAR)
    assert (other.config.budget.epochs, other.config.compute.eval_every) == (None, None)
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
        return decide(config, Facts(images=images))["data.order"]

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
