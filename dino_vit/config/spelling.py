"""Find the setting that a mistyped key was meant to be."""

from collections.abc import Mapping, Sequence


def distance(a: str, b: str) -> int:
    """Count the insertions, deletions, substitutions and swaps of neighbours between `a` and `b`."""
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        earlier, before, row = before, row, [i]
        for j, y in enumerate(b, start=1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and y == a[i - 2]:
                cost = min(cost, earlier[j - 2] + 1)
            row.append(cost)
    return row[-1]


def nearest(typed: str, keys: Mapping[str, Sequence[str]]) -> list[str]:
    """Return up to three of the dotted `keys` that `typed` may mean; their values are their other names."""
    typed = typed.strip("-").replace("-", "_")
    scores = {
        key: min(_score(typed, key), *(_alias(typed, alias) for alias in keys[key]), 99) for key in keys
    }
    best = min(scores.values(), default=99)
    if best > max(2, len(typed) // 3):
        return []
    return [key for key, score in scores.items() if score == best][:3]


def _score(typed: str, key: str) -> float:
    """Score the whole path, or the last name alone when the section is missing or another one."""
    name, key_name = typed.rpartition(".")[2], key.rpartition(".")[2]
    scores: list[float] = [distance(typed, key), distance(name, key_name) + 1]
    if key_name in (typed, typed.replace(".", "_")):
        scores.append(0.5)
    if len(name) > 3 and name in key_name:
        scores.append(2)
    return min(scores)


def _alias(typed: str, alias: str) -> float:
    """Score another name of a key; with a section before it, it is less likely to be meant."""
    return distance(typed.rpartition(".")[2], alias) + (1.25 if "." in typed else 0.25)
