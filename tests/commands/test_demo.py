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
from tests.support.runs import arguments


@pytest.fixture
def small(monkeypatch):
    """Have the demo run the tests' own settings, which take a second."""

    def recipe(config):
        settings = {"data.source": "synthetic:120:32", "compute.eval_every": 1, "optim.warmup_epochs": 0.1}
        settings |= {"optim.freeze_last_layer_epochs": 0, "seed": config.seed}
        output = f"{config.output}/quick" if config.quick else config.output
        return load(PretrainConfig, None, arguments(output, settings)[1:])

    monkeypatch.setattr(demo, "recipe", recipe)


def test_the_demo_shows_what_it_learned_and_resumes(tmp_path, small, capsys):
    command = ["demo", f"output={tmp_path / 'a run'}", "seed=5"]
    assert main(command) == 0
    output = capsys.readouterr().out
    knn = read_records(tmp_path / "a run" / "metrics.jsonl", METRICS)[-1].knn
    baseline = json.loads((tmp_path / "a run" / "baseline.json").read_text())
    for network, percent in (
        ("untrained", baseline["knn"]),
        ("trained", knn),
        ("pixels", baseline["pixels"]),
    ):
        assert f" {network} {percent:.1f} %" in output
    assert str(tmp_path / "a run" / "report.html") in output
    assert main(command) == 0
    assert capsys.readouterr().out == output
    assert main([*command, "--quick"]) == 0  # in a folder of its own
    assert str(tmp_path / "a run" / "quick" / "report.html") in capsys.readouterr().out
    printed = [shlex.split(line, comments=True)[1:] for line in output.splitlines()[-3:]]
    linear, pretrain, label = (
        config_from(parse_arguments(build_parser(argv), argv), COMMANDS[argv[0]].config_class)
        for argv in printed
    )
    assert linear.weights == str(tmp_path / "a run")
    assert pretrain.budget.minutes == 10
    assert (label.source, label.weights) == (pretrain.data.source, pretrain.output)


def test_the_recipes_come_with_the_package():
    config = demo.recipe(DemoConfig(output="elsewhere", seed=3))
    assert (config.output, config.seed, config.data.source) == ("elsewhere", 3, "synthetic")
    assert config.compute.eval_every is not None
    quick = demo.recipe(DemoConfig(output="elsewhere", quick=True))
    assert (quick.output, quick.budget.minutes, quick.model) == ("elsewhere/quick", None, config.model)
    for is_quick in (False, True):
        assert demo.recipe(DemoConfig(steps=777, quick=is_quick)).budget.steps == 777


def test_without_native_bf16_it_is_bounded_in_time(monkeypatch):
    monkeypatch.setattr(demo, "choose_precision", lambda *_: "no")
    budget = demo.recipe(DemoConfig()).budget
    assert (budget.steps, budget.minutes) == (None, 2.5)
    assert demo.recipe(DemoConfig(steps=777)).budget.steps == 777
