"""How the labels in a table came about, by its column `origin`: which of them may judge a classifier."""

import numpy as np
from numpy.typing import NDArray

from dino_vit.data.label_files import CORRECTED, find_entry, read_table
from dino_vit.data.open import LISTS
from dino_vit.data.paths import suffix_of
from dino_vit.data.remote import local_path
from dino_vit.eval.sets import LabelledSubset

GIVEN, RANDOM = "given", "random"
LEARNED_ONLY = "checked", CORRECTED  # whoever looked at them had picked them by their guesses
CHOSEN = "or fewer: the labelled images were not drawn at random"  # nor are their classes as frequent
ENOUGH = 50  # images that were drawn at random; then these alone judge
_GROUP = "group:"  # of images that were labelled at once, as they are nearly the same

Origins = NDArray[np.str_]


def read_origins(images: str, labels: str | None, labelled: LabelledSubset) -> Origins:
    """Return the origin of the label of each image of a subset, by its file of labels or its list."""
    if labels is None and suffix_of(images) not in LISTS:
        return np.full(len(labelled), GIVEN)
    table = read_table(labels or local_path(images), False)
    entries = [find_entry(table, labelled.source, index) for index in labelled.indices.tolist()]
    return np.array([(entry and entry.origin) or GIVEN for entry in entries])


def was_picked(origins: Origins) -> NDArray[np.bool_]:
    """Return which images somebody looked at because of their guesses."""
    return np.isin(origins, LEARNED_ONLY)


def may_judge(origins: Origins) -> NDArray[np.bool_]:
    """Return which images may judge: those drawn at random, if there are enough, or all but those picked."""
    random: NDArray[np.bool_] = origins == RANDOM
    return random if random.sum() >= ENOUGH else ~was_picked(origins)


def describe_judges(origins: Origins) -> str:
    """Say what the accuracy rests on."""
    if (count := int((origins == RANDOM).sum())) >= ENOUGH:
        return f"by {count:,} images that were drawn at random"
    if np.isin(origins[may_judge(origins)], (GIVEN, RANDOM)).all():
        return "if these images are like the labelled ones"
    return CHOSEN


def join_groups(runs: NDArray[np.int64], origins: Origins) -> NDArray[np.int64]:
    """Return the runs of photos, numbered from 0, with those that have images of the same group as one."""
    runs = runs.copy()
    for group in {each for each in origins.tolist() if each.startswith(_GROUP)}:
        touched = np.unique(runs[origins == group])
        runs[np.isin(runs, touched)] = touched[0]
    return np.unique(runs, return_inverse=True)[1]
