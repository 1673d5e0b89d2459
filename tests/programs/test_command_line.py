"""The programs as a user starts them."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parents[2] / "eval"
PROTOCOLS = ["copydays", "davis", "dino2021", "finetune", "imagenet_c", "oxford_paris"]


@pytest.mark.parametrize("name", PROTOCOLS)
def test_the_help_has_protocol_figures_and_settings(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(PROGRAMS / f"{name}.py"), run_name="__main__")
    shown = capsys.readouterr().out
    assert "Published" in shown
    assert "weights=..." in shown


def test_mistakes_are_a_sentence_and_exit_code_2():
    command = [sys.executable, PROGRAMS / "davis.py", "nowhere", "weigths=x"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("davis.py: ")
    assert "did you mean weights?" in done.stderr
