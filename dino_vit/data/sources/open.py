"""Open a set of images of any kind; docs/data.md has a table of what can be given."""

import glob
import os
import re
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dino_vit.config.objects import is_object
from dino_vit.core import log
from dino_vit.core.distributed import from_rank_0
from dino_vit.core.text import BRACES, brief, expand_braces, plural, printable, public
from dino_vit.data.labels import HELD_OUT, TRAIN, join_labels, number_labels, read_entries, without_labels
from dino_vit.data.sources.files import (
    OF_ITS_OWN_S,
    exists,
    file_signatures,
    is_folder,
    is_url,
    list_remote,
    plain,
    read_file,
    read_image_file,
    remotely,
    retry,
)
from dino_vit.data.sources.index import Index, IndexContents, IndexedSource, WriteImages, indexing, open_index
from dino_vit.data.sources.source import IMAGE_SUFFIXES, MixedSource, Source, folder_of, is_image, suffix_of
from dino_vit.data.walk import list_local, match_local

if TYPE_CHECKING:
    from dino_vit.data.sources.published import PublishedSet

__all__ = ["FolderSource", "Source", "open_source"]

ALLOWED = (
    "give a folder of images, an image, a pattern such as 'photos/*.jpg', a list (.txt, .csv, .tsv), "
    "uncompressed tar shards (such as 'shards/{000..010}.tar' or 'shards/*.tar'), a .zip, .parquet, .npy or "
    ".npz file, hf:OWNER/NAME, or synthetic[:LENGTH[:SIZE]]"
)
ARCHIVE_SUFFIXES = (".tar", ".zip")
CONTAINERS = (*ARCHIVE_SUFFIXES, ".parquet")
_SPLIT = re.compile(rf"(?<![a-z])({'|'.join((*TRAIN, *HELD_OUT))})(?![a-z])", re.IGNORECASE)


def open_source(
    spec: str | Sequence[str], labels: str | Path | None = None, mix: Sequence[float] | None = None
) -> Source:
    """Open a set of images; `labels` is a file of labels by name that replace its own.

    Several sets become one, of which each gives its share of `mix`.
    """
    if not isinstance(spec, str):
        if labels is not None:
            raise ValueError(f"labels={labels} is a file for one source; give one, or leave it out")
        return MixedSource(spec, [_open(each) for each in spec], mix)
    if mix:
        raise ValueError("mix is about several sources, and there is one; leave it out")
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
    if suffix_of(spec) in ("", *ARCHIVE_SUFFIXES) or os.path.isdir(spec):
        from dino_vit.data.catalogue import open_catalogued

        if catalogued := open_catalogued(spec, archive_files):
            return catalogued
    if exists(spec):
        return _open_folder(spec) if is_folder(spec) else _open_files(spec, [spec])
    if BRACES.search(spec) or glob.has_magic(spec):
        files = expand(spec)
        if not files:
            raise ValueError(f"{public(spec)!r} matches no file.")
        return _open_files(spec, files)
    path, _, key = spec.rpartition(":")
    if path.lower().endswith(".npz") and os.path.exists(path):
        from dino_vit.data.sources.arrays import ArraySource

        return ArraySource(path, key)
    hint = ", or may not be read (check the credentials)" if is_url(spec) else ""
    raise ValueError(f"{public(spec)!r} does not exist{hint}: {ALLOWED}.")


def _open_synthetic(spec: str) -> Source:
    from dino_vit.data.sources.synthetic import SceneSource, SyntheticSource

    match = re.fullmatch(r"synthetic(:scenes)?(?::(\d{1,18}))?(?::(\d{1,18}))?(?::(\d{1,18}))?", spec)
    if not match or (match[4] and not match[1]):
        text = "is not valid: write synthetic[:LENGTH[:SIZE]] or synthetic:scenes[:LENGTH[:SIZE[:CLASSES]]]"
        raise ValueError(f"{spec!r:.200} {text}")
    scenes, *numbers = match.groups()
    given = zip(("length", "size", "classes"), numbers, strict=True)
    kind = SceneSource if scenes else SyntheticSource
    return kind(**{name: int(value) for name, value in given if value})


def _open_folder(root: str) -> Source:
    """Open a folder of images, of archives if they are clearly one set, or of a published set with masks."""
    from dino_vit.data.sources.published import recognise

    if published := recognise(root):
        return _open_published(root, published)
    try:
        return FolderSource(root)
    except NoImages as error:
        if not (names := error.args[2]):
            raise
    suffixes = sorted(set(map(suffix_of, names)))
    splits = sorted({match[1].lower() for name in names if (match := _SPLIT.search(name))})
    if len(suffixes) > 1 or len(splits) > 1:
        kinds = ", ".join(suffixes if len(suffixes) > 1 else splits)
        pattern = os.path.join(root, f"*{suffixes[-1]}" if len(suffixes) > 1 else f"*{splits[-1]}*")
        raise ValueError(
            f"{public(root)} contains archives of several kinds or splits ({kinds}), such as {names[0]} "
            f"and {names[-1]}: choose by a pattern such as '{public(pattern)}'"
        )
    return _open_files(root, [os.path.join(root, name) for name in names])


def _open_published(root: str, published: "PublishedSet") -> Source:
    """Open the images of all splits, labelled by their folders where these may be classes."""
    folder, masks = (path.partition("/")[0] for path in (published.images, published.masks))
    text = "%s is %s by its folders: its images are in %s"
    source = FolderSource(os.path.join(root, folder))
    if not published.labelled:
        log.info(text, public(root), published.title, folder)
        return without_labels(source)
    labelled = ", labelled by the folders there" if source.classes else ""
    log.info(text + labelled, public(root), published.title, folder)
    beside = {name.partition("/")[0] for name in ([] if is_url(root) else list_local(root)) if is_image(name)}
    if beside := beside - {folder, masks, *published.others}:
        named = brief(printable(", ".join(sorted(beside))), 200)
        log.warning(
            "%s: the images in %s are left out; give these folders to read them too", public(root), named
        )
    return source


def _open_files(spec: str, files: Sequence[str]) -> Source:
    """Open files by their suffix, which must be the same."""
    suffixes = set(map(suffix_of, files))
    if suffixes.issubset(IMAGE_SUFFIXES) and (len(files) > 1 or suffixes != {".npy"}):
        return FilesSource(spec, files)
    if len(suffixes) > 1:
        raise ValueError(f"{public(spec)!r} matches files of several kinds: {', '.join(sorted(suffixes))}.")
    (suffix,) = suffixes
    if suffix in ARCHIVE_SUFFIXES:
        from dino_vit.data.sources.archives import ArchiveSource

        return ArchiveSource(suffix, spec, files)
    if suffix == ".parquet":
        from dino_vit.data.sources.tables import ParquetSource

        return ParquetSource(spec, files)
    if len(files) > 1:
        raise ValueError(f"{public(spec)!r} matches {len(files)} {suffix} files: give one file of this kind")
    if suffix in (".txt", ".csv", ".tsv"):
        return ListSource(files[0])
    if suffix in (".npy", ".npz"):
        from dino_vit.data.sources.arrays import ArraySource

        return ArraySource(files[0])
    raise ValueError(f"{public(spec)!r} is of an unknown kind: {ALLOWED}.")


def archive_files(spec: str) -> tuple[str, list[str]]:
    """Return the folder of some archives, given by it or by a pattern, and their paths in it."""
    spec = plain(spec)
    folder, files = spec, list[str]()
    if suffix_of(spec) not in ARCHIVE_SUFFIXES:
        files = list(list_remote(spec) if is_url(spec) else list_local(spec)) if is_folder(spec) else []
    else:
        folder = os.path.dirname(spec)
        if glob.has_magic(folder) or BRACES.search(folder):
            raise ValueError(f"{public(spec)} is of several folders; give the folder that holds them")
        files = [path.removeprefix(folder).lstrip("/") for path in expand(spec)]
    files = [file for file in files if suffix_of(file) in ARCHIVE_SUFFIXES]
    if not files:
        raise ValueError(f"{public(spec)} has no tar or zip archives; give their folder or a pattern")
    return folder, files


def expand(pattern: str) -> list[str]:
    """Return the paths that match a pattern with `{000..010}`, `{a,b}`, `*`, `?` or `[...]`, sorted."""
    matches, missing = set[str](), list[str]()
    for path in expand_braces(pattern):
        if glob.has_magic(path) and is_url(path):
            matches.update(retry(partial(remotely, path, _glob), path))
        elif "**" in path.split("/"):
            matches.update(match_local(path))
        elif glob.has_magic(path):
            matches.update(glob.glob(path))
        elif exists(path):
            matches.add(path)
        else:
            missing.append(path)
    if missing:
        example = brief(missing[0], 200)
        raise ValueError(f"{brief(pattern, 200)}: {plural(len(missing), 'missing file')}, such as {example}.")
    return sorted(matches, key=os.fsencode)


def _glob(system: Any, pattern: str) -> list[str]:
    return [system.unstrip_protocol(path) for path in system.glob(pattern)]


class NoImages(ValueError):
    """A folder without images: its path, the other files in it, and the archives among them."""

    def __str__(self) -> str:
        suffixes = Counter(map(suffix_of, self.args[1])).most_common(5)
        counts = ", ".join(f"{count} {printable(suffix) or 'without a suffix'}" for suffix, count in suffixes)
        content = f"no images, only {counts}" if counts else "no files"
        advice = f"Give a folder with files ending in {', '.join(IMAGE_SUFFIXES)}, at any depth."
        return f"{public(self.args[0])} contains {content}. {advice}"


class PathSource(IndexedSource):
    """Images whose names are paths below a folder, absolute paths or URLs."""

    root: str
    seconds: float | None = None  # for which a remote image is requested before it counts as unreadable

    def open_files(
        self, kind: str, spec: str, names: Sequence[str], signatures: NDArray[np.int64] | None = None
    ) -> Index:
        """Return the index of files, all of which are images."""
        files = [_join(self.root, name) for name in names]
        contents = IndexContents(names=list(map(os.fsencode, names)))
        return open_index(kind, spec, lambda _: contents, files, signatures)

    def path(self, index: int) -> str:
        return _join(self.root, os.fsdecode(self.raw_name(index)))

    def read(self, index: int) -> bytes:
        return read_image_file(self.path(index), self.seconds)


class FolderSource(PathSource):
    """All images below a folder, labelled by its first-level folders.

    Hidden files and folders are skipped, links are followed (`list_local`).
    """

    def __init__(self, root: str | Path) -> None:
        self.root = root = plain(os.fspath(root))
        if not is_folder(root):
            raise ValueError(f"{public(root)} is not a folder. Give one with images in it, at any depth.")
        with indexing(root):
            remote = from_rank_0(lambda: list_remote(root)) if is_url(root) else {}
            names = _images_among(root, list(remote) if is_url(root) else list_local(root))
        signatures = np.array([remote[name] for name in names]) if remote else None
        super().__init__(self.open_files("folder", root, names, signatures))


def _images_among(root: str, files: Sequence[str]) -> list[str]:
    """Return the images of a folder; raise an error without any, and say what beside them is not read."""
    names = [name for name in files if is_image(name)]
    others = [name for name in files if not is_image(name)] if len(names) < len(files) else []
    others = [name for name in others if not os.path.basename(name).startswith(".")]
    containers = [name for name in others if suffix_of(name) in CONTAINERS]
    if not names:
        raise NoImages(root, others, sorted(containers))
    if containers:
        text = "%s is read as a folder of images, without the %s in it, such as %s"
        log.warning(text, public(root), plural(len(containers), "archive"), printable(containers[0]))
    if unnamed := [name for name in others if not suffix_of(name)]:
        text = "%s: %s without a suffix %s not read, such as %s"
        were = "was" if len(unnamed) == 1 else "were"
        log.info(text, public(root), plural(len(unnamed), "file"), were, printable(min(unnamed)))
    return names


class ListSource(PathSource):
    """The images in a list of paths, which are relative to the list's folder, absolute, or URLs."""

    seconds = OF_ITS_OWN_S  # each may be on another server

    def __init__(self, path: str) -> None:
        self.root, self._path = folder_of(path), public(path)
        with indexing(path):
            text = read_file(path)
            entries = sorted(read_entries(self._path, text), key=lambda each: os.fsencode(each.name))
        if not entries:
            raise ValueError(f"{self._path} lists no images. Write one path per line.")
        paths = [_join(self.root, entry.name) for entry in entries]
        # To ask for the size of each remote file would take long.
        local = [row for row, path in enumerate(paths) if not is_url(path)]
        files = [path, *(paths[row] for row in local)]
        with indexing(path):
            signatures = file_signatures(files)

        def build(_: WriteImages) -> IndexContents:
            sizes = np.zeros(len(paths), dtype=np.int64)
            sizes[local] = signatures[1:, 0]
            self._check_missing(paths, np.flatnonzero(sizes < 0))
            names = [os.fsencode(entry.name) for entry in entries]
            labels = number_labels([entry.label for entry in entries])
            return IndexContents(names=names, sizes=sizes, labels=labels)

        super().__init__(open_index("list", path, build, files, signatures))
        self.stamp = self.stamp if len(local) == len(paths) else None

    def _check_missing(self, paths: Sequence[str], missing: NDArray[np.int64]) -> None:
        """Refuse a list without any file that exists, and warn of those that do not."""
        if len(missing) == len(paths):
            raise ValueError(
                f"none of the files listed in {self._path} exist, such as {brief(paths[0], 200)}; paths are "
                "relative to the folder of the list"
            )
        if len(missing):
            text = "%s lists %s that cannot be found, such as %s; they count as unreadable"
            log.warning(text, self._path, plural(len(missing), "file"), brief(paths[missing[0]], 200))


class FilesSource(PathSource):
    """The given image files, named by their paths below the folder that they share."""

    def __init__(self, spec: str, files: Sequence[str]) -> None:
        remote = any(map(is_url, files))
        self.root = "" if remote else os.path.commonpath([os.path.dirname(path) for path in files])
        names = [os.path.relpath(path, self.root) if self.root else path for path in files]
        super().__init__(self.open_files("files", spec, names))


def _join(root: str, name: str) -> str:
    return name if is_url(name) else os.path.join(root, name)
