"""Open a set of images of any kind; docs/data.md has a table of what can be given."""

import glob
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dino_vit.config.objects import find, is_object
from dino_vit.core import log
from dino_vit.core.text import brief, did_you_mean, plural, public
from dino_vit.data.image_set import UNLABELLED, ImageSet, join_sets
from dino_vit.data.labels import HELD_OUT, NO_LABELS, TRAIN
from dino_vit.data.paths import BRACES, CATALOGUE, IMAGE_SUFFIXES, expand_braces, list_local, suffix_of
from dino_vit.data.remote import ask, exists, is_folder, is_http, is_url, list_remote, local_path
from dino_vit.data.stores.files import NoImages, open_files, open_folder

ALLOWED = (
    "give a folder of images, an image, a pattern such as 'photos/*.jpg', a list (.txt, .csv, .tsv), "
    "uncompressed tar shards (such as 'shards/{000..010}.tar' or 'shards/*.tar'), a .zip, .parquet or .npy "
    "file, hf:OWNER/NAME, or synthetic[:LENGTH[:SIZE]]"
)
ARCHIVES = (".tar", ".zip")
LISTS = (".txt", ".csv", ".tsv")
# Of files beside which no catalogue is looked for, which costs a request for a remote one.
UNCATALOGUED = (*IMAGE_SUFFIXES, *LISTS, ".parquet")
_NO_LISTING = (
    "a web server does not list its files; give shards by their numbers, such as "
    "'https://host/{000..010}.tar', or a list of addresses (.txt, .csv)"
)
_SPLIT = re.compile(rf"(?<![a-z])({'|'.join((*TRAIN, *HELD_OUT))})(?![a-z])", re.IGNORECASE)


def open_source(
    spec: str | Sequence[str], labels: str | Path | None = None, *, several: bool = False
) -> ImageSet:
    """Open a set of images; `labels` is a file of labels by name that replace its own, or `none`.

    With `several`, a cell of that file, or of a list of images, has several labels, as in `sea;sky`.
    Several sources become one table.
    """
    if several and not has_cells(spec, labels):
        raise ValueError("several=true is about a file of labels or a list of images (.csv, .tsv, .txt)")
    if isinstance(spec, str):
        if several and labels is None:
            from dino_vit.data.label_files import open_list

            return open_list(local_path(spec), several=True)
        images = _open(local_path(spec))
    elif labels in (None, NO_LABELS):
        images = join_sets(spec, [_open(local_path(part)) for part in spec])
    else:
        raise ValueError(f"the labels {labels} are for one source; give one, or leave them out")
    return _with_labels(images, labels, several)


def _with_labels(images: ImageSet, labels: str | Path | None, several: bool) -> ImageSet:
    """Return images with the labels of a file, none, or their own; say if these are taken from folders."""
    if labels == NO_LABELS:
        return replace(images, labels=UNLABELLED)
    if labels is not None:
        from dino_vit.data.label_files import join_labels

        return join_labels(images, labels, several)
    if images.labels.of_folders and images.labels.names:
        names = brief(", ".join(images.labels.names), 100)
        advice = "if they are not: labels=none, in pretrain data.labels=none"
        log.info("subfolders are taken as labels: %s (%s)", names, advice)
    return images


def has_cells(spec: str | Sequence[str], labels: str | Path | None) -> bool:
    """Tell whether labels are cells of text, which may have several."""
    return labels not in (None, NO_LABELS) or (isinstance(spec, str) and suffix_of(spec) in LISTS)


# Modules of one kind of source are imported where it is opened.


def _open(spec: str) -> ImageSet:
    kind, _, rest = spec.partition(":")
    if not os.path.exists(spec):  # a file may be called so
        if kind == "synthetic":
            return _open_synthetic(spec)
        if is_object(spec):
            from dino_vit.data.stores.calls import wrap

            return wrap(find(spec))
        if kind == "hf":
            from dino_vit.data.stores.rows import open_hub

            return open_hub(rest)
    if (images := _open_catalogued(spec)) is not None:
        return images
    if is_http(spec) and suffix_of(spec) not in (*UNCATALOGUED, *ARCHIVES):
        raise ValueError(f"{public(spec)}: {_NO_LISTING}")
    if exists(spec):
        return _open_path(spec)
    if BRACES.search(spec) or glob.has_magic(spec):
        return _open_files(spec, expand(spec))
    hint = ", or may not be read (check the credentials)" if is_url(spec) else ""
    raise ValueError(f"{public(spec)!r} does not exist{did_you_mean(spec, f'{hint}: {ALLOWED}.')}")


def _open_synthetic(spec: str) -> ImageSet:
    from dino_vit.data.synthetic import make_textures

    match = re.fullmatch(r"synthetic(?::(\d{1,18}))?(?::(\d{1,18}))?", spec)
    if not match:
        raise ValueError(f"{spec!r:.200} is not valid: write synthetic[:LENGTH[:SIZE]]")
    given = zip(("length", "size"), match.groups(), strict=True)
    return make_textures(**{name: int(value) for name, value in given if value})


def _open_catalogued(spec: str) -> ImageSet | None:
    """Open archives, given by their folder or a pattern, that a catalogue beside them is of."""
    if suffix_of(spec) in UNCATALOGUED and not os.path.isdir(spec):
        return None
    if suffix_of(spec) != os.path.splitext(spec)[1].lower():  # signed, as a file of its own
        return None
    is_pattern = suffix_of(spec) in ARCHIVES and not os.path.isdir(spec)
    folder, pattern = os.path.split(spec) if is_pattern else (spec.rstrip("/"), "")
    if not exists(os.path.join(folder, CATALOGUE)):
        return None
    from dino_vit.data.catalogue import open_catalogued

    return open_catalogued(folder, pattern, lambda: archive_files(spec)[1])


def _open_path(spec: str) -> ImageSet:
    """Open a file, or a folder of images, or of archives if they are clearly one set."""
    if not is_folder(spec):
        return _open_files(spec, [spec])
    try:
        return open_folder(spec)
    except NoImages as error:
        if not (names := error.args[2]):
            raise
    check_one_set(spec, names)
    return _open_files(spec, [os.path.join(spec, name) for name in names])


def check_one_set(folder: str, names: Sequence[str]) -> None:
    """Raise an error if archives of a folder are of several kinds, or of several splits."""
    suffixes = sorted(set(map(suffix_of, names)))
    splits = sorted({match[1].lower() for name in names if (match := _SPLIT.search(name))})
    if len(suffixes) > 1 or len(splits) > 1:
        kinds = suffixes if len(suffixes) > 1 else splits
        example = next(name for name in reversed(names) if kinds[-1] in name.lower())
        choice = os.path.join(folder, os.path.dirname(example), f"*{kinds[-1]}*")
        raise ValueError(
            f"{public(folder)} contains archives of several kinds or splits ({', '.join(kinds)}), such as "
            f"{names[0]} and {names[-1]}: choose one by its folder or a pattern, such as '{public(choice)}'"
        )


def _open_files(spec: str, files: Sequence[str]) -> ImageSet:
    """Open files by their suffix, which must be the same."""
    suffixes = set(map(suffix_of, files))
    if not files:
        raise ValueError(f"{public(spec)!r} matches no file.")
    if suffixes.issubset(IMAGE_SUFFIXES) and (len(files) > 1 or suffixes != {".npy"}):
        return open_files(spec, files)
    if len(suffixes) > 1:
        raise ValueError(f"{public(spec)!r} matches files of several kinds: {', '.join(sorted(suffixes))}.")
    (suffix,) = suffixes
    if suffix in ARCHIVES:
        from dino_vit.data.stores.ranges import open_archives

        return open_archives(suffix, spec, files)
    if suffix == ".parquet":
        from dino_vit.data.stores.rows import open_parquet

        return open_parquet(spec, files)
    if suffix not in (*LISTS, ".npy"):
        raise ValueError(f"{public(spec)!r} is of an unknown kind: {ALLOWED}.")
    if len(files) > 1:
        raise ValueError(f"{public(spec)!r} matches {len(files)} {suffix} files: give one file of this kind")
    if suffix in LISTS:
        from dino_vit.data.label_files import open_list

        return open_list(files[0])
    from dino_vit.data.stores.calls import open_array

    return open_array(files[0])


def archive_files(spec: str) -> tuple[str, list[str]]:
    """Return the folder of some archives, given by it or by a pattern, and their paths in it."""
    spec = local_path(spec)
    folder, files = spec, list[str]()
    if suffix_of(spec) not in ARCHIVES or os.path.isdir(spec):
        files = list(list_remote(spec) if is_url(spec) else list_local(spec)) if is_folder(spec) else []
    else:
        folder = os.path.dirname(spec)
        if glob.has_magic(folder) or BRACES.search(folder):
            raise ValueError(f"{public(spec)} is of several folders; give the folder that holds them")
        files = [path.removeprefix(folder).lstrip("/") for path in expand(spec)]
    files = [file for file in files if suffix_of(file) in ARCHIVES]
    if not files:
        raise ValueError(f"{public(spec)} has no tar or zip archives; give their folder or a pattern")
    return folder, files


def expand(pattern: str) -> list[str]:
    """Return the paths that match a pattern with `{000..010}`, `{a,b}`, `*`, `?` or `[...]`, sorted."""
    matches, missing = set[str](), list[str]()
    for path in expand_braces(pattern):
        if glob.has_magic(path) and is_http(path):
            raise ValueError(f"{public(path)}: {_NO_LISTING}")
        if glob.has_magic(path) and is_url(path):
            system, found = ask(path, lambda system, inner: (system, system.glob(inner)))
            matches.update(map(system.unstrip_protocol, found))
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
