"""Modules that a file names are not imported, unless the user says that the file is trusted."""

from pathlib import Path

import pytest

from dino_vit.cli import main
from tests.support import embeddings as sample
from tests.support.runs import arguments

MODULE = """
from pathlib import Path

import torch

Path({marker!r}).touch()


class Photos(list):
    def __init__(self):
        super().__init__([torch.zeros(3, 16, 16, dtype=torch.uint8)] * 40)


def unchanged(views):
    return views
"""


@pytest.fixture
def marker(tmp_path, monkeypatch):
    """Return the file that the module of a stranger writes when it is imported."""
    name = f"stranger_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MODULE.format(marker=str(tmp_path / "imported")))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "imported"


def module(marker: Path) -> str:
    return f"python:stranger_{marker.parent.name}"


def embedded(marker):
    stated = {**sample.METADATA["source"], "spec": f"{module(marker)}:Photos"}
    sample.write(Path("e.parquet"), {**sample.METADATA, "source": stated})


def test_duplicates_draws_no_images_of_a_module_unless_it_is_trusted(marker, caplog):
    embedded(marker)
    assert main(["duplicates", "e.parquet", "threshold=0.5"]) == 0
    assert (
        "which runs the code of a module when it is imported; if you trust it, give trust=true" in caplog.text
    )
    assert not marker.exists()
    assert main(["duplicates", "e.parquet", "threshold=0.5", "trust=true"]) == 0
    assert marker.exists()


@pytest.mark.parametrize("key", ["data.source", "augment.module"])
def test_a_report_imports_no_module_of_the_run_unless_it_is_trusted(marker, key):
    assert main(arguments(Path("run"), {"budget.steps": 9, "run.eval_every": "null"})) == 0
    path, name = (
        Path("run/config.yaml"),
        f"{module(marker)}:{'Photos' if key == 'data.source' else 'unchanged'}",
    )
    last = key.partition(".")[2]
    lines = path.read_text().splitlines()
    lines = [f"  {last}: {name}" if line.strip().startswith(f"{last}:") else line for line in lines]
    path.write_text("\n".join(lines))
    assert main(["report", "run", "images=10"]) == 0
    assert not marker.exists()
    assert "if you trust it, give trust=true" in Path("run/report.html").read_text()
    assert main(["report", "run", "images=10", "trust=true"]) == 0
    assert marker.exists()


def test_an_embedding_file_does_not_choose_what_torch_is_asked_for(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sample.write(Path("e.parquet"), {**sample.METADATA, "precision": "load"})
    Path("a.png").write_bytes(b"")
    assert main(["search", "e.parquet", "a.png"]) == 2
    assert "Traceback" not in capsys.readouterr().err
