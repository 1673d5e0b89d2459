"""Find near-duplicates in an embedding file: pairs of images with a high cosine, and groups of such pairs."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from dino_vit.commands import Result
from dino_vit.config.commands import DuplicatesConfig
from dino_vit.core.runtime import start_processes
from dino_vit.core.text import plural, progress
from dino_vit.eval.embeddings import Array, Embeddings, embedded_panels, read_image_embeddings
from dino_vit.eval.knn import unit
from dino_vit.eval.maps.pictures import write_sheet
from dino_vit.eval.results import write_results

PAIRS_PRINTED, PAIRS_SHOWN = 10, 20  # in the text, on the sheet
Pair = tuple[int, int, float]  # two rows, the lesser one first, and their cosine
_BLOCK = 2048  # rows that are compared with as many others at a time
_ROUNDING = 1e-6  # of the cosine of a row with itself


class NamedPair(NamedTuple):
    """Two images that are nearly the same."""

    first: str
    second: str
    cosine: float


@dataclass(frozen=True, kw_only=True)
class DuplicatesResult(Result):
    """Images that are nearly the same."""

    pairs: list[NamedPair]  # the closest ones, the closest first
    total: int  # number of pairs, listed or not
    groups: list[list[str]]  # formed by all pairs, the largest first
    path: Path
    sheet: Path | None


def run(config: DuplicatesConfig) -> DuplicatesResult:
    """Write pairs and groups of near-duplicates and a sheet of the closest pairs."""
    output = Path(config.output)
    if output.suffix != ".json":
        raise ValueError(f"output={output} must end in .json")
    embeddings, device = read_image_embeddings(config.embeddings), start_processes().device
    names, values = embeddings.names, embeddings.values
    closest, total, linked = find_duplicates(values, config.threshold, keep=config.pairs, device=device)
    pairs = [NamedPair(names[first], names[second], cosine) for first, second, cosine in closest]
    groups = [[names[row] for row in rows] for rows in linked]
    content = {
        "embeddings": str(Path(config.embeddings).absolute()),
        "threshold": config.threshold,
        "pair_count": total,
        "pairs": [{"images": pair[:2], "cosine": round(pair.cosine, 6)} for pair in pairs],
        "groups": groups,
    }
    write_results(output, content)
    lines = [f"{cosine:.4f}  {first}  {second}" for first, second, cosine in pairs[:PAIRS_PRINTED]]
    above = f"a cosine of {config.threshold:g} or more"
    if not pairs:
        lines.append(f"no two of the {plural(len(names), 'image')} have {above}")
    lines.append(f"{output}: {len(pairs):,} of {plural(total, 'pair')}, {plural(len(groups), 'group')}")
    sheet = output.with_suffix(".png") if pairs else None
    if sheet:
        draw_pairs(embeddings, closest[:PAIRS_SHOWN], sheet)
        lines.append(f"{sheet}: the closest pairs")
    return DuplicatesResult(
        pairs=pairs, total=total, groups=groups, path=output, sheet=sheet, text="\n".join(lines)
    )


def find_duplicates(
    values: Array, threshold: float, *, keep: int, device: torch.device
) -> tuple[list[Pair], int, list[list[int]]]:
    """Compare all rows block by block.

    Return the `keep` closest pairs, the closest first; the number of pairs; and the groups that all of them
    form, the largest first.
    """
    parents = np.arange(len(values))
    pairs, cosines, total = np.empty((0, 2), np.int64), np.empty(0, np.float32), 0
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
            total += len(rows)
            pairs = np.concatenate([pairs, rows])
            cosines = np.concatenate([cosines, products[above].cpu().numpy()])
            if len(pairs) > 2 * keep:
                pairs, cosines = _closest(pairs, cosines, keep)
            advance(1)
    pairs, cosines = _closest(pairs, cosines, keep)
    members: dict[int, list[int]] = {}
    for row, root in enumerate(_roots(parents, parents).tolist()):
        members.setdefault(root, []).append(row)
    groups = sorted((rows for rows in members.values() if len(rows) > 1), key=len, reverse=True)
    closest = [(a, b, cosine) for (a, b), cosine in zip(pairs.tolist(), cosines.tolist(), strict=True)]
    return closest, total, groups


def _closest(pairs: Array, cosines: Array, keep: int) -> tuple[Array, Array]:
    order = np.lexsort((pairs[:, 1], pairs[:, 0], -cosines))[:keep]
    return pairs[order], cosines[order]


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


def draw_pairs(embeddings: Embeddings, pairs: Sequence[Pair], path: Path) -> None:
    """Draw pairs, one in a row."""
    captions = [(row, embeddings.names[row]) for first, second, _ in pairs for row in (first, second)]
    panels = embedded_panels(embeddings, captions)
    rows = list(zip(panels[::2], panels[1::2], strict=True))
    write_sheet(rows, path, names=[f"{cosine:.4f}" for _, _, cosine in pairs])
