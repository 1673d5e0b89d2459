"""Revisited Oxford and Paris (Radenović et al., 2018): ground truth and difficulties.

Each query has easy, hard and junk images. Easy: the hard ones are junk too; medium: easy and hard ones are
relevant; hard: the easy ones are junk too. All other images are wrong. On the same features (40 queries
among 300 random ones, all difficulties) mAP and mP@k equal those of `compute_map` of 2021 to 1e-16.
"""

import pickle
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dino_vit.data.sources.source import Source, Subset
from dino_vit.eval.features.extraction import FeatureSpec
from dino_vit.eval.features.frozen import FrozenBackbone
from dino_vit.eval.retrieval.ranking import Judgement, Ranks, rank_relevant
from dino_vit.eval.retrieval.whitening import Whitening
from dino_vit.eval.retrieval.whole import Box, whole_features

LONGEST = 512  # pixels of the longer side of an image, as published
DIFFICULTIES = {"easy": ("easy", "hard"), "medium": ("easy+hard", ""), "hard": ("hard", "easy")}
# What arrays and numbers of NumPy are made of, by the names of its versions; the last two make bytes.
_ALLOWED = {
    *(
        (f"numpy.{core}.{module}", name)
        for core in ("core", "_core")
        for module, name in (
            ("multiarray", "_reconstruct"),
            ("multiarray", "scalar"),
            ("numeric", "_frombuffer"),
        )
    ),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
    ("__builtin__", "bytes"),
}


class Query(NamedTuple):
    """A query: a box of an image, and which images show the same building how clearly."""

    name: str
    box: Box
    easy: NDArray[np.int64]
    hard: NDArray[np.int64]
    junk: NDArray[np.int64]


class GroundTruth(NamedTuple):
    """The names of the images, without a suffix, and the queries."""

    images: list[str]
    queries: list[Query]


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is neither a number nor a list")
        return super().find_class(module, name)


def read_ground_truth(path: Path) -> GroundTruth:
    """Read gnd_roxford5k.pkl or gnd_rparis6k.pkl; a pickle that could run anything is refused."""
    try:
        with path.open("rb") as file:
            found = _PlainUnpickler(file, encoding="latin1").load()
        images = [str(name) for name in found["imlist"]]
        queries = [
            _query(str(name), one, len(images))
            for name, one in zip(found["qimlist"], found["gnd"], strict=True)
        ]
    except OSError:
        raise
    except Exception as error:  # a damaged pickle raises anything
        raise ValueError(f"{path} is no ground truth of Revisited Oxford or Paris: {error}") from error
    return GroundTruth(images, queries)


def _query(name: str, one: dict[str, Any], images: int) -> Query:
    left, top, right, bottom = (float(side) for side in one["bbx"])
    if not (left < right and top < bottom):
        raise ValueError(f"the box of {name} is empty")
    lists = [np.asarray(one[kind], dtype=np.int64).ravel() for kind in ("easy", "hard", "junk")]
    if any(len(rows) and not 0 <= rows.min() <= rows.max() < images for rows in lists):
        raise ValueError(f"{name} has images that are not listed")
    return Query(name, (left, top, right, bottom), *lists)


def find_ground_truth(folder: str) -> Path | None:
    """Return the ground truth in a folder, if there is one."""
    found = sorted(Path(folder).glob("gnd_*.pkl")) if Path(folder).is_dir() else []
    if len(found) > 1:
        raise ValueError(f"{folder} has several ground truths: {' and '.join(path.name for path in found)}")
    return found[0] if found else None


def find_images(source: Source, names: Sequence[str], what: str) -> Subset:
    """Return the images of a source that have these names, but for folder and suffix."""
    places: dict[str, list[int]] = {name: [] for name in names}
    for index in range(len(source)):
        if (stem := Path(source.name(index)).stem) in places:
            places[stem].append(index)
    if missing := [name for name in names if not places[name]]:
        raise ValueError(
            f"{len(missing):,} of the {len(names):,} images that {what} lists are missing, "
            f"such as {missing[0]}.jpg"
        )
    if several := next((found for found in places.values() if len(found) > 1), None):
        first, second = (source.name(index) for index in several[:2])
        raise ValueError(f"{what} lists images by name, and {first} and {second} have the same; keep one")
    return Subset(source, [places[name][0] for name in names])


def judge_difficulty(queries: Sequence[Query], images: int, difficulty: str) -> Judgement:
    """Judge the listed images of queries by the rules of a difficulty."""
    relevant_lists, junk_lists = DIFFICULTIES[difficulty]

    def judge(rows: slice) -> tuple[Tensor, Tensor]:
        relevant = torch.zeros(len(queries[rows]), images, dtype=torch.bool)
        junk = torch.zeros_like(relevant)
        for number, query in enumerate(queries[rows]):
            lists = {"easy": query.easy, "hard": query.hard}
            junk[number, query.junk] = True
            for kind, of_kind in lists.items():
                relevant[number, of_kind] |= kind in relevant_lists
                junk[number, of_kind] |= kind in junk_lists
        return relevant & ~junk, junk

    return judge


def judge_as_published(
    frozen: FrozenBackbone,
    known: GroundTruth,
    source: Source,
    *,
    cut: bool,
    longest: int,
    scales: Sequence[float],
    spec: FeatureSpec,
    learned_from: Source | None,
    dimensions: int | None,
    k: Sequence[int],
) -> dict[str, dict[str, Tensor]]:
    """Return the figures of each query by difficulty and title, NaN for queries without relevant images.

    A difficulty at which no query has relevant images is left out.
    """
    how: dict[str, Any] = {"longest": longest, "scales": scales, "spec": spec}
    boxes = [query.box if cut else None for query in known.queries]
    asked = find_images(source, [query.name for query in known.queries], "the ground truth")
    images = find_images(source, known.images, "the ground truth")
    queries = whole_features(frozen, asked, boxes, title="features of the queries", **how)
    bank = whole_features(frozen, images, [None] * len(images), title="features", **how)
    if learned_from is not None:
        learned = whole_features(frozen, learned_from, [None] * len(learned_from), title="whitening", **how)
        whitening = Whitening.learn(learned, frozen.device, dimensions)
        queries, bank = whitening(queries), whitening(bank)
    found: dict[str, dict[str, Tensor]] = {}
    for difficulty in DIFFICULTIES:
        judge = judge_difficulty(known.queries, len(known.images), difficulty)
        ranked = [ranks for _, ranks in rank_relevant(bank, queries, judge, frozen.device)]
        figures: dict[str, Callable[[Ranks], Tensor]] = {
            "mAP": Ranks.trapezoidal_precision,
            **{f"mP@{count}": partial(Ranks.precision_at_last, k=count) for count in k},
            "R-precision": Ranks.r_precision,
        }
        found[difficulty] = {
            title: torch.cat([figure(ranks) for ranks in ranked]).cpu() for title, figure in figures.items()
        }
    found = {difficulty: of for difficulty, of in found.items() if not of["mAP"].isnan().all()}
    if "medium" not in found:
        raise ValueError("no query of the ground truth has easy or hard images, so there is nothing to find")
    return found
