"""What is deleted of a cache that is too large, and what stays."""

import gc
import os
import time
from contextlib import suppress

import pytest
import torch

from dino_vit.core.cache import STALE_S, _delete, bound, keep
from dino_vit.core.storage import StorageError, read_tensors, replacing, write_tensors

NAMES = [f"{number:015x}.safetensors" for number in range(5)]


class Owner:
    """What has a file in use."""


@pytest.fixture
def folder(tmp_path):
    """Five files of 100 bytes, the first was used longest ago."""
    for number, name in enumerate(NAMES):
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, (number + 1, number + 1))
    return tmp_path


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_was_used_longest_ago_goes_first_until_the_rest_fits(folder, caplog):
    caplog.set_level("INFO")
    bound([folder], 500e-9)
    assert names(folder) == NAMES
    assert not caplog.text
    bound([folder], 350e-9)
    assert names(folder) == NAMES[2:]
    assert f"2 files that had not been used for longest (2e-07 GB) are deleted from {folder}" in caplog.text


def test_files_of_several_folders_fit_together_and_others_are_not_touched(folder):
    other = folder / "indexes"
    for name in (f"tar-{0:024x}.arrow", "catalogue.arrow", "weights.safetensors", f"{0:015x}.pth", ".hidden"):
        other.mkdir(exist_ok=True)
        (other / name).write_bytes(bytes(100))
        os.utime(other / name, (0, 0))
    bound([folder, other, folder / "none"], 300e-9)
    assert names(other) == sorted(["catalogue.arrow", "weights.safetensors", f"{0:015x}.pth", ".hidden"])
    assert [name for name in names(folder) if name != "indexes"] == NAMES[2:]
    bound([folder, other], 0)
    assert len(names(other)) == 4


def test_a_file_in_use_stays_and_one_that_was_used_lately_goes_last(folder):
    owner, earlier = Owner(), Owner()
    keep(folder / NAMES[0], owner)
    keep(folder / NAMES[1], earlier)
    del earlier
    gc.collect()
    bound([folder], 200e-9, spared=folder / NAMES[2])
    assert names(folder) == [NAMES[0], NAMES[2]], "the second was used later, but is more than fits"
    del owner
    gc.collect()
    bound([folder], 0)
    assert names(folder) == []


def test_a_file_that_cannot_be_locked_or_is_not_there_ends_nothing(folder, monkeypatch):
    keep(folder / "none.safetensors", Owner())

    def refused(*_):
        raise OSError("no locks here")

    monkeypatch.setattr("fcntl.flock", refused)
    keep(folder / NAMES[0], Owner())
    bound([folder], 0)
    assert names(folder) == NAMES


def test_what_a_killed_process_left_goes_when_nobody_can_be_writing_it(folder):
    old = time.time() - STALE_S - 60
    left = [f".{NAMES[0]}.12345.partial", f".folder-{0:024x}.arrow.12345.partial", f"3-{0:024x}.partial"]
    others = [".mine.12345.partial", "download.partial"]
    for name in (*left, *others):
        (folder / name).touch()
    bound([folder], 1)
    assert {*left, *others} <= {*names(folder)}, "another process or host may be writing them"
    for name in (*left, *others):
        os.utime(folder / name, (old, old))
    bound([folder], 1)
    assert names(folder) == sorted([*NAMES, *others])
    with suppress(StorageError), replacing(folder / NAMES[0]) as partial:
        partial.touch()
        os.utime(partial, (old, old))
        bound([folder], 1)
        assert not partial.exists(), "such is the name of one"


def test_features_in_memory_survive_their_file(tmp_path):
    """They are mapped from it, and a user may delete a cache at any time."""
    path = tmp_path / NAMES[0]
    write_tensors(path, {"values": torch.arange(1e6)}, "")
    values = read_tensors(path)[0]["values"].numpy()
    keep(path, values)
    values = torch.from_numpy(values[10:])
    gc.collect()
    assert not _delete(path), "as long as its values are used"
    path.unlink()
    assert torch.equal(values, torch.arange(1e6)[10:])
