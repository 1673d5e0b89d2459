"""What paths say: suffixes, folders and short names; and the files below a local folder."""

import os
import re
from collections.abc import Hashable, Iterator, Sequence
from fnmatch import fnmatchcase
from glob import has_magic
from heapq import heappop, heappush

from dino_vit.core import log
from dino_vit.core.text import plural, printable, progress, public

IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".npy", ".avif", ".heic", ".heif"),
    *(".jfif", ".jpe", ".jp2", ".j2k", ".ppm", ".pgm", ".pbm"),
)
_HIDDEN = re.compile(r"(?:^|/)\.(?!\.?/)")

Identity = tuple[int, int]  # device and inode of a folder


def suffix_of(name: str) -> str:
    """Return the suffix of a name in lower case, of an address without its query."""
    return os.path.splitext(public(name))[1].lower()


def folder_of(path: str) -> str:
    """Return the folder of a file, of an address without its query, which may have slashes."""
    if path.lower().startswith(("http://", "https://")):
        path = path.partition("?")[0]
    return os.path.dirname(path)


def short_names(paths: Sequence[str]) -> list[str]:
    """Return the names of files, or where some are equal, their paths below the folder that all share."""
    paths = list(map(public, paths))
    names = [os.path.basename(path) for path in paths]
    if len({*names}) == len(names):
        return names
    shared = os.path.commonpath([os.path.dirname(path) for path in paths])
    return [os.path.relpath(path, shared) for path in paths]


def is_image(name: str | bytes) -> bool:
    """Tell whether this is the name of an image file that is not hidden, nor in a hidden folder."""
    text = os.fsdecode(name)
    return suffix_of(text) in IMAGE_SUFFIXES and not _HIDDEN.search(text)


def list_local(root: str) -> list[str]:
    """Return the files below a folder by their paths in it, without hidden ones.

    Links to folders are followed, but each folder is read once: by its own name if it has one below the root,
    otherwise by the first link to it, where fewer folders and then the order of names come first.
    """
    files, left_out = list[str](), list[str]()
    seen: set[Identity] = set()
    links = [(0, "")]
    with progress(f"Listing {root}") as advance:
        while links:
            _, start = heappop(links)
            if start and _identity(os.path.join(root, start)) in seen:
                left_out.append(start)
            elif not start or not _leads_back(os.path.join(root, start)):
                for inner, is_link in _walk(root, start, seen):
                    if is_link:
                        heappush(links, (inner.count("/"), inner))
                    else:
                        files.append(inner)
                        advance(1)
    if left_out:
        text = "%s: left out %s to folders that are read by another name, such as %s"
        log.warning(text, root, plural(len(left_out), "link"), printable(min(left_out)))
    return files


def match_local(pattern: str) -> list[str]:
    """Return the files that match a pattern with `**`, in which a link is followed as in a folder."""
    parts = pattern.split("/")
    start = next(number for number, part in enumerate(parts) if has_magic(part))
    root = "/".join(parts[:start]) or ("/" if start else "")
    names = list_local(root or os.curdir) if os.path.isdir(root or os.curdir) else []
    return [os.path.join(root, name) for name in names if _matches(name.split("/"), parts[start:])]


def _matches(name: list[str], pattern: list[str]) -> bool:
    if pattern and pattern[0] == "**":
        return any(_matches(name[skipped:], pattern[1:]) for skipped in range(len(name) + 1))
    if not name or not pattern:
        return name == pattern
    return fnmatchcase(name[0], pattern[0]) and _matches(name[1:], pattern[1:])


def _walk(root: str, start: str, seen: set[Identity]) -> Iterator[tuple[str, bool]]:
    """Yield the files, and the links to folders, that are below a folder without following a link."""
    folders = [start]
    while folders:
        folder = folders.pop()
        path = os.path.join(root, folder)
        identity = _identity(path)
        if start and identity in seen:  # what a link leads to may contain a folder that was read before
            continue
        seen.add(identity)
        with os.scandir(path) as entries:
            for entry in entries:
                inner = os.path.join(folder, entry.name)
                if entry.name[0] == ".":
                    continue
                if not _is_folder(entry) or entry.is_symlink():
                    yield inner, _is_folder(entry)
                else:
                    folders.append(inner)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # of links that lead to each other
        return False


def _identity(folder: str) -> Identity:
    status = os.stat(folder)
    return status.st_dev, status.st_ino


def _leads_back(link: str) -> bool:
    """Tell whether this is a link to a folder that contains it."""
    target, folder = os.path.realpath(link), os.path.realpath(os.path.dirname(link))
    return os.path.commonpath([target, folder]) == target


def file_identity(path: str) -> Hashable:
    """Return what no other file has, whatever links lead to it; of a remote or missing one its path."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return path
    return status.st_dev, status.st_ino
