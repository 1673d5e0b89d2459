"""The programs as a user starts them."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parents[2] / "eval"
PROTOCOLS = ["copydays", "davis", "imagenet_c", "oxford_paris"]


def start(name, *arguments):
    command = [sys.executable, PROGRAMS / f"{name}.py", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True)


@pytest.mark.parametrize("name", PROTOCOLS)
def test_the_help_has_protocol_figures_and_settings(name):
    shown = start(name, "--help").stdout
    assert "Published" in shown
    assert "weights=..." in shown


def test_mistakes_are_a_sentence_and_exit_code_2():
    done = start("davis", "nowhere", "weigths=x")
    assert done.returncode == 2
    assert done.stderr.startswith("davis.py: ")
    assert "did you mean weights?" in done.stderr
