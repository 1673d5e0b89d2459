"""What is in the folder of a run before it starts is not lost."""

import os
import re
import shlex
from pathlib import Path

import pytest

from dino_vit.cli import main
from dino_vit.training.resume import set_earlier_run_aside
from tests.support.images import write_synthetic
from tests.support.runs import arguments, command_here, steps
from tests.support.training import trained

FEW = {"budget.steps": 2, "optim.warmup_epochs": 0, "optim.freeze_last_layer_epochs": 0}
FEW |= {"compute.checkpoint_every": 1}
OTHERS = {
    "config.yaml": "seed: 7  # written by hand\n",
    "metrics.jsonl": '{"step": 400}\n',
    "starts.jsonl": "{}\n",
    "baseline.json": "{}",
    "unreadable.txt": "a.png: broken\n",
    "notes.txt": "of a user",
}


@pytest.fixture
def folder(tmp_path):
    for name, text in OTHERS.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_records_without_checkpoints_are_set_aside(folder, caplog):
    """Of a run that ended before its first checkpoint, or whose checkpoints were moved away."""
    (folder / "earlier-1").mkdir()
    assert main(arguments(folder, FEW)) == 0
    assert "has no checkpoint to resume from: moved config.yaml, starts.jsonl, metrics.jsonl" in caplog.text
    notes = OTHERS["notes.txt"]
    assert (folder / "notes.txt").read_text() == notes
    aside = {path.name: path.read_text() for path in (folder / "earlier-2").iterdir()}
    assert aside | {"notes.txt": notes} == OTHERS
    assert "seed: 0" in (folder / "config.yaml").read_text()
    assert main(arguments(folder, FEW)) == 0, "resumes"
    assert not (folder / "earlier-3").exists()


def test_a_mistake_moves_nothing(folder, capsys):
    assert main(arguments(folder, {**FEW, "data.source": "nowhere"})) == 2
    assert {path.name: path.read_text() for path in folder.iterdir() if path.name in OTHERS} == OTHERS
    assert not (folder / "earlier-1").exists()


def test_the_same_run_that_logged_nothing_starts_again(tmp_path):
    for name in ("config.yaml", "starts.jsonl"):
        (tmp_path / name).write_text("seed: 0\n")
    set_earlier_run_aside(tmp_path, b"seed: 0\n")
    assert not (tmp_path / "earlier-1").exists()
    set_earlier_run_aside(tmp_path, b"seed: 1\n")
    assert (tmp_path / "earlier-1" / "config.yaml").exists()


def test_what_was_kept_stays_without_the_setting(tmp_path):
    trained(tmp_path, {**FEW, "budget.steps": 4, "compute.keep_every": 2, "compute.checkpoint_every": 3})
    changed = {**FEW, "compute.resume": "changed"}
    trained(tmp_path, {**changed, "budget.steps": 6})
    trained(tmp_path, {**changed, "budget.steps": 8})
    assert steps(tmp_path) == [2, 4, 7, 8]


def test_without_labels_a_run_ends_with_commands_that_work(tmp_path, monkeypatch):
    """The one for labels too, once a few are written down."""
    monkeypatch.chdir(tmp_path)
    for number in range(20):
        write_synthetic(tmp_path / "photos" / f"{number}.png", number)
    said = command_here(*arguments(tmp_path / "run", {**FEW, "data.source": tmp_path / "photos"}))
    commands = [shlex.split(command) for command in re.findall("`dino-vit ([^`]*)`", said.splitlines()[-1])]
    assert [command[0] for command in commands] == ["report", "label", "predict"]
    rows = [f"{number}.png,{number % 2}" for number in range(8)]
    (tmp_path / "few.csv").write_text("\n".join(["name,label", *rows]))
    assert "12 of 20 labels guessed" in command_here(*commands[2])
    assert "20 of 20 images" in command_here(*commands[1])


def test_the_folder_of_the_images_is_not_that_of_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_synthetic(Path("photos/0.png"), 0)
    assert main(["pretrain", "photos", "photos"]) == 2
    assert "output=photos is the source of the images; give a folder of its own" in capsys.readouterr().err
    assert [*tmp_path.rglob("*.*")] == [tmp_path / "photos/0.png"]


def test_a_run_deletes_no_features_of_other_commands(tmp_path, monkeypatch):
    monkeypatch.setenv("DINO_VIT_CACHE", str(tmp_path / "cache"))
    features = tmp_path / "cache" / "features" / f"{0:015x}.safetensors"
    features.parent.mkdir(parents=True)
    features.write_bytes(b"0" * 100)
    left = tmp_path / "copies" / f"1-{0:024x}.0123abcd.partial"  # of a copy that was not finished
    left.parent.mkdir()
    left.touch()
    os.utime(left, (0, 0))
    settings = {"budget.steps": 1, "optim.warmup_epochs": 0, "optim.freeze_last_layer_epochs": 0}
    settings |= {"data.cache": tmp_path / "copies", "data.cache_gb": 1e-9}
    assert main(arguments(tmp_path / "run", settings)) == 0
    assert features.exists()
    assert not left.exists()
