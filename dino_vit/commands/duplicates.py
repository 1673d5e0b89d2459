"""Near-duplicates: pairs of images whose embeddings have a cosine above a threshold, and groups of them."""

from __future__ import annotations

import csv
import io
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from dino_vit.config.settings import Count, CountOrZero, Settings, setting
from dino_vit.core.progress import Advance, progress
from dino_vit.core.runtime import start_processes
from dino_vit.core.storage import write_bytes
from dino_vit.eval.embeddings.files import Embeddings, read_embeddings
from dino_vit.eval.embeddings.gallery import Cell, Images, write_gallery
from dino_vit.eval.knn.neighbours import unit

log = logging.getLogger("dino_vit")

_BLOCK = 2048  # rows compared at a time with as many others
_ROUNDING = 1e-6  # of the cosine of a row with itself
_PRINTED = 10
_PAIRS_A_LINE = 3


class DuplicatesConfig(Settings):
    """List images that are nearly the same."""

    embeddings: str = Field(description="file that `dino-vit embed` wrote")
    threshold: Annotated[float, Field(gt=-1, le=1)] = setting(0.95, "cosine from which two images are alike")
    pairs: Count = setting(10_000, "the closest pairs to list; groups are made of all")
    shown: CountOrZero = setting(40, "pairs on the sheet")
    output: str = setting("duplicates.json", "file to write, .json or .csv; the sheet goes beside it as PNG")

    positional: ClassVar = ("embeddings",)
    also_known_as: ClassVar = {"threshold": "cosine similarity", "pairs": "limit top", "output": "out"}


@dataclass(frozen=True, kw_only=True)
class Duplicates:
    """Pairs of rows, the closest first, and for each row the least row that it is linked with."""

    rows: NDArray[np.int64]  # (pairs, 2), the lesser one first
    cosines: NDArray[np.float32]
    count: int  # of all pairs, listed or not
    group: NDArray[np.int64]

    def groups(self) -> list[list[int]]:
        """Return the rows of each group of two or more, the largest group first."""
        order = np.argsort(self.group, kind="stable")
        starts = np.flatnonzero(np.diff(self.group[order], prepend=-1))
        found = [part.tolist() for part in np.split(order, starts[1:]) if len(part) > 1]
        return sorted(found, key=lambda rows: (-len(rows), rows[0]))


def run(config: DuplicatesConfig) -> int:
    """Write the list and its sheet, and print the closest pairs."""
    output = Path(config.output)
    if output.suffix not in (".json", ".csv"):
        raise ValueError(f"output={output} must end in .json or .csv")
    embeddings = read_embeddings(Path(config.embeddings))
    if embeddings.values.ndim != 2:
        raise ValueError(f"{config.embeddings} holds patch tokens; this needs one embedding an image")
    device = start_processes(trackers=(), folder=Path()).device
    found = find_duplicates(embeddings.values, config.threshold, keep=config.pairs, device=device)
    write = _write_csv if output.suffix == ".csv" else _write_json
    write(output, embeddings, found, config)
    _print(embeddings, found, config)
    print(f"{output}: {len(found.rows):,} of {found.count:,} pairs, {len(found.groups()):,} groups")
    if len(found.rows) and config.shown:
        _draw(embeddings, found, config.shown, output.with_suffix(".png"))
        print(f"{output.with_suffix('.png')}: the closest of them")
    return 0


def find_duplicates(values: NDArray[Any], threshold: float, *, keep: int, device: torch.device) -> Duplicates:
    """Compare all rows with all, block by block; of the pairs the closest are kept, groups are of all."""
    parents = np.arange(len(values))
    pairs, cosines, count = np.empty((0, 2), np.int64), np.empty(0, np.float32), 0
    total = (len(values) + _BLOCK - 1) // _BLOCK
    with progress("Comparing blocks of images", total * (total + 1) // 2) as advance:
        for rows, scores in _compared(values, threshold, device, advance):
            unite(parents, rows[:, 0], rows[:, 1])
            count += len(rows)
            pairs, cosines = np.concatenate([pairs, rows]), np.concatenate([cosines, scores])
            if len(pairs) > 2 * keep:
                pairs, cosines = _closest(pairs, cosines, keep)
    pairs, cosines = _closest(pairs, cosines, keep)
    return Duplicates(rows=pairs, cosines=cosines, count=count, group=_roots(parents, parents))


def _compared(
    values: NDArray[Any], threshold: float, device: torch.device, advance: Advance
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
    """Yield the pairs of rows above the threshold with their cosines."""
    for first in range(0, len(values), _BLOCK):
        left = unit(torch.as_tensor(values[first : first + _BLOCK], device=device))
        for second in range(first, len(values), _BLOCK):
            right = unit(torch.as_tensor(values[second : second + _BLOCK], device=device))
            cosines = left @ right.T
            above = cosines >= threshold - _ROUNDING
            if first == second:
                above = above.triu(1)
            found = above.nonzero()
            if len(found):
                offset = torch.tensor([first, second], device=device)
                yield (found + offset).cpu().numpy(), cosines[above].cpu().numpy()
            advance(1)


def _closest(
    pairs: NDArray[np.int64], cosines: NDArray[np.float32], keep: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    order = np.lexsort((pairs[:, 1], pairs[:, 0], -cosines))[:keep]
    return pairs[order], cosines[order]


def unite(parents: NDArray[np.int64], left: NDArray[np.int64], right: NDArray[np.int64]) -> None:
    """Link rows, in place: each row's parent is itself or a lesser row of its group."""
    while True:
        first, second = _roots(parents, left), _roots(parents, right)
        apart = first != second
        if not apart.any():
            return
        lesser, greater = np.minimum(first, second)[apart], np.maximum(first, second)[apart]
        np.minimum.at(parents, greater, lesser)  # of several, the least; the others in the next round


def _roots(parents: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    roots: NDArray[np.int64] = parents[rows]
    while (parents[roots] != roots).any():
        roots = parents[roots]
    return roots


def _write_json(path: Path, embeddings: Embeddings, found: Duplicates, config: DuplicatesConfig) -> None:
    names = embeddings.names
    result = {
        "embeddings": str(Path(config.embeddings).absolute()),
        "threshold": config.threshold,
        "pair_count": found.count,
        "pairs": [
            {"images": [names[first], names[second]], "cosine": round(cosine, 6)}
            for (first, second), cosine in zip(found.rows.tolist(), found.cosines.tolist(), strict=True)
        ],
        "groups": [[names[row] for row in rows] for rows in found.groups()],
    }
    write_bytes(path, json.dumps(result, indent=1).encode())


def _write_csv(path: Path, embeddings: Embeddings, found: Duplicates, config: DuplicatesConfig) -> None:
    number = {row: place for place, rows in enumerate(found.groups()) for row in rows}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("first", "second", "cosine", "group"))
    for (first, second), cosine in zip(found.rows.tolist(), found.cosines.tolist(), strict=True):
        names = embeddings.names[first], embeddings.names[second]
        writer.writerow((*names, f"{cosine:.6f}", number[first]))
    write_bytes(path, text.getvalue().encode())


def _print(embeddings: Embeddings, found: Duplicates, config: DuplicatesConfig) -> None:
    if not found.count:
        print(f"no two of the {len(embeddings):,} images have a cosine of {config.threshold:g} or more")
    for (first, second), cosine in zip(found.rows[:_PRINTED].tolist(), found.cosines.tolist(), strict=False):
        print(f"{cosine:.4f}  {embeddings.names[first]}  {embeddings.names[second]}")


def _draw(embeddings: Embeddings, found: Duplicates, count: int, path: Path) -> None:
    """Draw the closest pairs, several to a line."""
    images, names = Images(embeddings), embeddings.names
    if images.missing:
        log.warning("the sheet has no images: %s", images.missing)
    pairs = [
        (
            Cell(images.picture(first), f"{cosine:.4f}  {names[first]}"),
            Cell(images.picture(second), names[second]),
        )
        for (first, second), cosine in zip(found.rows[:count].tolist(), found.cosines.tolist(), strict=False)
    ]
    lines = [
        [cell for pair in pairs[start : start + _PAIRS_A_LINE] for cell in (*pair, None)][:-1]
        for start in range(0, len(pairs), _PAIRS_A_LINE)
    ]
    write_gallery(lines, path)
