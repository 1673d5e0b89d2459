"""The programs as a user starts them."""

import runpy
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parents[2] / "eval"
PROTOCOLS = ["copydays", "davis", "dense", "dino2021", "finetune", "linear_grid", "oxford_paris"]


@pytest.fixture
def started(monkeypatch, capsys):
    """Return a function that starts a program, checks its exit code and returns what it printed."""

    def start(name, *arguments, code):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        with pytest.raises(SystemExit, match=str(code)):
            runpy.run_path(str(PROGRAMS / f"{name}.py"), run_name="__main__")
        return capsys.readouterr()

    return start


@pytest.mark.parametrize("name", PROTOCOLS)
def test_the_help_has_protocol_figures_and_settings(name, started):
    shown = started(name, "--help", code=0).out
    assert "Published" in shown
    assert "weights=..." in shown


def test_programs_are_their_commands(started):
    assert started("knn", "--help", code=0).out.startswith("usage: dino-vit knn ")


def test_mistakes_are_a_sentence_and_exit_code_2(started):
    said = started("davis", "nowhere", "weigths=x", code=2).err
    assert said.startswith("davis.py: ")
    assert "did you mean weights?" in said
