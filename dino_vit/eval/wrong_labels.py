"""Given labels that look wrong, listed only where by the folds at least half of the list would be wrong.

A classifier that learned from the other folds says that an image is of class y with probability p(y). If a
share e of the labels were swapped at random, the given label would be y with probability
(1 - e) p(y) + e (1 - p(y)) / (c - 1). Labels that were then more probably swapped than not are listed where
this explains all given labels better than e = 0 does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dino_vit.core.text import plural
from dino_vit.eval.cross_validation import REGRESSION, Trials, of_kinds

SWAPPED = 0.05  # e
EVIDENCE = 5.0  # the least difference of the logarithms of the likelihoods
SHARE = 0.4  # of swapped labels that must be found; poorer features are wrong too often themselves
LEAST = 3  # swapped labels that are found, as fewer would be chance
TEMPERATURES = torch.logspace(-1.5, 1.5, 31, dtype=torch.double).tolist()


@dataclass(frozen=True)
class Doubts:
    """What is said of the given labels, and those that look wrong."""

    line: str = ""  # empty: they were not looked at
    columns: dict[str, Any] = field(default_factory=dict)  # of a table; empty: none looks wrong


def find_wrong_labels(trials: Trials, classes: Sequence[str], names: Sequence[str]) -> Doubts:
    """Return the labels that look wrong, the least probable first, and a line about all of them."""
    # Votes of a few neighbours are no probabilities: most classes have none.
    regressions, rows = of_kinds(trials, REGRESSION), trials.tested.nonzero()[:, 0]
    given = trials.targets[rows]
    if trials.task != "multiclass" or not regressions.tried or len(torch.unique(given)) < 2:
        return Doubts()
    scores = regressions.scores[regressions.best(trials.tested)][rows]
    outputs, evidence = explain(scores.double(), given)
    suspected, share = suspects(outputs, given)
    count, found = int(suspected.sum()), SWAPPED * share * len(given)
    listed = count > 0 and evidence >= EVIDENCE
    is_poor = (outputs.argmax(dim=1) == given).double().mean() < 0.5
    if is_poor or share < SHARE or found < LEAST or (listed and count > 2 * found):
        return Doubts("Mistakes in the given labels cannot be found reliably")
    if not listed:
        return Doubts(f"No given label looks wrong (of 100 wrong ones about {100 * share:.0f} would)")
    labels = plural(len(names), "given label")
    line = f"{count:,} of {labels} may be wrong, and probably half of these or more are: look at them"
    probability, other = outputs.gather(1, given[:, None])[:, 0], outputs.max(dim=1)
    chosen = probability.argsort(stable=True)
    chosen = chosen[suspected[chosen]]
    columns = {
        "name": [names[trials.rows[row]] for row in rows[chosen].tolist()],
        "label": [classes[number] for number in given[chosen].tolist()],
        "probability": probability[chosen].cpu().numpy().round(4),
        "other": [classes[number] for number in other.indices[chosen].tolist()],
        "other_probability": other.values[chosen].cpu().numpy().round(4),
    }
    return Doubts(line, columns)


def explain(scores: Tensor, given: Tensor) -> tuple[Tensor, float]:
    """Return probabilities (n, c) if labels are swapped, and how much better these explain the given labels.

    Their temperature has the highest likelihood; if none were swapped, it would have to be higher.
    """
    others, by_share = len(torch.unique(given)) - 1, dict[float, list[float]]()
    likely = [(scores / each).softmax(dim=1).gather(1, given[:, None])[:, 0] for each in TEMPERATURES]
    for share in (0.0, SWAPPED):
        mixed = ((1 - share) * p + share * (1 - p) / others for p in likely)
        by_share[share] = [float(p.clamp(min=1e-300).log().sum()) for p in mixed]
    best = max(by_share[SWAPPED])
    temperature = TEMPERATURES[by_share[SWAPPED].index(best)]
    return (scores / temperature).softmax(dim=1), best - max(by_share[0.0])


def suspects(outputs: Tensor, given: Tensor) -> tuple[Tensor, float]:
    """Return which labels were more probably swapped than not, (n,), and which share of swapped ones are."""
    present = torch.unique(given)
    p = outputs[:, present]
    improbable = p * (1 - SWAPPED) <= (1 - p) * SWAPPED / (len(present) - 1)
    suspected = improbable.gather(1, torch.searchsorted(present, given)[:, None])[:, 0]
    swaps = improbable.numel() - len(given)  # each image with each other class
    return suspected, int(improbable.sum() - suspected.sum()) / swaps
