"""The programs in eval/, launched as users launch them, on a checkpoint of the loop."""

import json
import runpy
import sys

import pytest

from tests.support.documents import ROOT
from tests.support.runs import command_here, program


def test_two_processes_judge_a_run_as_the_command_does(trained):
    """Leave-one-out, where a share of the queries must know which rows of the bank they are."""
    settings = ["synthetic:61:32", f"weights={trained}", "precision=no", "k=[5]"]
    said = program("knn", *settings, processes=2)
    (path,) = (trained / "eval").glob("step-00000005.knn-synthetic-61-32-*.json")
    assert said.splitlines()[-1] == str(path)
    two = json.loads(path.read_text())
    assert (two["weights"]["step"], two["weights"]["network"], two["images"]) == (5, "teacher", 61)
    command_here("knn", *settings)
    assert list((trained / "eval").iterdir()) == [path]
    assert json.loads(path.read_text()) | {"written": two["written"]} == two


@pytest.mark.parametrize("name", ["attention", "embed", "linear"])
def test_programs_are_their_commands(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(ROOT / f"eval/{name}.py"), run_name="__main__")
    assert capsys.readouterr().out.startswith(f"usage: dino-vit {name} ")
