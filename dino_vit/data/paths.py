"""What paths say: suffixes, folders, short names and braces; and the files below a local folder."""

import os
import re
from collections.abc import Hashable, Iterable, Iterator, Sequence

from dino_vit.core.text import progress, public

IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".npy", ".avif", ".heic", ".heif"),
    *(".jfif", ".jpe", ".jp2", ".j2k", ".ppm", ".pgm", ".pbm"),
)
CATALOGUE = "catalogue.arrow"  # of archives, in their folder (`data/catalogue.py`)
BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_HIDDEN = re.compile(r"(?:^|/)\.(?!\.?/)")


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

    Links are followed. A folder is read once, by its shortest path, and rather by its name than by a link.
    """
    files, seen, level = list[str](), set[Hashable](), [""]
    with progress(f"Listing {root}") as advance:
        while level:
            below = list[tuple[bool, str]]()
            for folder in level:
                path = os.path.join(root, folder)
                if (identity := file_identity(path)) in seen:
                    continue
                seen.add(identity)
                with os.scandir(path) as entries:
                    for entry in (each for each in entries if each.name[0] != "."):
                        inner, is_link = os.path.join(folder, entry.name), entry.is_symlink()
                        if os.path.isdir(entry.path) if is_link else entry.is_dir():
                            below.append((is_link, inner))
                        else:
                            files.append(inner)
                            advance(1)
            level = [folder for _, folder in sorted(below)]
    return files


def file_identity(path: str) -> Hashable:
    """Return what no other file has, whatever links lead to it; of a remote or missing one its path."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return path
    return status.st_dev, status.st_ino


def expand_braces(pattern: str) -> Iterator[str]:
    """Yield what a pattern with `{000..010}` or `{a,b}` stands for."""
    braces = BRACES.search(pattern)
    if not braces:
        yield pattern
        return
    choices: Iterable[str] = braces[1].split(",")
    if numbers := _RANGE.fullmatch(braces[1]):
        first, last = numbers.groups()
        choices = (f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1))
    start, end = pattern[: braces.start()], pattern[braces.end() :]
    for choice in choices:
        yield from expand_braces(f"{start}{choice}{end}")
