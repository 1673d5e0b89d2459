import re
import subprocess
import sys
from pathlib import Path

import pytest

from dino_vit.config.checks import scaled_lr
from dino_vit.config.display import to_yaml
from dino_vit.config.loading import load, replace
from dino_vit.config.pretrain import ALSO_KNOWN_AS, METHODS, PretrainConfig
from dino_vit.config.sections import Arch
from dino_vit.config.settings import ConfigError, given_keys, settings_of, values
from dino_vit.core.sizes import VIT_SIZES

CONFIGS = sorted((Path(__file__).parents[2] / "configs" / "pretrain").glob("*.yaml"))


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(PretrainConfig, None, overrides)
    return str(error.value)


def test_every_setting_is_documented_and_every_other_name_leads_to_one() -> None:
    names = " ".join(ALSO_KNOWN_AS.values()).split()
    assert set(ALSO_KNOWN_AS) <= set(settings_of(PretrainConfig))
    assert len(names) == len(set(names))
    assert not set(names) & set(settings_of(PretrainConfig))
    assert all(one.doc for one in settings_of(PretrainConfig).values())
    assert all(len(line) <= 132 for line in to_yaml(PretrainConfig()).splitlines())


def test_every_named_size_has_a_shape() -> None:
    assert set(VIT_SIZES) == set(Arch.__args__)  # type: ignore[attr-defined]
    assert PretrainConfig().model.shape == (384, 12, 6)
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
    names = ["cifar10", "cifar10_cpu", "resnet50", "vitb16", "vitl16_dinov2", "vitl16_dinov3"]
    names += ["vits14_dinov2", "vits16", "vits16_300", "vits16_distilled", "vits8"]
    assert [file.stem for file in CONFIGS] == names
    published = CONFIGS[names.index("vits16")]
    assert values(load(PretrainConfig, published)) == values(PretrainConfig(output="runs/vits16"))


def test_a_method_is_a_set_of_defaults_that_anything_given_replaces(tmp_path: Path) -> None:
    config = load(PretrainConfig, None, ["method=dinov2", "optim.layer_decay=0.8"])
    for key, value in METHODS["dinov2"].items():
        assert values(config)[key] == (0.8 if key == "optim.layer_decay" else value)
        assert values(PretrainConfig())[key] != value, "as in method=dino: superfluous"
    assert given_keys(config) == {"method", "optim.layer_decay"}
    changed = replace(config, {"seed": 1, "loss.koleo_weight": 0.0})
    assert (changed.loss.koleo_weight, changed.loss.patch_weight) == (0.0, 1.0)
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    assert values(load(PretrainConfig, file)) == values(config)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("head.shared=false", "is a head for masked patches, but loss.patch_weight=0 masks none"),
        ("masks.ratio=[0.5, 0.1]", "masks.ratio=[0.5, 0.1] must go from low to high; try [0.1, 0.5]"),
        ("masks.probability=0", "masks.probability=0 masks no view; use 0.5"),
        ("views.global_size=[16, 224]", "views.global_size=(16, 224) has one row of patches of 16"),
        ("masks.ratio=[0.001, 0.1]", "of 196 patches may mask none; start it at 0.01 or more"),
    ],
)
def test_masks_that_hide_nothing_are_refused(given: str, said: str) -> None:
    weight = "loss.patch_weight=" + ("0" if given == "head.shared=false" else "1")
    with pytest.raises(ConfigError, match=re.escape(said)):
        load(PretrainConfig, None, [given, weight])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["loss.teacher_temp=0.3"], "loss.teacher_temp=0.3 is not below loss.student_temp=0.1"),
        (["loss.teacher_temp=0.1"], "is not below loss.student_temp"),
        (["loss.student_temp=0.04"], "loss.warmup_teacher_temp=0.04 is not below"),
        (["loss.warmup_teacher_temp_epochs=30"], "raise loss.teacher_temp (0.07)"),
        (
            ["loss.teacher_temp=0.07", "loss.warmup_teacher_temp_epochs=100"],
            "is not shorter than the run (100 epochs)",
        ),
        (["optim.lr=0.05"], "optim.lr=0.05 is 0.0125 at a global batch of 64"),
        (["optim.accumulate=100"], "at a global batch of 6400"),
        (["recipe=auto", "loss.teacher_temp=0.3"], "teacher_temp=0.3"),
        (["recipe=auto", "optim.lr=0.05"], "optim.lr=0.05"),
        (["optim.lr=0.05", "optim.lr_scaling=none"], "adamw learns between"),
        (["optim.min_lr=1e-3"], "optim.min_lr=0.001 is above optim.lr"),
        (["optim.warmup_epochs=100"], "set optim.warmup_epochs=10.0, or a larger budget.epochs"),
        (["budget.epochs=5"], "set optim.warmup_epochs=0.5"),
        (["budget.epochs=1", "optim.warmup_epochs=0"], "set optim.freeze_last_layer_epochs=0.1"),
        (["init.weights=x.pth", "init.head_epochs=200"], "init.head_epochs=200 is not shorter"),
        (["budget.epochs=3", "budget.steps=3"], "budget.epochs=3 and budget.steps=3 are both given"),
        (["budget.epochs=null"], "the run has no length"),
        (
            ["run.eval_every=2", "run.eval_every_steps=5"],
            "run.eval_every=2.0 and run.eval_every_steps=5 are both",
        ),
        (["model.arch=vit_tiny", "model.width=64"], "remove model.width=64"),
        (["model.width=64"], "without model.arch, model.depth must be given too"),
        (["model.heads=4"], "without model.arch, model.width, model.depth must be given too"),
        (
            ["model.width=96", "model.depth=2"],
            "not a multiple of the 64 channels of a head; give model.heads",
        ),
        (["model.width=64", "model.depth=2", "model.heads=5"], "use 4 heads"),
        (
            ["views.global_size=225"],
            "not divisible by model.patch_size=16; use 224 or 240, or another patch size",
        ),
        (["views.global_size=[224, 100]"], "use 96 or 112"),
        (["views.local_size=8"], "use 16, or"),
        (
            ["model.patch_size=14"],
            "views.local_size=96 is not divisible by model.patch_size=14; use 84 or 98",
        ),
        (["views.global_count=1", "views.local_count=0"], "a single view has no other view"),
        (["views.global_scale=[1, 0.4]"], "try [0.4, 1.0]"),
        (
            ["views.local_scale=[0, 0]"],
            "views.local_scale = [0, 0] (command line): must be a list of 2, each",
        ),
        (["photometry.blur_sigma=[2, 1]"], "try [1.0, 2.0]"),
        (["photometry.noise_std=[0.2, 0.1]"], "photometry.noise_std=[0.2, 0.1] must go from low to high"),
        (["photometry.noise_std=[1, 10]"], "photometry.noise_std"),
        (["data.channels=1"], "photometry.saturation=0 photometry.hue=0 photometry.grey=0"),
        (
            ["data.mean=[0.5]"],
            "data.mean=[0.5] does not fit data.channels=3; give one value per channel, or data.mean=null",
        ),
        (
            ["model.width=65536", "model.depth=1000"],
            "model.width=65536 and model.depth=1000 make 5.2e+13 parameters; lower them to below 1e+11",
        ),
        (["head.prototypes=16777216", "head.bottleneck_dim=65536"], "make 1.1e+12 parameters"),
        (["teacher.momentum_end=0.9"], "teacher.momentum=0.996 is above teacher.momentum_end=0.9"),
        (["run.keep_every=1500"], "is not a multiple of run.checkpoint_every=1000"),
        (["loss.teacher_temp=0"], "loss.teacher_temp = 0 (command line): must be a number above 0"),
        (["head.prototypes=1"], "a whole number from 2 to 16,777,216"),
        (
            ["head.prototypes=1e30"],
            "head.prototypes = 1.0e+30 (command line): must be a whole number from 2 to",
        ),
        (["model.width=9223372036854775807", "model.depth=2"], "model.width = 9223372036854775807 (command"),
        (["data.batch_size=1e4"], "at a global batch of 10000 (lr_scaling=linear); adamw"),
        (["optim.accumulate=1e4"], "the recipe's lr is 0.0005 (optim.accumulate: command line)"),
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
        ["model.width=128", "model.depth=4"],
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
    assert text == "optim.warmup_epochs = two (command line): must be a number from 0 to 1e+09"


def test_a_huge_network_has_patches_of_14_unless_told_otherwise() -> None:
    sizes = ["views.global_size=224", "views.local_size=98"]
    assert load(PretrainConfig, None, ["model.arch=vit_huge", *sizes]).model.patch_size == 14
    config = load(PretrainConfig, None, ["model.arch=vit_huge", "model.patch_size=16"])
    assert replace(config, {"optim.clip": 1.0}).model.patch_size == 16


def test_view_shapes() -> None:
    views = load(PretrainConfig, None, ["views.global_size=[224, 192]"]).views
    assert (views.global_shape, views.local_shape) == ((224, 192), (96, 96))


@pytest.mark.parametrize(("scaling", "factor"), [("linear", 4.0), ("sqrt", 2.0), ("none", 1.0)])
def test_scaled_lr(scaling: str, factor: float) -> None:
    assert scaled_lr(5e-4, 1024, scaling) == pytest.approx(5e-4 * factor)
    assert scaled_lr(5e-4, 256, scaling) == 5e-4


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
