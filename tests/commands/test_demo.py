"""The demo on a small scale: what it writes, what it reuses, and that its settings are in the package."""

import json
import shlex

import pytest

from dino_vit.cli import build_parser, main
from dino_vit.commands import COMMANDS, demo
from dino_vit.config.commands import DemoConfig
from dino_vit.config.loading import config_from, load, parse_arguments
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.reports.metrics import METRICS, read_records
from dino_vit.weights import load_backbone
from tests.support.runs import arguments


@pytest.fixture
def small(monkeypatch):
    """Have the demo run the tests' own settings, which take a second."""

    def recipe(config, name):
        settings = {"data.source": "synthetic:120:32", "run.eval_every": 1, "optim.warmup_epochs": 0.1}
        settings |= {"optim.freeze_last_layer_epochs": 0, "seed": config.seed}
        if name == "scenes":
            settings |= {
                "data.source": "synthetic:scenes:64:32",
                "run.eval_every": "null",
                "loss.patch_weight": 1,
            }
        output = config.output if name == "textures" else f"{config.output}/{name}"
        return load(PretrainConfig, None, arguments(output, settings)[1:])

    monkeypatch.setattr(demo, "recipe", recipe)
    monkeypatch.setattr(demo, "PICTURES", "synthetic:scenes:5:64")


def test_the_demo_shows_what_it_learned_and_resumes(tmp_path, small, capsys):
    command = ["demo", f"output={tmp_path / 'a run'}", "seed=5"]
    assert main(command) == 0
    output = capsys.readouterr().out
    knn = read_records(tmp_path / "a run" / "metrics.jsonl", METRICS)[-1].knn
    baseline = json.loads((tmp_path / "a run" / "baseline.json").read_text())
    for network, percent in (
        ("untrained", baseline["knn"]),
        ("trained", knn),
        ("raw pixels", baseline["raw_pixels"]),
    ):
        assert f" {network} {percent:.1f} %" in output
    assert str(tmp_path / "a run" / "report.html") in output
    assert len(list((tmp_path / "a run" / "attention").glob("sheet-*.png"))) == 1
    assert load_backbone(tmp_path / "a run" / "scenes").mask_token is not None  # it has learned of patches
    assert main(command) == 0
    assert capsys.readouterr().out == output
    assert main([*command, "--quick"]) == 0  # beside the others
    assert str(tmp_path / "a run" / "quick" / "report.html") in capsys.readouterr().out
    printed = [shlex.split(line, comments=True)[1:] for line in output.splitlines()[-3:]]
    linear, attention, pretrain = (
        config_from(parse_arguments(build_parser(argv), argv), COMMANDS[argv[0]].config_class)
        for argv in printed
    )
    assert linear.weights == str(tmp_path / "a run")
    assert attention.weights == str(tmp_path / "a run" / "scenes")
    assert pretrain.budget.minutes == 10


def test_the_recipes_come_with_the_package():
    config = demo.recipe(DemoConfig(output="elsewhere", seed=3), "textures")
    assert (config.output, config.seed, config.data.source) == ("elsewhere", 3, "synthetic")
    assert config.run.eval_every is not None
    scenes = demo.recipe(DemoConfig(output="elsewhere", seed=3), "scenes")
    assert (scenes.output, scenes.seed, scenes.loss.patch_weight) == ("elsewhere/scenes", 3, 1)
    quick = demo.recipe(DemoConfig(output="elsewhere"), "quick")
    assert (quick.output, quick.budget.minutes, quick.model) == ("elsewhere/quick", None, config.model)
    for name in ("textures", "scenes", "quick"):
        assert demo.recipe(DemoConfig(steps=777), name).budget.steps == 777


def test_without_native_bf16_it_is_bounded_in_time(monkeypatch):
    monkeypatch.setattr(demo, "choose_precision", lambda *_: "no")
    budget = demo.recipe(DemoConfig(), "textures").budget
    assert (budget.steps, budget.minutes) == (None, 2.5)
    assert demo.recipe(DemoConfig(steps=777), "textures").budget.steps == 777
