"""Folders that are parts of a set, such as train and val, and not classes."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

from dino_vit.core.text import plural
from dino_vit.data.sources.source import Source

TRAIN = ("train", "training")
# The first of these that has labels is evaluated on.
HELD_OUT = ("val", "valid", "validation", "dev", "test", "testing")
_KNOWN = {*TRAIN, *HELD_OUT, "unlabeled", "unlabelled"}


class Splits(NamedTuple):
    """The folders to learn from and to evaluate on, and the indices of their images."""

    train: str
    held_out: str
    train_images: range
    held_out_images: range


def below_shared(names: Sequence[bytes]) -> Iterator[bytes]:
    """Yield sorted paths below the folder that they all share."""
    # The names are sorted: what the first and the last share, all share.
    folders = (name.split(b"/")[:-1] for name in (names[0], names[-1]))
    shared = takewhile(lambda pair: pair[0] == pair[1], zip(*folders, strict=False))
    start = sum(len(folder) + 1 for folder, _ in shared)
    return (name[start:] for name in names)


def are_splits(folders: Collection[str]) -> bool:
    """Tell whether these folders, all of a level, are parts of a set."""
    return len(folders) > 1 and all(folder.lower() in _KNOWN for folder in folders)


def find_splits(names: Iterable[bytes]) -> dict[str, tuple[int, int]]:
    """Return the first and the last index, plus one, of each split among sorted paths; empty if none."""
    splits: dict[str, tuple[int, int]] = {}
    for index, name in enumerate(names):
        folder, slash, _ = name.partition(b"/")
        if slash:
            text = folder.decode(errors="replace")
            splits[text] = splits.get(text, (index, 0))[0], index + 1
    return splits if are_splits(splits) else {}


def splits_of(source: Source) -> Mapping[str, range]:
    """Return the images of each split by the name of its folder; empty if the source has none."""
    return getattr(source, "splits", {})


def choose_splits(source: Source) -> Splits | None:
    """Return what to learn from and what to evaluate on; None unless the source has both, with labels."""
    labelled = {
        name.lower(): (name, images)
        for name, images in splits_of(source).items()
        if any(source.label(index) is not None for index in images)
    }
    train = next((labelled[name] for name in TRAIN if name in labelled), None)
    held_out = next((labelled[name] for name in HELD_OUT if name in labelled), None)
    if train is None or held_out is None:
        return None
    return Splits(train[0], held_out[0], train[1], held_out[1])


def describe_use(source: Source, splits: Splits, name: str) -> str:
    """Return what a source is split into and how that is used, as a sentence."""
    sizes = (f"{split} ({plural(len(images), 'image')})" for split, images in splits_of(source).items())
    used = f"{splits.held_out} is classified from {splits.train}"
    return f"{name} has the splits {', '.join(sizes)}: {used}"
