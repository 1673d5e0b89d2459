"""Folders of files that can be made again: together they stay within a bound.

Several processes and hosts may share them. What is deleted stays in the memory of the processes that map it.
"""

import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from dino_vit.core import log
from dino_vit.core.text import plural

FEATURES, SHARDS = "features", "shards"  # folders beside the indexes
STALE_S = 3600  # after so long without a change nobody writes a temporary file any more
_INDEX, _FEATURES = r"[a-z]+-[0-9a-f]{24}\.arrow", r"[0-9a-f]{15}\.safetensors"
_OURS = re.compile(f"{_INDEX}|{_FEATURES}")
_PARTIAL = re.compile(rf"\.(?:{_INDEX}|{_FEATURES})\..*partial|\d+-[0-9a-f]{{24}}\.partial")


def cache_folder() -> Path:
    """Return the folder of indexes and other files that can be made again."""
    if given := os.environ.get("DINO_VIT_CACHE"):
        return below_home(given)
    return below_home(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "dino-vit"


def below_home(path: str) -> Path:
    """Return the path of a cache, its ~ replaced; a user in a container may have no home."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        text = f"{path} is in a home folder that does not exist"
        raise ValueError(f"{text}; give another, for all caches by the variable DINO_VIT_CACHE") from error


def bound_caches(gigabytes: float, folder: Path, spared: Path | None = None) -> None:
    """Delete indexes and what a command keeps in a folder, used longest ago, until all fit."""
    bound([cache_folder(), folder], gigabytes, spared)


def note_use(path: Path) -> None:
    """Note that a file is used now: those used longest ago are deleted first."""
    with suppress(OSError):  # a cache that may only be read
        os.utime(path)


def bound(folders: Sequence[Path], gigabytes: float, spared: Path | None = None) -> None:
    """Delete the files that were used longest ago until all fit, and what killed processes left behind."""
    files = list[tuple[float, int, Path]]()
    for entry in _entries(folders):
        with suppress(OSError):  # another process deletes too, and some files are of another user
            status, path = entry.stat(), Path(entry.path)
            if _OURS.fullmatch(entry.name):
                files.append((status.st_mtime, status.st_size, path))
            elif _PARTIAL.fullmatch(entry.name) and status.st_mtime < time.time() - STALE_S:
                path.unlink()
    excess, deleted = sum(size for _, size, _ in files) - gigabytes * 1e9, list[int]()
    for _, size, path in sorted(files):
        if excess > sum(deleted) and path != spared:
            with suppress(OSError):
                path.unlink()
                deleted.append(size)
    if deleted:
        text = "%s that had not been used for longest (%.3g GB) are deleted from %s: cache_gb=%g"
        log.info(text, plural(len(deleted), "file"), sum(deleted) / 1e9, folders[0], gigabytes)


def _entries(folders: Sequence[Path]) -> Iterator[os.DirEntry[str]]:
    for folder in folders:
        with suppress(FileNotFoundError), os.scandir(folder) as entries:
            yield from entries
