"""Which of several backbones is the best, by figures of the same images."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from dino_vit.eval.confidence import Difference, Measured, difference

CHANCE = 0.05  # how often a backbone as good as the best may look worse, whatever the number of backbones

Figures = Mapping[str, Mapping[str, Measured]]  # by title, then by the name of the backbone


class Pair(NamedTuple):
    """Two backbones by one figure."""

    figure: str
    better: str
    other: str
    difference: Difference


class Standing(NamedTuple):
    """Who is best by a figure, and who cannot be told from the best on these images."""

    best: str
    tied: tuple[str, ...]


def compare_pairs(figures: Figures) -> list[Pair]:
    """Compare all pairs by every figure, image by image."""
    pairs = []
    for title, of in figures.items():
        for one, other in combinations(of, 2):
            found = difference(of[one], of[other])
            if found.points < 0:
                one, other = other, one
                found = Difference(-found.points, -found.high, -found.low, found.p)
            pairs.append(Pair(title, one, other, found))
    return pairs


def standings(figures: Figures, pairs: Sequence[Pair]) -> dict[str, Standing]:
    """Return who is best by each figure, and who is as good.

    The best is compared with all others, so each p is multiplied by their number (Bonferroni).
    """
    found = {}
    for title, of in figures.items():
        limit = CHANCE / max(1, len(of) - 1)
        best = max(of, key=lambda name: of[name].value)
        beside = {
            pair.other if pair.better == best else pair.better: pair.difference.p
            for pair in pairs
            if pair.figure == title and best in (pair.better, pair.other)
        }
        found[title] = Standing(best, tuple(name for name in of if beside.get(name, 0) >= limit))
    return found


def verdict(found: Mapping[str, Standing]) -> str:
    """Say which backbone to take, or that it depends."""
    if not found:
        return (
            "There are no labels and no masks to judge by. "
            "The effective rank alone does not tell which features are better."
        )
    names = dict.fromkeys(name for one in found.values() for name in (one.best, *one.tied))
    everywhere = [name for name in names if all(name in (one.best, *one.tied) for one in found.values())]
    if not everywhere:
        wins = "; ".join(f"by {title} {one.best}" for title, one in found.items())
        return f"It depends on what you need. The best is {wins}."
    wins_of = {name: sum(one.best == name for one in found.values()) for name in everywhere}
    best = max(everywhere, key=lambda name: wins_of[name])
    tied = [name for name in everywhere if name != best]
    quality = "the best" if wins_of[best] == len(found) else "the best or as good as the best"
    text = f"Take {best}: it is {quality} by {' and '.join(found)}."
    if tied:
        text += f" On these images {' and '.join(tied)} cannot be told from it."
    return text
