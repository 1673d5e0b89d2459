"""What paths say: suffixes, folders and short names; and the files below a local folder."""

import os
import re
from collections.abc import Hashable, Iterator, Sequence
from itertools import chain
from typing import NoReturn

from dino_vit.core.text import progress, public

IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".npy", ".avif", ".heic", ".heif"),
    *(".jfif", ".jpe", ".jp2", ".j2k", ".ppm", ".pgm", ".pbm"),
)
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

    Links to folders are followed, but each folder is read once: by its own name if it has one below the root,
    otherwise by that of a link to it.
    """
    files, seen, starts = list[str](), set[Hashable](), [root]
    with progress(f"Listing {root}") as advance:
        while starts:
            links = list[str]()
            for folder, folders, names in chain.from_iterable(map(_walk, starts)):
                if (identity := file_identity(folder)) in seen:  # what a link leads to may contain one
                    folders.clear()
                    continue
                seen.add(identity)
                folders[:] = [name for name in folders if name[0] != "."]
                inner = os.path.relpath(folder, root)
                visible = [name for name in names if name[0] != "."]
                files += visible if inner == "." else [f"{inner}/{name}" for name in visible]
                advance(len(visible))
                links += filter(os.path.islink, (os.path.join(folder, name) for name in folders))
            starts = sorted(links)
    return files


def _walk(start: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """Walk below a folder, without following links; a folder that may not be read is an error."""

    def fail(error: OSError) -> NoReturn:
        raise error

    return os.walk(start, onerror=fail)


def file_identity(path: str) -> Hashable:
    """Return what no other file has, whatever links lead to it; of a remote or missing one its path."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return path
    return status.st_dev, status.st_ino
