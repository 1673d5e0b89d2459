"""Open a set of images of any kind.

| given | meaning |
|---|---|
| `photos` | a folder of images at any depth, or one that contains only tar shards, Parquet files or zips |
| `photo.jpg`, `photos/*.jpg` | an image, or all that match |
| `list.txt`, `list.csv`, `list.tsv` | a path per line, possibly with a label |
| `shards/{000..010}.tar`, `shards/*.tar` | tar shards, in WebDataset's layout if there are labels |
| `photos.zip` | zip archives |
| `train.parquet`, `data/train-*.parquet` | Parquet files with a column of images |
| `hf:OWNER/NAME`, `hf:OWNER/NAME:SPLIT` | a dataset of the Hugging Face hub |
| `images.npy`, `images.npz`, `images.npz:KEY` | an array (N, H, W), (N, H, W, C) or (N, C, H, W) |
| `synthetic`, `synthetic:LENGTH:SIZE` | generated textures |
| `python:MODULE:NAME` | an object of Python code, see `data/custom.py` |

All but arrays may be URLs that fsspec knows.
"""

import glob
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from dino_vit.config.objects import is_object
from dino_vit.core.text import brief, plural
from dino_vit.data.labels import HELD_OUT, TRAIN, join_labels
from dino_vit.data.sources.files import exists, is_folder, is_url, plain, remotely
from dino_vit.data.sources.folder import FilesSource, FolderSource, ListSource, NoImages
from dino_vit.data.sources.source import IMAGE_SUFFIXES, Source, suffix_of

__all__ = ["FolderSource", "Source", "open_source"]

ALLOWED = (
    "give a folder of images, an image, a pattern such as 'photos/*.jpg', a list (.txt, .csv, .tsv), "
    "uncompressed tar shards (such as 'shards/{000..010}.tar' or 'shards/*.tar'), a .zip, .parquet, .npy or "
    ".npz file, "
    "hf:OWNER/NAME, or synthetic[:LENGTH[:SIZE]]"
)
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_SPLIT = re.compile(rf"(?<![a-z])({'|'.join((*TRAIN, *HELD_OUT))})(?![a-z])", re.IGNORECASE)


def open_source(spec: str, labels: str | Path | None = None) -> Source:
    """Open a set of images; `labels` is a file of labels by name that replace its own."""
    source = _open(spec)
    return source if labels is None else join_labels(source, labels)


def _open(spec: str) -> Source:
    """Open a source; each kind is imported when it is used."""
    kind, _, rest = spec.partition(":")
    if not os.path.exists(spec):
        if kind == "synthetic":
            return _open_synthetic(spec)
        if is_object(spec):
            from dino_vit.data.custom import open_custom

            return open_custom(spec)
        if kind == "hf":
            from dino_vit.data.sources.tables import HubSource

            return HubSource(rest)
    spec = plain(spec)
    if exists(spec):
        return _open_folder(spec) if is_folder(spec) else _open_files(spec, [spec])
    if _BRACES.search(spec) or glob.has_magic(spec):
        files = expand(spec)
        if not files:
            raise ValueError(f"{spec!r} matches no file.")
        return _open_files(spec, files)
    path, _, key = spec.rpartition(":")
    if path.lower().endswith(".npz") and os.path.exists(path):
        from dino_vit.data.sources.arrays import ArraySource

        return ArraySource(path, key)
    raise ValueError(f"{spec!r} does not exist: {ALLOWED}.")


def _open_synthetic(spec: str) -> Source:
    from dino_vit.data.sources.synthetic import SceneSource, SyntheticSource

    match = re.fullmatch(r"synthetic(:scenes)?(?::(\d{1,18}))?(?::(\d{1,18}))?", spec)
    if not match:
        raise ValueError(f"{spec!r:.200} is not valid: write synthetic[:scenes][:LENGTH[:SIZE]]")
    scenes, length, size = match.groups()
    given = {"length": length, "size": size}
    kind = SceneSource if scenes else SyntheticSource
    return kind(**{name: int(value) for name, value in given.items() if value})


def _open_folder(root: str) -> Source:
    """Open a folder of images, or of archives if they are clearly one set."""
    try:
        return FolderSource(root)
    except NoImages as error:
        if not error.containers:
            raise
        names = error.containers
    suffixes = sorted(set(map(suffix_of, names)))
    splits = sorted({match[1].lower() for name in names if (match := _SPLIT.search(name))})
    if len(suffixes) > 1 or len(splits) > 1:
        kinds = ", ".join(suffixes if len(suffixes) > 1 else splits)
        raise ValueError(
            f"{root} contains archives of several kinds or splits ({kinds}), such as {names[0]} and "
            f"{names[-1]}: choose by a pattern such as 'data/train*.parquet'"
        )
    return _open_files(root, [os.path.join(root, name) for name in names])


def _open_files(spec: str, files: Sequence[str]) -> Source:
    """Open files by their suffix, which must be the same."""
    suffixes = set(map(suffix_of, files))
    if suffixes.issubset(IMAGE_SUFFIXES) and (len(files) > 1 or suffixes != {".npy"}):
        return FilesSource(spec, files)
    if len(suffixes) > 1:
        raise ValueError(f"{spec!r} matches files of several kinds: {', '.join(sorted(suffixes))}.")
    (suffix,) = suffixes
    if suffix in (".tar", ".zip"):
        from dino_vit.data.sources.archives import ArchiveSource

        return ArchiveSource(suffix, spec, files)
    if suffix == ".parquet":
        from dino_vit.data.sources.parquet import ParquetShards, ParquetSource

        return ParquetShards(spec, files) if all(map(is_url, files)) else ParquetSource(spec, files)
    if len(files) > 1:
        raise ValueError(f"{spec!r} matches {len(files)} {suffix} files: give one file of this kind")
    if suffix in (".txt", ".csv", ".tsv"):
        return ListSource(files[0])
    if suffix in (".npy", ".npz"):
        from dino_vit.data.sources.arrays import ArraySource

        return ArraySource(files[0])
    raise ValueError(f"{spec!r} is of an unknown kind: {ALLOWED}.")


def expand(pattern: str) -> list[str]:
    """Return the paths that match a pattern with `{000..010}`, `{a,b}`, `*`, `?` or `[...]`, sorted."""
    matches: set[str] = set()
    missing: list[str] = []
    for path in _expand_braces(pattern):
        if glob.has_magic(path) and is_url(path):
            paths = remotely(path, lambda system, inner: map(system.unstrip_protocol, system.glob(inner)))
            matches.update(paths)
        elif glob.has_magic(path):
            matches.update(glob.glob(path, recursive=True))
        elif exists(path):
            matches.add(path)
        else:
            missing.append(path)
    if missing:
        example = brief(missing[0], 200)
        raise ValueError(f"{brief(pattern, 200)}: {plural(len(missing), 'missing file')}, such as {example}.")
    return sorted(matches, key=os.fsencode)


def _expand_braces(pattern: str) -> Iterator[str]:
    braces = _BRACES.search(pattern)
    if not braces:
        yield pattern
        return
    choices: Iterable[str] = braces[1].split(",")
    if numbers := _RANGE.fullmatch(braces[1]):
        first, last = numbers.groups()
        choices = (f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1))
    start, end = pattern[: braces.start()], pattern[braces.end() :]
    for choice in choices:
        yield from _expand_braces(f"{start}{choice}{end}")
