from pathlib import Path

import pytest

from dino_vit.config.loading import load, to_yaml
from dino_vit.config.pretrain import METHODS, PretrainConfig, scaled_lr
from dino_vit.config.sections import Arch
from dino_vit.config.settings import ConfigError, settings_of, values
from dino_vit.core import VIT_SIZES

CONFIGS = sorted((Path(__file__).parents[2] / "configs" / "pretrain").glob("*.yaml"))


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(PretrainConfig, None, overrides)
    return str(error.value)


def test_every_setting_is_documented() -> None:
    assert all(info.meaning for info in settings_of(PretrainConfig).values())
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
    names = ["cifar10", "cifar10_cpu", "resnet50", "vitb16", "vitb16_dinov3", "vitl16_dinov2"]
    names += ["vitl16_dinov3", "vits14_dinov2", "vits16", "vits16_300", "vits16_dinov3"]
    names += ["vits16_distilled", "vits8"]
    assert [file.stem for file in CONFIGS] == names
    published = CONFIGS[names.index("vits16")]
    assert values(load(PretrainConfig, published)) == values(PretrainConfig(output="runs/vits16"))


def test_a_method_is_a_set_of_defaults_that_anything_given_replaces(tmp_path: Path) -> None:
    config = load(PretrainConfig, None, ["method=dinov2", "optim.layer_decay=0.8"])
    for key, value in METHODS["dinov2"].items():
        assert values(config)[key] == (0.8 if key == "optim.layer_decay" else value)
        assert values(PretrainConfig())[key] != value, "as in method=dino: superfluous"
    assert config.given == {"method", "optim.layer_decay"}
    changed = load(PretrainConfig, config, {"seed": 1, "loss.koleo_weight": 0.0})
    assert (changed.loss.koleo_weight, changed.loss.patch_weight) == (0.0, 1.0)
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    assert values(load(PretrainConfig, file)) == values(config)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["loss.teacher_temp=0.1"], "loss.teacher_temp=0.1 is not below the student's 0.1"),
        (["head.shared=false"], "head.shared has no effect without loss.patch_weight"),
        (["model.resnet_width=32"], "model.resnet_width has no effect without model.stem=hybrid"),
        (["views.global_size=[16, 224]", "loss.patch_weight=1"], "has 1 x 14 patches, too few for masks"),
        (["loss.patch_weight=1", "model.patch_drop=0.5"], "needs all patches; set model.patch_drop=0"),
        (
            ["views.local_size=224", "model.patch_drop=0.5"],
            "about global views, which have another size than views.local_size=224",
        ),
        (["loss.warmup_teacher_temp_epochs=30"], "raise loss.teacher_temp (0.07)"),
        (
            ["budget.epochs=3", "budget.steps=3"],
            "budget.epochs=3 and budget.steps=3 exclude each other; give one of them",
        ),
        (["budget.epochs=null"], "the run has no length"),
        (["budget.epochs=null", "recipe=auto"], "the run has no length"),
        (["model.arch=vit_smal"], "model.arch = vit_smal: did you mean vit_small?"),
        (["model.arch=resnet50"], "must be one of vit_tiny, vit_small, vit_base, vit_large, vit_huge, timm:"),
        (["model.arch=vit_tiny", "model.width=64"], "model.arch=vit_tiny and model.width=64 exclude"),
        (["model.width=64"], "give model.width and model.depth, or model.arch"),
        (["model.width=96", "model.depth=2"], "is not a multiple of the 64 channels of a head"),
        (["views.global_size=[224, 100]"], "not divisible by model.patch_size=16; use a multiple of it"),
        (["views.global_count=1", "views.local_count=0"], "DINO needs at least two views per image"),
        (["views.global_scale=[1, 0.4]"], "try [0.4, 1.0]"),
        (["views.local_scale=[1e-6, 0.4]"], "must be greater than or equal to 0.001"),
        (["teacher.momentum=1"], "must be less than 1"),
        (["compute.eval_every=0"], "must be above 0 (epochs between evaluations; null: never)"),
        (["optim.clip=1e-9"], "must be greater than or equal to 0.001"),
        (["augment.blur_sigma=[0.1, 1e6]"], "must be less than or equal to 1000"),
        (["compute.peer_timeout=1e-9"], "must be greater than or equal to 0.01"),
        (["compute.peer_timeout=1e9"], "must be less than or equal to 1000000"),
        (["augment.rotation=-10"], "must be greater than or equal to 0"),
        (["augment.rotation=200"], "must be less than or equal to 180"),
        (["augment.blur_sigma=[2, 1]"], "try [1.0, 2.0]"),
        (["augment.module=object:mine", "augment.flip=0"], "takes the place of augment.flip; remove"),
        (["data.channels=1"], "augment.saturation=0 augment.hue=0 augment.grey=0"),
        (["data.mean=[0.5]"], "data.mean=[0.5] does not fit data.channels=3; give one value per channel, or"),
        (["init.head_epochs=1"], "init.weights is missing"),
    ],
)
def test_contradictions_are_refused_with_a_way_out(overrides: list[str], message: str) -> None:
    assert message in refused(*overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["loss.teacher_temp=0.07", "loss.warmup_teacher_temp_epochs=30"],
        ["budget.steps=10"],
        ["model.width=64", "model.depth=2", "model.heads=4"],
        ["model.width=128", "model.depth=4"],
        ["model.patch_size=14", "views.local_size=98"],
        ["views.local_count=0", "views.local_size=97"],
        ["views.global_size=[224, 192]"],
        ["views.global_count=1"],
        ["data={channels: 1, mean: [0.5], std: [0.2]}", "augment={saturation: 0, hue: 0, grey: 0}"],
        ["compute.precision=no"],
        ["optim.name=sgd", "optim.lr=0.3"],
        ["optim.warmup_epochs=0", "optim.freeze_last_layer_epochs=0", "budget.epochs=1"],
        ["init.weights=runs/other"],
        ["recipe=auto", "budget.epochs=5", "data.channels=13", "views.global_size=30"],
        ["recipe=auto", "loss.patch_weight=1", "views.global_size=32"],
    ],
)
def test_what_makes_sense_is_accepted(overrides: list[str]) -> None:
    load(PretrainConfig, None, overrides)


@pytest.mark.parametrize("name", ["vitl16_dinov2", "vits14_dinov2", "vitl16_dinov3"])
def test_recipes_of_dinov2_are_those_of_its_running_code(name: str) -> None:
    """Beside its paper: probabilities of the blur are inverted, norms of prototypes learned."""
    config = load(PretrainConfig, next(file for file in CONFIGS if file.stem == name))
    assert config.augment.blur == (0.0, 0.9, 0.5)
    assert not config.head.norm_last_layer
    assert scaled_lr(config.optim.lr, 2048, config.optim.lr_scaling) == pytest.approx(4e-3 * 2**0.5)
    if name == "vitl16_dinov3":
        assert (config.model.positions, config.model.rotary_rescale) == ("rotary", None)
        assert config.model.key_bias  # `mask_k_bias: false`
        assert (config.loss.centering, config.head.shared) == ("sinkhorn", False)


@pytest.mark.parametrize(("name", "processes"), [("vits16_dinov3", 8), ("vitb16_dinov3", 16)])
def test_the_small_recipes_of_dinov3_are_its_vit_l_but_for_what_is_scaled(name: str, processes: int) -> None:
    configs = {file.stem: load(PretrainConfig, file) for file in CONFIGS}
    small, published = values(configs[name]), values(configs["vitl16_dinov3"])
    changed = {key for key in small if small[key] != published[key]}
    backbone = {"model.registers", "model.rotary_rescale", "model.key_bias"}  # as released
    scaled = {"model.arch", "model.drop_path", "data.batch_size"}
    scaled |= {"optim.warmup_epochs", "optim.freeze_last_layer_epochs", "loss.warmup_teacher_temp_epochs"}
    assert changed - {"output", "budget.steps", "budget.epochs", "compute.keep_every"} <= backbone | scaled
    assert small["data.batch_size"] * processes == 1024, "an epoch of ImageNet is 1,250 steps, as theirs"
    model = configs[name].model
    assert (model.registers, model.rotary_rescale, model.key_bias) == (4, 2.0, None)
    rate = scaled_lr(configs[name].optim.lr, 1024, configs[name].optim.lr_scaling)
    assert rate == pytest.approx(4e-3)


def test_a_default_that_stands_in_for_a_mistake_is_not_blamed() -> None:
    text = refused("budget.epochs=5", "optim.warmup_epochs=two")
    assert text == "optim.warmup_epochs = two: must be a valid number"


def test_a_huge_network_has_patches_of_14_unless_told_otherwise() -> None:
    sizes = ["views.global_size=224", "views.local_size=98"]
    assert load(PretrainConfig, None, ["model.arch=vit_huge", *sizes]).model.patch_size == 14
    config = load(PretrainConfig, None, ["model.arch=vit_huge", "model.patch_size=16"])
    assert load(PretrainConfig, config, {"optim.clip": 1.0}).model.patch_size == 16
