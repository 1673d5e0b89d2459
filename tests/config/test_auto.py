"""What `recipe=auto` chooses, and why; nothing here reads an image."""

from itertools import pairwise
from typing import Any

import pytest

from dino_vit.config.complete import DecidedRun
from dino_vit.config.pretrain import PretrainConfig, scaled_lr
from dino_vit.config.settings import ConfigError, values
from tests.support.facts import run_of

IMAGENET = {"size": 400, "images": 1_281_167, "processes": 8}
CIFAR = {"size": 32, "images": 50_000, "processes": 2}


def auto(*overrides: str, **facts: Any) -> tuple[PretrainConfig, dict[str, str]]:
    run = run_of("recipe=auto", *overrides, **facts)
    return run.config, {choice.key: choice.reason for choice in run.choices}


def peak(run: DecidedRun) -> float:
    optim = run.config.optim
    return scaled_lr(optim.lr, run.global_batch, optim.lr_scaling)


@pytest.mark.parametrize("processes", [8, 12, 16])
@pytest.mark.parametrize("size", [224, 256, 400])
def test_imagenet_gets_the_published_recipe(processes: int, size: int) -> None:
    config, _ = auto(**IMAGENET | {"processes": processes, "size": size})
    default = values(PretrainConfig()) | {"recipe": "auto", "data.source": "photos", "data.bits": 8}
    assert values(config) == default


def test_a_short_run_on_small_images_gets_what_was_measured_to_learn() -> None:
    small = ["budget.steps=1800", "model.width=64", "model.depth=3", "model.heads=4", "recipe=auto"]
    run = run_of(*small, size=32, images=20_000)
    config = run.config
    assert (config.model.patch_size, config.views.global_size, config.views.local_size) == (4, 32, 16)
    assert 256 <= config.head.prototypes <= 1024
    assert 0.975 <= config.teacher.momentum <= 0.985  # at 0.97 and a rate of 4e-3 this run collapses
    assert 1.5e-3 <= peak(run) <= 2.5e-3
    assert 0 < config.optim.freeze_last_layer_epochs < config.optim.warmup_epochs
    assert "budget.epochs" not in run.chosen
    assert (config.head.hidden_dim, config.head.bottleneck_dim, config.head.batch_norm) == (256, 64, True)
    assert 0.02 <= config.loss.teacher_temp <= 0.028  # at 0.04 320 images end in the uniform state


def test_short_runs_see_views_with_more_of_the_image() -> None:
    short, _ = auto("budget.steps=1000", **CIFAR)
    assert (short.views.global_scale, short.views.local_scale) == ((0.25, 1.0), (0.1, 0.4))
    published, _ = auto(**IMAGENET)
    assert published.views == PretrainConfig().views


@pytest.mark.parametrize("given", [[], ["budget.epochs=7"], ["budget.steps=1234"]], ids=str)
@pytest.mark.parametrize("images", [3586, 320])
def test_the_reasons_name_the_number_of_steps_of_the_run(images: int, given: list[str]) -> None:
    run = run_of("recipe=auto", "data.batch_size=60", *given, size=32, images=images)
    reasons = {choice.key: choice.reason for choice in run.choices}
    assert f"for a run of {run.length:,}: " in reasons["teacher.momentum"]


def test_a_given_warm_up_of_the_temperature_is_kept() -> None:
    config, _ = auto("loss.warmup_teacher_temp_epochs=5", "loss.teacher_temp=0.07", **CIFAR)
    assert config.loss.teacher_temp == 0.07


@pytest.mark.parametrize("given", [["budget.epochs=25"], []], ids=str)
@pytest.mark.parametrize("images", [1_281_167, 100_000_000])
def test_the_phases_of_dinov2_fit_too(given: list[str], images: int) -> None:
    config, reasons = auto("method=dinov2", *given, **IMAGENET | {"images": images})
    assert config.loss.warmup_teacher_temp_epochs < (config.budget.epochs or 0)
    if given == ["budget.epochs=25"]:
        assert "a run of 25 epochs" in reasons["loss.warmup_teacher_temp_epochs"]


@pytest.mark.parametrize(("facts", "given"), [(CIFAR, ["budget.steps=5000"]), (IMAGENET, [])])
def test_dinov2_with_a_low_temperature_has_no_warm_up_of_it(facts: dict[str, Any], given: list[str]) -> None:
    config, reasons = auto("method=dinov2", "loss.teacher_temp=0.03", *given, **facts)
    assert config.loss.teacher_temp == 0.03
    assert config.loss.warmup_teacher_temp_epochs == 0
    assert "loss.warmup_teacher_temp_epochs" in reasons


@pytest.mark.parametrize(("size", "channels"), [(8, 1), (33, 3), (100, 13), (512, 3)])
@pytest.mark.parametrize("images", [50, 4000, 100_000, 20_000_000])
@pytest.mark.parametrize("batch", [8, 8192])
def test_every_data_set_gets_a_config_that_runs(size: int, images: int, channels: int, batch: int) -> None:
    given = [f"data.batch_size={min(batch, images)}"]
    for arch in ("vit_tiny", "vit_base"):
        _, reasons = auto(*given, f"model.arch={arch}", size=size, images=images, channels=channels)
        assert all(reason and "\n" not in reason for reason in reasons.values())


def test_the_choices_change_gradually_with_the_number_of_images() -> None:
    sizes = [round(20_000 * 1.1**n) for n in range(46)]  # to 1.5 million
    configs = [auto(**IMAGENET | {"images": n, "size": 224})[0] for n in sizes]
    for before, after in pairwise(configs):
        assert after.teacher.momentum >= before.teacher.momentum
        assert after.loss.teacher_temp >= before.loss.teacher_temp
        assert 0.9 < after.optim.lr / before.optim.lr <= 1
        assert after.head.prototypes / before.head.prototypes in (1, 2)
        assert (after.budget.epochs or 0) <= (before.budget.epochs or 0)


def test_nothing_that_was_given_is_overwritten() -> None:
    given = {
        "model.patch_size": 8,
        "views.global_size": 48,
        "head.prototypes": 1000,
        "optim.lr": 1e-4,
        "optim.warmup_epochs": 2.0,
        "teacher.momentum": 0.9,
        "budget.epochs": 7,
    }
    config, reasons = auto(*(f"{key}={value}" for key, value in given.items()), **CIFAR)
    assert {key: values(config)[key] for key in given} == given
    assert not set(given) & set(reasons)
    assert config.views.local_size == 24  # follows from what was given


@pytest.mark.parametrize(
    ("size", "view", "read"), [(128, 48, 96), (64, 48, 80), (32, 24, 40), (500, 128, 224), (224, 224, None)]
)
def test_features_are_read_at_up_to_twice_the_views(size: int, view: int, read: int | None) -> None:
    facts = CIFAR | {"size": size}
    assert auto(f"views.global_size={view}", **facts)[0].model.image_size == read
    assert auto("views.global_size=[48, 64]", **facts)[0].model.image_size is None
    resnet = auto("model.arch=timm:resnet18", **facts | {"size": 48})[0]
    assert (resnet.model.image_size, resnet.views.global_size, resnet.views.local_size) == (None, 64, 32)


@pytest.mark.parametrize(
    ("given", "count", "dropped"),
    [([], 4, 0.75), (["budget.steps=30000"], 8, 0), (["loss.patch_weight=1"], 8, 0)],
    ids=str,
)
def test_a_short_run_of_cls_tokens_sees_less_of_more_images(
    given: list[str], count: int, dropped: float
) -> None:
    config, _ = auto("budget.steps=1000", *given, **CIFAR)
    assert (config.views.local_count, config.model.patch_drop) == (count, dropped)


def test_images_that_lie_alike_get_narrow_convolutions() -> None:
    def stem(*given: str, **facts: Any) -> tuple[object, ...]:
        config, _ = auto(*given, **CIFAR, **facts)
        return config.model.stem, config.model.stem_width

    network = ["budget.steps=1000", "model.arch=null", "model.width=96", "model.depth=4", "model.heads=3"]
    assert stem(*network, likeness=0.5) == ("conv", 48)
    assert stem(*network) == stem("budget.steps=30000", likeness=0.5) == ("patch", None)
    assert stem("budget.steps=1000", "model.stem=patch", likeness=0.5) == ("patch", None)
    odd = stem("budget.steps=1000", "model.patch_size=6", "views.global_size=48", likeness=0.5)
    assert odd[0] == "patch", "which convolutions of stride 2 do not reach"


def test_a_given_view_decides_the_patch() -> None:
    config, _ = auto("views.global_size=[40, 60]", "views.local_size=20", **CIFAR)
    assert config.model.patch_size == 4
    with pytest.raises(ConfigError, match="not divisible"):
        auto("views.global_size=225", **IMAGENET)


def test_other_channels_lose_the_colour_operations() -> None:
    config, reasons = auto(**CIFAR, channels=5)
    assert (config.data.channels, config.data.mean, config.data.std) == (5, (0.5,) * 5, (0.25,) * 5)
    assert reasons["data.mean"] == "measured on 64 images"
    assert (config.augment.saturation, config.augment.hue, config.augment.grey) == (0, 0, 0)
    assert "not RGB" in reasons["augment.hue"]


def test_a_given_scaling_gives_the_same_rate() -> None:
    rates = [
        peak(run_of("recipe=auto", f"optim.lr_scaling={name}", **CIFAR))
        for name in ("linear", "sqrt", "none")
    ]
    assert rates == pytest.approx(rates[:1] * 3, rel=5e-3)


@pytest.mark.parametrize(("processes", "rate"), [(2, 5e-4), (8, 1e-3), (16, 2e-3), (64, 4e-3)])
def test_the_rate_is_linear_where_published_and_a_root_outside(processes: int, rate: float) -> None:
    facts = IMAGENET | {"images": 10 * int(IMAGENET["images"]), "processes": processes}
    assert peak(run_of("recipe=auto", **facts)) == pytest.approx(rate, rel=5e-3)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_module_of_ones_own_takes_the_place_of_all_augmentation(channels: int) -> None:
    config, reasons = auto("augment.module=object:mine", **CIFAR, channels=channels)
    assert config.augment == PretrainConfig().augment.model_copy(update={"module": "object:mine"})
    assert not any(key.startswith("augment.") for key in reasons)
