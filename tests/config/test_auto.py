from itertools import pairwise
from typing import Any

import pytest

from dino_vit.config.auto import Choice, auto_choices, init_choices, phase_choices
from dino_vit.config.loading import load, replace
from dino_vit.config.pretrain import AUTO_KEYS, PretrainConfig
from dino_vit.config.settings import ConfigError, values
from dino_vit.training.plan import make_plan

IMAGENET = {"image_size": 400, "images": 1_281_167, "channels": 3, "global_batch": 512}
CIFAR = {"image_size": 32, "images": 50_000, "channels": 3, "global_batch": 128}


def auto(*overrides: str, **facts: Any) -> tuple[PretrainConfig, dict[str, Choice]]:
    config = load(PretrainConfig, None, ["recipe=auto", *overrides])
    choices = auto_choices(config, **facts)
    config, batch = filled(config, choices), facts["global_batch"]
    length = config.budget.total_steps(facts["images"], batch) / (facts["images"] // batch)
    choices += phase_choices(config, length)
    assert len({choice.key for choice in choices}) == len(choices)
    return filled(config, choices), {choice.key: choice for choice in choices}


def filled(config: PretrainConfig, choices: list[Choice]) -> PretrainConfig:
    return replace(config, {choice.key: choice.value for choice in choices})


@pytest.mark.parametrize("batch", [512, 768, 1024])
@pytest.mark.parametrize("image_size", [224, 256, 400])
def test_imagenet_gets_the_published_recipe(batch: int, image_size: int) -> None:
    config, _ = auto(**IMAGENET | {"global_batch": batch, "image_size": image_size})
    assert values(config) == values(PretrainConfig()) | {"recipe": "auto"}


def test_a_short_run_on_small_images_gets_what_was_measured_to_learn() -> None:
    small = ["budget.steps=1800", "model.width=64", "model.depth=3", "model.heads=4"]
    facts = {"image_size": 32, "images": 20_000, "channels": 3, "global_batch": 64}
    config, choices = auto(*small, "data.batch_size=64", **facts)
    assert (config.model.patch_size, config.views.global_size, config.views.local_size) == (4, 32, 16)
    assert 256 <= config.head.prototypes <= 1024
    assert 0.975 <= config.teacher.momentum <= 0.985  # at 0.97 and a rate of 4e-3 this run collapses
    plan = make_plan(config, 20_000, 1)
    assert 1.5e-3 <= plan.lr <= 2.5e-3
    assert 0 < plan.freeze_steps < plan.warmup_steps < plan.total_steps / 5
    assert "budget.epochs" not in choices
    assert (config.head.hidden_dim, config.head.bottleneck_dim, config.head.batch_norm) == (256, 64, True)
    assert 0.02 <= config.loss.teacher_temp <= 0.028  # at 0.04 320 images end in the uniform state


def test_images_that_lie_alike_get_views_of_nearly_all_of_them() -> None:
    facts = CIFAR | {"image_size": 100, "images": 1534}
    scales = {
        likeness: (config.views.global_scale, config.views.local_scale)
        for likeness in (0.0, 0.24, 0.26, 0.9)
        for config, _ in [auto("budget.steps=1000", **facts, likeness=likeness)]
    }
    assert scales[0.0] == scales[0.24] == ((0.25, 1.0), (0.1, 0.4))
    assert scales[0.26] == scales[0.9] == ((0.6, 1.0), (0.3, 0.7))
    published, _ = auto(**IMAGENET, likeness=0.9)
    assert published.views == PretrainConfig().views, "long runs keep the published scales"


@pytest.mark.parametrize("given", [[], ["budget.epochs=7"], ["budget.steps=1234"]], ids=str)
@pytest.mark.parametrize("images", [3586, 320])
def test_the_reasons_name_the_number_of_steps_of_the_plan(images: int, given: list[str]) -> None:
    config, choices = auto("data.batch_size=60", *given, **CIFAR | {"images": images, "global_batch": 60})
    steps = make_plan(config, images, 1).total_steps
    assert f"for a run of {steps:,}: " in choices["teacher.momentum"].reason


def test_a_given_warm_up_of_the_temperature_is_kept() -> None:
    config, _ = auto("loss.warmup_teacher_temp_epochs=5", "loss.teacher_temp=0.07", **CIFAR)
    assert config.loss.teacher_temp == 0.07


@pytest.mark.parametrize("given", [["budget.epochs=25"], []], ids=str)
@pytest.mark.parametrize("images", [1_281_167, 100_000_000])
def test_the_phases_of_dinov2_fit_too(given: list[str], images: int) -> None:
    config, choices = auto("method=dinov2", *given, **IMAGENET | {"images": images})
    assert config.loss.warmup_teacher_temp_epochs < (config.budget.epochs or 0)
    if given == ["budget.epochs=25"]:
        assert "a run of 25 epochs" in choices["loss.warmup_teacher_temp_epochs"].reason


@pytest.mark.parametrize("facts", [CIFAR | {"steps": 5000}, IMAGENET])
def test_dinov2_with_a_low_temperature_has_no_warm_up_of_it(facts: dict[str, Any]) -> None:
    config, choices = auto("method=dinov2", "loss.teacher_temp=0.03", **facts)
    assert config.loss.teacher_temp == 0.03
    assert config.loss.warmup_teacher_temp_epochs == 0
    assert "loss.warmup_teacher_temp_epochs" in choices
    assert not list(config.contradictions(filled=True))


@pytest.mark.parametrize(("image_size", "channels"), [(8, 1), (33, 3), (100, 13), (512, 3)])
@pytest.mark.parametrize("images", [50, 4000, 100_000, 20_000_000])
@pytest.mark.parametrize("batch", [8, 8192])
def test_every_data_set_gets_a_config_that_runs(
    image_size: int, images: int, channels: int, batch: int
) -> None:
    batch = min(batch, images)
    facts = {"image_size": image_size, "images": images, "channels": channels, "global_batch": batch}
    for arch in ("vit_tiny", "vit_base"):
        config, choices = auto(f"data.batch_size={batch}", f"model.arch={arch}", **facts)
        assert set(choices) <= AUTO_KEYS
        assert all(choice.reason and "\n" not in choice.reason for choice in choices.values())
        make_plan(config, images, 1)
        assert not list(config.contradictions(filled=True))


def test_the_choices_change_gradually_with_the_number_of_images() -> None:
    sizes = [round(20_000 * 1.1**n) for n in range(46)]  # to 1.5 million
    configs = [auto(**IMAGENET | {"images": n, "image_size": 224})[0] for n in sizes]
    for before, after in pairwise(configs):
        assert after.teacher.momentum >= before.teacher.momentum
        assert after.loss.teacher_temp >= before.loss.teacher_temp
        assert 0.9 < after.optim.lr / before.optim.lr <= 1
        assert after.head.prototypes / before.head.prototypes in (1, 2)
        assert (after.budget.epochs or 0) <= (before.budget.epochs or 0)


@pytest.mark.parametrize("budget", ["budget.epochs=5", "budget.steps=1950"])
@pytest.mark.parametrize("phase", ["optim.warmup_epochs=7", "optim.freeze_last_layer_epochs=6"])
def test_a_given_phase_that_does_not_fit_is_refused_and_not_shortened(phase: str, budget: str) -> None:
    with pytest.raises(ConfigError, match=f"{phase} is not shorter than the run"):
        make_plan(auto(phase, budget, "data.batch_size=128", **CIFAR)[0], CIFAR["images"], 1)


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
    config, choices = auto(*(f"{key}={value}" for key, value in given.items()), **CIFAR)
    assert {key: values(config)[key] for key in given} == given
    assert not set(given) & set(choices)
    assert config.views.local_size == 24  # follows from what was given


@pytest.mark.parametrize(
    ("image_size", "view", "read"),
    [(128, 48, 96), (64, 48, 80), (32, 24, 40), (500, 128, 224), (224, 224, None)],
)
def test_features_are_read_at_up_to_twice_the_views(image_size: int, view: int, read: int | None) -> None:
    facts = CIFAR | {"image_size": image_size}
    assert auto(f"views.global_size={view}", **facts)[0].model.image_size == read
    assert auto("views.global_size=[48, 64]", **facts)[0].model.image_size is None
    resnet = ["model.arch=timm:resnet18", "views.global_size=64"]
    assert auto(*resnet, **facts)[0].model.image_size is None


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


def test_images_that_lie_alike_get_narrow_convolutions_and_all_patches_at_the_end() -> None:
    network = ["model.arch=null", "model.width=96", "model.depth=4", "model.heads=3"]
    config, choices = auto("budget.steps=1000", *network, **CIFAR, likeness=0.5)
    assert (config.model.stem, config.model.stem_width) == ("conv", 48)
    assert config.model.patch_drop_until == 0.8
    others, _ = auto("budget.steps=1000", *network, **CIFAR)
    assert (others.model.stem, others.model.stem_width, others.model.patch_drop_until) == ("patch", None, 1)
    assert {"model.stem", "model.stem_width"} <= choices.keys()
    long, _ = auto("budget.steps=30000", **CIFAR, likeness=0.5)
    assert (long.model.stem, long.model.stem_width, long.model.patch_drop_until) == ("patch", None, 1)
    plain, _ = auto("budget.steps=1000", "model.stem=patch", "model.patch_drop=0", **CIFAR, likeness=0.5)
    assert (plain.model.stem, plain.model.stem_width, plain.model.patch_drop_until) == ("patch", None, 1)
    odd, _ = auto("budget.steps=1000", "model.patch_size=6", "views.global_size=48", **CIFAR, likeness=0.5)
    assert odd.model.stem == "patch", "which convolutions of stride 2 do not reach"


def test_a_given_view_decides_the_patch() -> None:
    config, _ = auto("views.global_size=[40, 60]", "views.local_size=20", **CIFAR)
    assert config.model.patch_size == 4
    with pytest.raises(ConfigError, match="not divisible"):
        auto("views.global_size=225", **IMAGENET)


def test_other_channels_lose_the_colour_operations() -> None:
    config, choices = auto(**CIFAR | {"channels": 5})
    assert (config.data.channels, config.data.mean, config.data.std) == (5, None, None)  # to be measured
    assert (config.augment.saturation, config.augment.hue, config.augment.grey) == (0, 0, 0)
    assert "not RGB" in choices["augment.hue"].reason


def test_a_given_scaling_gives_the_same_rate() -> None:
    rates: list[Any] = []
    for scaling in ("linear", "sqrt", "none"):
        config, _ = auto(f"optim.lr_scaling={scaling}", "data.batch_size=128", **CIFAR)
        rates.append(make_plan(config, 50_000, 1).lr)
    assert rates == pytest.approx(rates[:1] * 3, rel=5e-3)


@pytest.mark.parametrize(("batch", "rate"), [(128, 5e-4), (512, 1e-3), (1024, 2e-3), (4096, 4e-3)])
def test_the_rate_is_linear_where_published_and_a_root_outside(batch: int, rate: float) -> None:
    facts = IMAGENET | {"images": 10 * IMAGENET["images"], "global_batch": batch}
    config, _ = auto(f"data.batch_size={batch}", **facts)
    assert make_plan(config, facts["images"], 1).lr == pytest.approx(rate, rel=5e-3)


def test_recipe_dino_is_left_alone() -> None:
    assert auto_choices(PretrainConfig(), **CIFAR) == []


def test_init_is_a_recipe_of_its_own() -> None:
    config = load(PretrainConfig, None, ["init.weights=x.pth", "teacher.momentum=0.99"])
    choices = init_choices(config)
    assert [choice.key for choice in choices] == ["optim.lr", "optim.layer_decay"]
    config = filled(config, choices)
    assert (config.optim.lr, config.optim.layer_decay, config.teacher.momentum) == (5e-5, 0.75, 0.99)
    assert init_choices(PretrainConfig()) == []


def test_init_goes_before_auto() -> None:
    config = load(PretrainConfig, None, ["recipe=auto", "init.weights=x.pth"])
    config = filled(config, init_choices(config))
    config = filled(config, auto_choices(config, **CIFAR))
    assert (config.optim.lr, config.teacher.momentum, config.model.patch_size) == (5e-5, 0.9995, 4)


def test_a_published_recipe_gets_shorter_phases_only_where_one_does_not_fit():
    def phases(length, *settings):
        config = load(PretrainConfig, None, settings)
        return {choice.key: choice.value for choice in phase_choices(config, length)}

    assert phases(5) == {"optim.warmup_epochs": 0.5, "optim.freeze_last_layer_epochs": 0.25}
    assert phases(11) == {}
    assert phases(5, "optim.warmup_epochs=2") == {}  # the other one fits
    shortened = phases(25, "method=dinov2")
    assert shortened == {"optim.warmup_epochs": 2.5, "loss.warmup_teacher_temp_epochs": 2}
