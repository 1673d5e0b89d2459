"""Folders of files that can be made again: together they stay within a bound.

Several processes and hosts may share them. What is deleted stays in the memory of the processes that map it.
"""

import os
import re
import time
from contextlib import suppress
from pathlib import Path

from dino_vit.core import log
from dino_vit.core.text import plural

FEATURES, SHARDS = "features", "shards"  # folders beside the indexes
STALE_S = 3600  # after so long without a change nobody writes a temporary file any more
_INDEX, _FEATURES = r"[a-z]+-[0-9a-f]{24}\.arrow", r"[0-9a-f]{15}\.safetensors"
_OURS = re.compile(f"{_INDEX}|{_FEATURES}")
_PARTIAL = re.compile(rf"\.(?:{_INDEX}|{_FEATURES})\..*partial|\d+-[0-9a-f]{{24}}\.[0-9a-f]{{8}}\.partial")


def cache_folder() -> Path:
    """Return the folder of indexes and other files that can be made again."""
    given = os.environ.get("DINO_VIT_CACHE")
    path = Path(given or os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return path if given else path / "dino-vit"


def note_use(path: Path) -> None:
    """Note that a file is used now: those used longest ago are deleted first."""
    with suppress(OSError):  # a cache that may only be read
        os.utime(path)


def bound_caches(gigabytes: float, folder: Path, spared: Path | None = None) -> None:
    """Delete indexes and what a command keeps in a folder, used longest ago, until all fit.

    What killed processes left behind is deleted too.
    """
    files = list[tuple[float, int, Path]]()
    for path in (path for each in (cache_folder(), folder) for path in each.glob("*")):
        with suppress(OSError):  # another process deletes too, and some files are of another user
            status = path.stat()
            if _OURS.fullmatch(path.name):
                files.append((status.st_mtime, status.st_size, path))
            elif _PARTIAL.fullmatch(path.name) and status.st_mtime < time.time() - STALE_S:
                path.unlink()
    excess, deleted = sum(size for _, size, _ in files) - gigabytes * 1e9, list[int]()
    for _, size, path in sorted(files):
        if excess > sum(deleted) and path != spared:
            with suppress(OSError):
                path.unlink()
                deleted.append(size)
    if deleted:
        text = "%s that had not been used for longest (%.3g GB) are deleted from %s: cache_gb=%g"
        log.info(text, plural(len(deleted), "file"), sum(deleted) / 1e9, cache_folder(), gigabytes)
