"""A table of linear classifiers over all processes: how often each is right, and which is the best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dino_vit.core.distributed import all_gather, share
from dino_vit.eval.accuracy import Accuracy, accuracy, per_class_accuracy, top_k_accuracy
from dino_vit.eval.datasets import LabelledFeatures
from dino_vit.eval.features.extraction import FeatureSpec
from dino_vit.eval.linear.probes import Heads, count_right, rank_classes

RANKED = 5


class Candidates(NamedTuple):
    """Heads among which the best is sought: a row for each value of a setting, a column for each input."""

    setting: str
    rows: Sequence[float]
    columns: Sequence[FeatureSpec]
    heads: Sequence[Heads]  # one a column, of this process's share of the rows
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Choice:
    """The table of all processes and its best head."""

    candidates: Candidates
    val: list[list[Accuracy]]  # by row and column
    held_out: list[list[Accuracy]] | None  # that the best was chosen by, where it was not val
    best: tuple[int, int]
    ranked: Tensor  # (n, at most 5), the best head's classes of the images of val, best first
    targets: Tensor

    def results(self, classes: Sequence[str]) -> dict[str, Any]:
        """Return what there is to know, for JSON."""
        per_class = per_class_accuracy(self.ranked, self.targets)
        row, column = self.best
        return {
            "classes": len(classes),
            "best": {
                **self._cell(row, column),
                "top5": top_k_accuracy(self.ranked, self.targets, RANKED)._asdict(),
                "per_class": {classes[label]: of._asdict() for label, of in per_class.items()},
            },
            "table": [
                self._cell(row, column)
                for row in range(len(self.candidates.rows))
                for column in range(len(self.candidates.columns))
            ],
            "notes": list(self.candidates.notes),
        }

    def _cell(self, row: int, column: int) -> dict[str, Any]:
        read = self.candidates.columns[column]
        cell = {
            self.candidates.setting: self.candidates.rows[row],
            "blocks": read.blocks,
            "mean": read.tokens == "cls+mean",
            "top1": self.val[row][column]._asdict(),
        }
        return cell if self.held_out is None else cell | {"held_out": self.held_out[row][column]._asdict()}

    def text(self, classes: Sequence[str], learned: int) -> str:
        """Return the table and what is to be said of it."""
        row, column = self.best
        setting, rows, columns, _, notes = self.candidates
        top1, top5 = (top_k_accuracy(self.ranked, self.targets, k) for k in (1, RANKED))
        titles = [words(one) for one in columns]
        lines = [
            f"top-1 in % of {len(self.targets):,} images of {len(classes)} classes, learned from {learned:,}",
            "  ".join([f"{setting:>8}", *titles]),
        ]
        for i, value in enumerate(rows):
            cells = [
                f"{f'{one.percent:.2f}' + ('*' if (i, j) == (row, column) else ' '):>{len(titles[j])}}"
                for j, one in enumerate(self.val[i])
            ]
            lines.append("  ".join([f"{value:>8.3g}", *cells]))
        lines.append(f"* best, {setting} {rows[row]:.3g}, {titles[column]}: top-1 {top1}, top-5 {top5}")
        lines.append(self._chosen_on())
        return "\n".join([*lines, *notes])

    def _chosen_on(self) -> str:
        if self.held_out is None:
            return (
                "chosen on the images that it is reported for, as published, which flatters it a little; "
                "select=train chooses on a tenth of the training images"
            )
        held_out = self.held_out[self.best[0]][self.best[1]]
        return f"chosen on {held_out.images:,} training images that no head learned from: {held_out}"


def words(kind: FeatureSpec) -> str:
    """Return what a head reads in words."""
    blocks = "CLS" if kind.blocks == 1 else f"CLS of {kind.blocks} blocks"
    return f"{blocks} + mean patch" if kind.tokens == "cls+mean" else blocks


def choose(candidates: Candidates, chosen_on: LabelledFeatures, val: LabelledFeatures) -> Choice:
    """Count how often every head is right, and pick the one that is so most often; all processes get it."""
    right = _count_all(candidates, val)
    ahead = right if chosen_on is val else _count_all(candidates, chosen_on)
    best = divmod(int(ahead.argmax()), len(candidates.columns))
    ranked = _rank_by(candidates, *best, val)
    return Choice(
        candidates=candidates,
        val=_accuracies(right, len(val)),
        held_out=None if ahead is right else _accuracies(ahead, len(chosen_on)),
        best=best,
        ranked=ranked,
        targets=val.targets.to(ranked.device),
    )


def _count_all(candidates: Candidates, on: LabelledFeatures) -> Tensor:
    """Return how many images each head of all processes classifies rightly, (rows, columns)."""
    mine = [count_right(heads, on.features, on.targets) for heads in candidates.heads]
    return all_gather(torch.stack(mine, dim=1))


def _rank_by(candidates: Candidates, row: int, column: int, on: LabelledFeatures) -> Tensor:
    """Return the classes as one head ranks them, which is at hand in one process alone."""
    places = share(range(len(candidates.rows)))
    heads = candidates.heads[column]
    if row in places:
        return all_gather(rank_classes(heads.only(row - int(places[0])), on.features, best=RANKED))
    columns = min(RANKED, heads.bias.shape[1])
    return all_gather(torch.empty(0, columns, dtype=torch.long, device=heads.bias.device))


def _accuracies(right: Tensor, images: int) -> list[list[Accuracy]]:
    return [[accuracy(count, images) for count in row] for row in right.tolist()]


def one_head(head: Heads, val: LabelledFeatures, classes: Sequence[str]) -> tuple[dict[str, Any], str]:
    """Return how often one head is right, as results and as text."""
    ranked = rank_classes(head, val.features)
    targets = val.targets.to(ranked.device)
    top1, top5 = top_k_accuracy(ranked, targets), top_k_accuracy(ranked, targets, RANKED)
    per_class = per_class_accuracy(ranked, targets)
    found = {
        "images": len(val),
        "classes": len(classes),
        "top1": top1._asdict(),
        "top5": top5._asdict(),
        "per_class": {classes[label]: of._asdict() for label, of in per_class.items()},
    }
    return found, f"top-1 {top1}, top-5 {top5} of {len(val):,} images of {len(classes)} classes"
