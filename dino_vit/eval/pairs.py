"""Which of several backbones is best by figures of the same images, and how sure that is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from dino_vit.eval.statistics import Difference, PerImageMetric, difference

CHANCE = 0.05  # how often a backbone as good as the best may look worse, whatever the number of backbones


@dataclass(frozen=True)
class Pair:
    """Two backbones by one figure."""

    figure: str
    better: str
    other: str
    difference: Difference
    corrected_p: float  # its p, times the pairs by this figure (Bonferroni)


Figures = Mapping[str, Mapping[str, PerImageMetric]]  # by title, then by the name of the backbone


def compare_pairs(figures: Figures) -> list[Pair]:
    """Compare all pairs by every figure, image by image."""
    pairs = []
    for title, backbones in figures.items():
        best_first = sorted(backbones, key=lambda name: backbones[name].mean, reverse=True)
        by_figure = list(combinations(best_first, 2))
        for better, other in by_figure:
            found = difference(backbones[better], backbones[other])
            pairs.append(Pair(title, better, other, found, min(1.0, len(by_figure) * found.p)))
    return pairs


def standings(figures: Figures, pairs: Sequence[Pair]) -> dict[str, tuple[str, ...]]:
    """Return who is best by each figure, followed by those not significantly worse on these images."""
    by_title = {}
    for title, backbones in figures.items():
        best = max(backbones, key=lambda name: backbones[name].mean)
        others = [pair for pair in pairs if (pair.figure, pair.better) == (title, best)]
        by_title[title] = (best, *(pair.other for pair in others if pair.corrected_p >= CHANCE))
    return by_title


def verdict(by_title: Mapping[str, tuple[str, ...]]) -> str:
    """Say which backbone to take, or that it depends."""
    if not by_title:
        text = "There are no labels to judge by: use a folder for each class, or labels=FILE."
        return f"{text} The effective rank alone does not tell which features are better."
    top = [*by_title.values()]
    everywhere = [name for name in top[0] if all(name in names for names in top)]
    if everywhere:
        titles = " and ".join(by_title)
        if all(names == (everywhere[0],) for names in top):
            return f"Take {everywhere[0]}: on these images it is the best by {titles}."
        first, *others = everywhere
        text = " or ".join(everywhere)
        if others and all(names[0] == first for names in top):
            text = f"{first}; {' and '.join(others)} may be as good"
        return f"Take {text}: no significant difference on these images by {titles}."
    wins = "; ".join(f"by {title} {best}" for title, (best, *_) in by_title.items())
    return f"It depends on the figure. The best is {wins}."
