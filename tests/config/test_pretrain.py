import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dino_vit.config.checks import check_run, scaled_lr
from dino_vit.config.display import to_yaml
from dino_vit.config.loading import load
from dino_vit.config.pretrain import ALSO_KNOWN_AS, Arch, PretrainConfig
from dino_vit.config.settings import ConfigError, settings_of, values
from dino_vit.core.sizes import VIT_SIZES

CONFIGS = sorted((Path(__file__).parents[2] / "configs" / "pretrain").glob("*.yaml"))

# The published ViT-S/16 recipe, written down a second time.
PUBLISHED = {
    "seed": 0,
    "data.batch_size": 64,
    "data.mean": (0.485, 0.456, 0.406),
    "data.std": (0.229, 0.224, 0.225),
    "model.patch_size": 16,
    "model.drop_path": 0.1,
    "head.prototypes": 65536,
    "head.hidden_dim": 2048,
    "head.bottleneck_dim": 256,
    "head.layers": 3,
    "head.batch_norm": False,
    "head.norm_last_layer": True,
    "views.global_count": 2,
    "views.global_size": 224,
    "views.global_scale": (0.4, 1.0),
    "views.local_count": 8,
    "views.local_size": 96,
    "views.local_scale": (0.05, 0.4),
    "views.ratio": (3 / 4, 4 / 3),
    "photometry.flip": 0.5,
    "photometry.jitter": 0.8,
    "photometry.brightness": 0.4,
    "photometry.contrast": 0.4,
    "photometry.saturation": 0.2,
    "photometry.hue": 0.1,
    "photometry.grey": 0.2,
    "photometry.blur": (1.0, 0.1, 0.5),
    "photometry.blur_sigma": (0.1, 2.0),
    "photometry.solarise": (0.0, 0.2, 0.0),
    "photometry.noise": 0.0,
    "loss.student_temp": 0.1,
    "loss.teacher_temp": 0.04,
    "loss.warmup_teacher_temp": 0.04,
    "loss.warmup_teacher_temp_epochs": 0,
    "loss.center_momentum": 0.9,
    "optim.name": "adamw",
    "optim.lr": 5e-4,
    "optim.lr_scaling": "linear",
    "optim.min_lr": 1e-6,
    "optim.warmup_epochs": 10,
    "optim.weight_decay": 0.04,
    "optim.weight_decay_end": 0.4,
    "optim.clip": 3.0,
    "optim.clip_mode": "tensor",
    "optim.freeze_last_layer_epochs": 1,
    "optim.layer_decay": None,
    "optim.accumulate": 1,
    "teacher.momentum": 0.996,
    "teacher.momentum_end": 1.0,
    "budget.epochs": 100,
}


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(PretrainConfig, None, overrides)
    return str(error.value)


def test_the_defaults_are_the_published_recipe() -> None:
    shown = values(PretrainConfig())
    assert {key: shown[key] for key in PUBLISHED} == PUBLISHED
    assert PretrainConfig().model.shape == (384, 12, 6)


def test_every_knob_is_documented_and_every_other_name_leads_to_one() -> None:
    names = " ".join(ALSO_KNOWN_AS.values()).split()
    assert set(ALSO_KNOWN_AS) <= set(settings_of(PretrainConfig))
    assert len(names) == len(set(names))
    assert not set(names) & set(settings_of(PretrainConfig))
    assert all(one.doc for one in settings_of(PretrainConfig).values())
    assert all(len(line) <= 132 for line in to_yaml(PretrainConfig()).splitlines())


def test_every_named_size_has_a_shape() -> None:
    assert set(VIT_SIZES) == set(Arch.__args__)  # type: ignore[attr-defined]
    assert all(size["width"] % size["heads"] == 0 for size in VIT_SIZES.values())


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_the_configs_load_and_round_trip(file: Path, tmp_path: Path) -> None:
    config = load(PretrainConfig, file)
    assert config.output == f"runs/{file.stem}"
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(to_yaml(config), encoding="utf-8")
    assert load(PretrainConfig, resolved) == config
    assert f"--config configs/pretrain/{file.name}" in file.read_text(encoding="utf-8")


def test_the_named_configs_are_there() -> None:
    names = ["cifar10", "cifar10_cpu", "vitb16", "vits16", "vits16_300", "vits8"]
    assert [file.stem for file in CONFIGS] == names
    assert values(load(PretrainConfig, CONFIGS[3])) == values(PretrainConfig(output="runs/vits16"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["loss.teacher_temp=0.3"], "loss.teacher_temp=0.3 is not below loss.student_temp=0.1"),
        (["loss.teacher_temp=0.1"], "is not below loss.student_temp"),
        (["loss.student_temp=0.04"], "loss.warmup_teacher_temp=0.04 is not below"),
        (["loss.warmup_teacher_temp_epochs=30"], "raise loss.teacher_temp (0.07)"),
        (["loss.teacher_temp=0.07", "loss.warmup_teacher_temp_epochs=100"], "is not below the 100 epochs"),
        (["optim.lr=0.05"], "optim.lr=0.05 is 0.0125 at a global batch of 64"),
        (["optim.lr=0.05", "optim.lr_scaling=none"], "adamw learns between"),
        (["optim.min_lr=1e-3"], "optim.min_lr=0.001 is above optim.lr"),
        (["optim.warmup_epochs=100"], "set optim.warmup_epochs=10.0, or a larger budget.epochs"),
        (["budget.epochs=5"], "set optim.warmup_epochs=0.5"),
        (["budget.epochs=1", "optim.warmup_epochs=0"], "set optim.freeze_last_layer_epochs=0.1"),
        (["init.weights=x.pth", "init.head_epochs=200"], "init.head_epochs=200 is not below"),
        (["budget.epochs=3", "budget.steps=3"], "budget.epochs=3 and budget.steps=3 are both given"),
        (["budget.epochs=null"], "the run has no end"),
        (["model.arch=vit_tiny", "model.width=64"], "drop model.width=64"),
        (["model.width=64"], "model.depth, model.heads must be given too"),
        (["model.width=64", "model.depth=2", "model.heads=5"], "take 4 heads"),
        (["views.global_size=225"], "take 224 or 240, or another model.patch_size"),
        (["views.global_size=[224, 100]"], "take 96 or 112"),
        (["views.local_size=8"], "take 16, or"),
        (["model.patch_size=14"], "views.local_size=96 does not divide into patches of 14; take 84 or 98"),
        (["views.global_count=1", "views.local_count=0"], "one view makes no pair"),
        (["views.global_scale=[1, 0.4]"], "try [0.4, 1.0]"),
        (["views.local_scale=[0, 0]"], "must go from low to high"),
        (["photometry.blur_sigma=[2, 1]"], "try [1.0, 2.0]"),
        (["photometry.noise_std=[0.2, 0.1]"], "photometry.noise_std=[0.2, 0.1] must go from low to high"),
        (["photometry.noise_std=[1, 10]"], "photometry.noise_std"),
        (["data.channels=1"], "photometry.saturation=0 photometry.hue=0 photometry.grey=0"),
        (["data.mean=[0.5]"], "data.mean has 1 values for data.channels=3"),
        (["teacher.momentum_end=0.9"], "teacher.momentum=0.996 is above teacher.momentum_end=0.9"),
        (["run.keep_every=1500"], "is no multiple of run.checkpoint_every=1000"),
        (["loss.teacher_temp=0"], "loss.teacher_temp = 0 (command line): give a number above 0"),
        (["head.prototypes=1"], "a whole number of at least 2"),
        (["model.drop_path=1"], "of at least 0 and below 1"),
        (["optim.clip=null"], "optim.clip = null"),
        (["init.head_epochs=1"], "init.weights is needed"),
    ],
)
def test_contradictions_are_refused_with_a_way_out(overrides: list[str], message: str) -> None:
    assert message in refused(*overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["loss.teacher_temp=0.07", "loss.warmup_teacher_temp_epochs=30"],
        ["budget.steps=10"],
        ["budget.images=1e6"],
        ["model.width=64", "model.depth=2", "model.heads=4"],
        ["model.patch_size=14", "views.local_size=98"],
        ["views.local_count=0", "views.local_size=97"],
        ["views.global_size=[224, 192]"],
        ["views.global_count=1"],
        ["data={channels: 1, mean: [0.5], std: [0.2]}", "photometry={saturation: 0, hue: 0, grey: 0}"],
        ["run.precision=no"],
        ["optim.name=sgd", "optim.lr=0.3"],
        ["optim.warmup_epochs=0", "optim.freeze_last_layer_epochs=0", "budget.epochs=1"],
        ["init.weights=runs/other"],
        ["recipe=auto", "budget.epochs=5", "data.channels=13", "views.global_size=30"],
    ],
)
def test_what_makes_sense_is_accepted(overrides: list[str]) -> None:
    load(PretrainConfig, None, overrides)


def test_a_default_that_stands_in_for_a_mistake_is_not_blamed() -> None:
    text = refused("budget.epochs=5", "optim.warmup_epochs=two")
    assert text == "optim.warmup_epochs = two (command line): give a number of at least 0"


def test_accumulation_counts_for_the_rate() -> None:
    assert "at a global batch of 6400" in refused("optim.accumulate=100")


def test_recipe_auto_does_not_excuse_what_it_will_not_fill() -> None:
    assert "teacher_temp=0.3" in refused("recipe=auto", "loss.teacher_temp=0.3")
    assert "optim.lr=0.05" in refused("recipe=auto", "optim.lr=0.05")


def test_view_shapes() -> None:
    views = load(PretrainConfig, None, ["views.global_size=[224, 192]"]).views
    assert (views.global_shape, views.local_shape) == ((224, 192), (96, 96))


@pytest.mark.parametrize(("scaling", "factor"), [("linear", 4.0), ("sqrt", 2.0), ("none", 1.0)])
def test_scaled_lr(scaling: str, factor: float) -> None:
    assert scaled_lr(5e-4, 1024, scaling) == pytest.approx(5e-4 * factor)
    assert scaled_lr(5e-4, 256, scaling) == 5e-4


def test_a_run_is_planned_as_the_reference_does() -> None:
    plan = check_run(PretrainConfig(), images=1_281_167, world_size=8)
    assert (plan.global_batch, plan.steps_per_epoch, plan.total_steps) == (512, 2502, 250_200)
    assert (plan.warmup_steps, plan.freeze_steps, plan.head_steps) == (25_020, 2502, 0)
    assert plan.lr == pytest.approx(1e-3)
    assert plan.epochs == 100


@pytest.mark.parametrize(
    ("overrides", "total"),
    [(["budget.epochs=20"], 20 * 31), (["budget.steps=700"], 700), (["budget.images=44831"], 700)],
)
def test_every_unit_of_the_budget_ends_the_run(overrides: list[str], total: int) -> None:
    config = load(PretrainConfig, None, [*overrides, "optim.accumulate=4", "data.batch_size=16"])
    plan = check_run(config, images=2000, world_size=1)
    assert (plan.global_batch, plan.total_steps) == (64, total)


def test_accumulation_makes_the_same_plan_as_a_larger_batch() -> None:
    whole = load(PretrainConfig, None, ["data.batch_size=64"])
    parts = load(PretrainConfig, None, ["data.batch_size=16", "optim.accumulate=4"])
    assert check_run(whole, 1000, 2) == check_run(parts, 1000, 2)


@pytest.mark.parametrize(
    ("overrides", "run", "message"),
    [
        ([], {"images": 100, "world_size": 2}, "no step in an epoch: 100 images"),
        ([], {"images": 100, "world_size": 2}, "at most 50"),
        ([], {"images": 3, "world_size": 4}, "use fewer processes"),
        (["budget.steps=100"], {"images": 64_000, "world_size": 1}, "set optim.warmup_epochs=0.01"),
        (["budget.images=100"], {"images": 6400, "world_size": 2}, "below the global batch of 128"),
        (["optim.lr=5e-3"], {"images": 100_000, "world_size": 16}, "is 0.02 at a global batch of 1024"),
        (["optim.lr=2e-7", "optim.min_lr=0"], {"images": 6400, "world_size": 1}, "learns between"),
        (
            ["optim.lr=2e-6"],
            {"images": 6400, "world_size": 1},
            "optim.min_lr=1e-06 is above the rate of 5e-07",
        ),
    ],
)
def test_what_only_shows_with_the_data_is_refused(
    overrides: list[str], run: dict[str, Any], message: str
) -> None:
    config = load(PretrainConfig, None, overrides)
    with pytest.raises(ConfigError) as error:
        check_run(config, **run)
    assert message in str(error.value)


def test_config_is_light() -> None:
    code = "import sys, dino_vit.config.auto, dino_vit.config.display; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_only_what_leaves_the_result_alone_may_change_on_resume() -> None:
    free = {key for key, one in settings_of(PretrainConfig).items() if one.resumable}
    sections = {"data", "model", "optim", "run"}
    assert {key for key in free if key.split(".")[0] not in sections} == {"output"}
    assert {"data.workers", "data.batch_size", "optim.accumulate", "run.log_every"} < free
    assert not free & {
        "data.source",
        "data.mean",
        "model.drop_path",
        "optim.lr",
        "run.precision",
        "run.compile",
    }
