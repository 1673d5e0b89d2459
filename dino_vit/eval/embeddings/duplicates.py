"""Find near-duplicates in an embedding file: pairs of images with a high cosine, and groups of such pairs.

Pairs with two labels and pairs in two splits come first: the one is a mistake in the labels, with the other
a network is judged on images that it may have learned from.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, combinations_with_replacement
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from dino_vit.config.embeddings import DuplicatesConfig
from dino_vit.config.outputs import check_outputs
from dino_vit.core import log
from dino_vit.core.runtime import start_processes
from dino_vit.core.storage import write_bytes
from dino_vit.core.text import Result, plural, progress
from dino_vit.core.work import after_figures
from dino_vit.data.labels import below_shared, find_splits, number_labels
from dino_vit.data.sources.files import SourceLost
from dino_vit.data.targets import SEPARATOR
from dino_vit.eval.embeddings.embed import Array, Embeddings, embedded_panels, read_image_embeddings
from dino_vit.eval.embeddings.threshold import FIXED, Threshold, choose_threshold
from dino_vit.eval.maps.pictures import BLANK, draw_sheet, shorten
from dino_vit.eval.neighbours import unit
from dino_vit.eval.results import write_results
from dino_vit.reports.record import run_of, state
from dino_vit.reports.verdict import BAD, PUBLISHED
from dino_vit.weights import load_backbone

PAIRS_PRINTED, PAIRS_SHOWN = 10, 24  # in the text, on a sheet
PAIRS_IN_ROW = 3  # of a sheet
TYPICAL = 0.1  # pairs per image that are worth looking through
SHEETS = "-label-conflicts.png", "-split-leaks.png", ".png"  # how the names of sheets end
Pair = tuple[int, int, float]  # two rows, the lesser one first, and their cosine
_BLOCK = 2048  # rows that are compared with as many others at a time
_ROUNDING = 1e-6  # of the cosine of a row with itself


class NamedPair(NamedTuple):
    """Two images that are nearly the same."""

    images: tuple[str, str]
    cosine: float
    labels: tuple[str | None, str | None]
    splits: tuple[str | None, str | None]


class PairList(NamedTuple):
    """Pairs of one kind."""

    closest: list[NamedPair]  # at most as many as asked for, the closest first
    total: int
    sheet: Path | None  # a picture of the first ones, if there is an output


@dataclass(frozen=True, kw_only=True)
class DuplicatesResult(Result):
    """Images that are nearly the same."""

    label_conflicts: PairList  # with different labels
    split_leaks: PairList  # in different splits, such as train and test
    pairs: PairList  # all
    groups: list[list[str]]  # formed by all pairs, the largest first
    threshold: Threshold  # its value, and how it was chosen
    path: Path | None  # of the JSON file, if there is an output


def run(config: DuplicatesConfig) -> DuplicatesResult:
    """Find near-duplicates; with an output, write pairs and groups, and sheets of the closest pairs."""
    output = None if config.output is None else Path(config.output)
    sheets = [output and output.with_name(output.stem + ending) for ending in SHEETS]
    check_outputs(config, *filter(None, (output, *sheets)))
    embeddings = read_image_embeddings(config.embeddings)
    device = start_processes().device
    splits, keep = splits_of_names(embeddings.names), config.pairs
    kinds = ClosestPairs(keep, embeddings.labels), ClosestPairs(keep, splits), ClosestPairs(keep)
    warn_of_run(embeddings)
    threshold = threshold_of(config, embeddings)
    linked = find_duplicates(embeddings.values, threshold.value, kinds, device=device)
    conflicts, leaks, pairs = (
        list_pairs(embeddings, splits, kind, sheet) for kind, sheet in zip(kinds, sheets, strict=True)
    )
    groups = [[embeddings.names[row] for row in rows] for rows in linked]
    images = plural(len(embeddings.names), "image")
    listed = "" if len(pairs.closest) == pairs.total else f" ({len(pairs.closest):,} are listed)"
    advice = [] if threshold.origin == "features" else advice_on_threshold(pairs, len(embeddings.names))
    lines = [
        f"{plural(pairs.total, 'pair')}{listed} in {plural(len(groups), 'group')}, among {images}",
        str(threshold),
        *advice,
        *describe(conflicts, "different labels, perhaps of one image"),
        *describe(leaks, "different splits, perhaps with one image in both"),
        *describe(pairs, f"a cosine of {threshold.value:g} or more"),
    ]
    if output:
        content = {
            "embeddings": str(Path(config.embeddings).absolute()),
            "threshold": threshold.value,
            "threshold_chosen": threshold.to_json(),
            "label_conflicts": to_json(conflicts),
            "split_leaks": to_json(leaks),
            **to_json(pairs),
            "groups": groups,
        }
        write_results(output, content)
        lines.append(f"{output}: all pairs and groups")
    return DuplicatesResult(
        label_conflicts=conflicts,
        split_leaks=leaks,
        pairs=pairs,
        groups=groups,
        threshold=threshold,
        path=output,
        text="\n".join(lines),
    )


def threshold_of(config: DuplicatesConfig, embeddings: Embeddings) -> Threshold:
    """Return the threshold that was given, else that of the features, if they can be computed again."""
    if config.threshold is not None:
        return Threshold(config.threshold, "given")
    recorded = embeddings.metadata["weights"]
    try:
        model = load_backbone(recorded["path"], network=recorded["network"])
        threshold = choose_threshold(embeddings, embeddings.freeze(model))
    except (ValueError, OSError, SourceLost) as error:
        log.warning(
            "threshold=%g is not chosen for these features, as no copies of images can be embedded: %s",
            *(FIXED, error),
        )
        return Threshold(FIXED, "fixed")
    if threshold.is_weak:
        log.warning(
            "these features do not tell copies from similar images: at the best threshold %.0f %% of mild "
            "copies are missed, and %.0f %% of the images have another image above it. Use better weights, "
            "such as the published %s; or give threshold= if most images do have copies",
            *(100 * (1 - threshold.copies), 100 * threshold.others, PUBLISHED),
        )
    return threshold


def warn_of_run(embeddings: Embeddings) -> None:
    """Warn if the weights are of a run that learned nothing, by its own record."""
    record = run_of(embeddings.metadata["weights"]["path"])
    if record and (name := state(record)[0]) in BAD:
        text = (
            "the weights are of a run that learned nothing (%s), so pairs may be of different images; see %s"
        )
        log.warning(text, name, f"`dino-vit report {record.folder}`")


def advice_on_threshold(pairs: PairList, images: int) -> list[str]:
    """Return a line on a threshold that these features pass with images that are not copies, if it is one."""
    few = min(math.ceil(TYPICAL * images), len(pairs.closest) - 1)
    if pairs.total <= images:
        return []
    higher = math.floor(1e4 * pairs.closest[few].cosine) / 1e4
    return [
        "more pairs than images: this threshold also matches images that are not copies; "
        f"threshold={higher:g} would be about {plural(few, 'pair')}"
    ]


def splits_of_names(names: Sequence[str]) -> list[str | None]:
    """Return the split of each image by the first-level folder in its name, such as train, in any order."""
    paths = [path.decode() for path in below_shared([name.encode() for name in names])]
    splits = find_splits(map(str.encode, paths))
    folders = (path.partition("/") for path in paths)
    return [folder if slash and folder in splits else None for folder, slash, _ in folders]


def list_pairs(
    embeddings: Embeddings, splits: Sequence[str | None], kind: "ClosestPairs", sheet: Path | None
) -> PairList:
    """Name the images of pairs; draw the closest ones."""
    names, labels, pairs = embeddings.names, embeddings.labels, kind.closest()
    closest = [
        NamedPair((names[a], names[b]), round(cosine, 6), (labels[a], labels[b]), (splits[a], splits[b]))
        for a, b, cosine in pairs
    ]
    if not (sheet and pairs):
        return PairList(closest, kind.total, None)
    rows = [row for pair in pairs[:PAIRS_SHOWN] for row in pair[:2]]
    captions = list[str]()
    for pair in closest[:PAIRS_SHOWN]:
        first, second = titles(pair)
        captions += [f"{pair.cosine:.4f}  {shorten(first)}", shorten(second, 30)]
    panels = embedded_panels(embeddings, zip(rows, captions, strict=True))
    side_by_side = [[*two, BLANK] for two in zip(panels[::2], panels[1::2], strict=True)]
    starts = range(0, len(side_by_side), PAIRS_IN_ROW)
    in_rows = [list(chain(*side_by_side[start : start + PAIRS_IN_ROW]))[:-1] for start in starts]
    with after_figures():
        write_bytes(sheet, draw_sheet(in_rows))
    return PairList(closest, kind.total, sheet)


def titles(pair: NamedPair) -> list[str]:
    """Return the names of the images of a pair, with their labels and splits where these differ."""
    differing = [values for values in (pair.labels, pair.splits) if values[0] != values[1]]
    notes = [", ".join(filter(None, (values[side] for values in differing))) for side in (0, 1)]
    return [f"{name} ({note})" if note else name for name, note in zip(pair.images, notes, strict=True)]


def to_json(pairs: PairList) -> dict[str, Any]:
    """Return pairs for the JSON file."""
    return {"pair_count": pairs.total, "pairs": [pair._asdict() for pair in pairs.closest]}


def describe(pairs: PairList, title: str) -> list[str]:
    """Return lines about pairs, if any: how many, the closest ones and their sheet."""
    lines = [f"{title}: {plural(pairs.total, 'pair')}"] if pairs.total else []
    lines += ["  ".join([f"  {pair.cosine:.4f}", *titles(pair)]) for pair in pairs.closest[:PAIRS_PRINTED]]
    return [*lines, *([f"  {pairs.sheet}: the closest of them"] if pairs.sheet else [])]


class ClosestPairs:
    """The closest of the pairs that are added, and the number of all.

    With a label or a split of each row, only pairs count in which both have one and they differ.
    """

    def __init__(self, keep: int, values: Sequence[str | None] | None = None) -> None:
        self.keep, self.total = keep, 0
        if values is not None:  # several labels in any order
            values = [value and SEPARATOR.join(sorted(value.split(SEPARATOR))) for value in values]
        self.codes = None if values is None else number_labels(values).numbers
        self.pairs, self.cosines = np.empty((0, 2), np.int64), np.empty(0, np.float32)

    def add(self, pairs: Array, cosines: Array) -> None:
        """Add pairs of rows, the lesser one first."""
        if self.codes is not None:
            first, second = self.codes[pairs].T
            differ = (first != second) & (first >= 0) & (second >= 0)
            pairs, cosines = pairs[differ], cosines[differ]
        self.total += len(pairs)
        self.pairs = np.concatenate([self.pairs, pairs])
        self.cosines = np.concatenate([self.cosines, cosines])
        if len(self.pairs) > 2 * self.keep:
            self._prune()

    def closest(self) -> list[Pair]:
        """Return the closest pairs, the closest first."""
        self._prune()
        rows, cosines = self.pairs.tolist(), self.cosines.tolist()
        return [(first, second, cosine) for (first, second), cosine in zip(rows, cosines, strict=True)]

    def _prune(self) -> None:
        order = np.lexsort((self.pairs[:, 1], self.pairs[:, 0], -self.cosines))[: self.keep]
        self.pairs, self.cosines = self.pairs[order], self.cosines[order]


def find_duplicates(
    values: Array, threshold: float, kinds: Sequence[ClosestPairs], *, device: torch.device
) -> list[list[int]]:
    """Compare all rows block by block, add pairs to each kind, and return the groups, the largest first."""
    parents = np.arange(len(values))
    blocks = list(combinations_with_replacement(range(0, len(values), _BLOCK), 2))
    with progress("Comparing blocks of images", len(blocks)) as advance:
        for first, second in blocks:
            left = unit(torch.as_tensor(values[first : first + _BLOCK], device=device))
            right = unit(torch.as_tensor(values[second : second + _BLOCK], device=device))
            products = left @ right.T
            above = products >= threshold - _ROUNDING
            if first == second:
                above = above.triu(1)
            rows = (above.nonzero() + torch.tensor([first, second], device=device)).cpu().numpy()
            unite(parents, rows)
            cosines = products[above].cpu().numpy()
            for kind in kinds:
                kind.add(rows, cosines)
            advance(1)
    members: dict[int, list[int]] = {}
    for row, root in enumerate(_roots(parents, parents).tolist()):
        members.setdefault(root, []).append(row)
    return sorted((rows for rows in members.values() if len(rows) > 1), key=len, reverse=True)


def unite(parents: NDArray[np.int64], pairs: NDArray[np.int64]) -> None:
    """Link the rows of pairs, in place: each row's parent is itself or a lesser row of its group.

    A union-find over arrays, block by block: a low threshold gives billions of pairs.
    """
    while True:
        first, second = _roots(parents, pairs[:, 0]), _roots(parents, pairs[:, 1])
        if (first == second).all():
            return
        # A root that gets several parents here keeps the least; the next round links the others.
        np.minimum.at(parents, np.maximum(first, second), np.minimum(first, second))


def _roots(parents: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    roots: NDArray[np.int64] = parents[rows]
    while (parents[roots] != roots).any():
        roots = parents[roots]
    return roots
