"""What is deleted of a cache that is too large, and what stays."""

import os
import time
from contextlib import suppress

import pytest

from dino_vit.core.cache import STALE_S, bound_caches, note_use
from dino_vit.core.storage import StorageError, replacing

NAMES = [f"{number:015x}.safetensors" for number in range(5)]


@pytest.fixture
def indexes(tmp_path, monkeypatch):
    """The folder of indexes, which is not there yet."""
    monkeypatch.setenv("DINO_VIT_CACHE", str(tmp_path / "indexes"))
    return tmp_path / "indexes"


@pytest.fixture
def folder(tmp_path, indexes):
    """Five files of 100 bytes, the first was used longest ago."""
    (tmp_path / "features").mkdir()
    for number, name in enumerate(NAMES):
        (tmp_path / "features" / name).write_bytes(bytes(100))
        os.utime(tmp_path / "features" / name, (number + 1, number + 1))
    return tmp_path / "features"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_was_used_longest_ago_goes_first_until_the_rest_fits(folder, indexes, caplog):
    caplog.set_level("INFO")
    bound_caches(500e-9, folder)
    assert names(folder) == NAMES
    assert not caplog.text
    bound_caches(350e-9, folder)
    assert names(folder) == NAMES[2:]
    assert f"2 files that had not been used for longest (2e-07 GB) are deleted from {indexes}" in caplog.text


def test_files_of_both_folders_fit_together_and_others_are_not_touched(folder, indexes):
    for name in (f"tar-{0:024x}.arrow", "catalogue.arrow", "weights.safetensors", f"{0:015x}.pth", ".hidden"):
        indexes.mkdir(exist_ok=True)
        (indexes / name).write_bytes(bytes(100))
        os.utime(indexes / name, (0, 0))
    bound_caches(300e-9, folder)
    assert names(indexes) == sorted(["catalogue.arrow", "weights.safetensors", f"{0:015x}.pth", ".hidden"])
    assert names(folder) == NAMES[2:]
    bound_caches(0, folder)
    assert len(names(indexes)) == 4


def test_one_that_was_used_lately_goes_last_and_the_new_one_stays(folder):
    note_use(folder / NAMES[0])
    note_use(folder / "none.safetensors")
    bound_caches(200e-9, folder, spared=folder / NAMES[2])
    assert names(folder) == [NAMES[0], NAMES[2]]


def test_what_a_killed_process_left_goes_when_nobody_can_be_writing_it(folder):
    old = time.time() - STALE_S - 60
    left = [
        f".{NAMES[0]}.12345.partial",
        f".folder-{0:024x}.arrow.12345.partial",
        f"3-{0:024x}.0123abcd.partial",
    ]
    others = [".mine.12345.partial", "download.partial"]
    for name in (*left, *others):
        (folder / name).touch()
    bound_caches(1, folder)
    assert {*left, *others} <= {*names(folder)}, "another process or host may be writing them"
    for name in (*left, *others):
        os.utime(folder / name, (old, old))
    bound_caches(1, folder)
    assert names(folder) == sorted([*NAMES, *others])
    with suppress(StorageError), replacing(folder / NAMES[0]) as partial:
        partial.touch()
        os.utime(partial, (old, old))
        bound_caches(1, folder)
        assert not partial.exists(), "such is the name of one"
