"""Find near-duplicates in an embedding file: pairs of images with a high cosine, and groups of such pairs."""

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Annotated, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from dino_vit.commands import Result
from dino_vit.config.settings import Count, FewOrZero, Settings, setting
from dino_vit.core.progress import plural, progress
from dino_vit.core.runtime import start_processes
from dino_vit.core.storage import replacing, write_bytes
from dino_vit.eval.embeddings import Array, EmbeddedImages, Embeddings, read_image_embeddings
from dino_vit.eval.maps.pictures import Panel, shorten, write_sheet
from dino_vit.eval.neighbours import format_cosines, unit

PAIRS_PRINTED = 10
PAIRS_PER_ROW = 3  # of the sheet
Pair = tuple[int, int, float]  # two rows, the lesser one first, and their cosine
_BLOCK = 2048  # rows that are compared with as many others at a time
_ROUNDING = 1e-6  # of the cosine of a row with itself


class DuplicatesConfig(Settings):
    """List images that are nearly the same."""

    embeddings: str = Field(description="file that `dino-vit embed` wrote")
    threshold: Annotated[float, Field(gt=-1, le=1)] = setting(0.95, "minimum cosine of a pair")
    pairs: Count = setting(10_000, "closest pairs to list; groups are formed by all pairs")
    shown: FewOrZero = setting(40, "pairs on the sheet")
    output: str = setting("duplicates.json", "file to write, .json or .csv; the sheet goes beside it as PNG")

    positional: ClassVar = ("embeddings",)


class Duplicates(NamedTuple):
    """Pairs and groups of rows that are near-duplicates."""

    pairs: list[Pair]  # the closest ones, the closest first
    total: int  # number of pairs, listed or not
    groups: list[list[int]]  # formed by all pairs, the largest first


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
    if output.suffix not in (".json", ".csv"):
        raise ValueError(f"output={output} must end in .json or .csv")
    embeddings = read_image_embeddings(config.embeddings)
    device = start_processes().device
    found = find_duplicates(embeddings.values, config.threshold, keep=config.pairs, device=device)
    names = embeddings.names
    if output.suffix == ".csv":
        write_csv(output, found, names)
    else:
        write_json(output, found, names, config)
    sheet = output.with_suffix(".png") if found.total and config.shown else None
    if sheet:
        draw_pairs(embeddings, found.pairs[: config.shown], sheet)
    return DuplicatesResult(
        pairs=[NamedPair(names[first], names[second], cosine) for first, second, cosine in found.pairs],
        total=found.total,
        groups=[[names[row] for row in rows] for rows in found.groups],
        path=output,
        sheet=sheet,
        text="\n".join(describe(found, names, config, sheet)),
    )


def describe(
    found: Duplicates, names: Sequence[str], config: DuplicatesConfig, sheet: Path | None
) -> Iterator[str]:
    """Yield the closest pairs and what was written as lines."""
    if not found.total:
        yield f"no two of the {plural(len(names), 'image')} have a cosine of {config.threshold:g} or more"
    shown = found.pairs[:PAIRS_PRINTED]
    for (first, second, _), text in zip(shown, _cosines(shown), strict=True):
        yield f"{text}  {names[first]}  {names[second]}"
    counts = f"{len(found.pairs):,} of {plural(found.total, 'pair')}, {plural(len(found.groups), 'group')}"
    yield f"{config.output}: {counts}"
    if advice := describe_threshold(found, config.threshold, images=len(names)):
        yield advice
    if sheet:
        yield f"{sheet}: the closest pairs"


def describe_threshold(found: Duplicates, threshold: float, *, images: int) -> str | None:
    """Say that a threshold does not separate duplicates if most pairs reach it, and which one would."""
    possible = images * (images - 1) // 2
    if not 2 * found.total > possible > 1:
        return None
    text = (
        f"{found.total:,} of all {possible:,} pairs have a cosine of {threshold:g} or more: this threshold "
        "does not separate duplicates from other pairs"
    )
    number = min(images, len(found.pairs))
    cosine = found.pairs[number - 1][2]
    if cosine <= threshold + _ROUNDING:
        return f"{text}, and no higher one would"
    return f"{text}. The closest {number:,} have {cosine:.6f} or more; try threshold={cosine:.6f}"


def find_duplicates(values: Array, threshold: float, *, keep: int, device: torch.device) -> Duplicates:
    """Compare all rows block by block; return the `keep` closest pairs, and the groups of all pairs."""
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
            found = (above.nonzero() + torch.tensor([first, second], device=device)).cpu().numpy()
            unite(parents, found)
            total += len(found)
            pairs = np.concatenate([pairs, found])
            cosines = np.concatenate([cosines, products[above].cpu().numpy()])
            if len(pairs) > 2 * keep:
                pairs, cosines = _closest(pairs, cosines, keep)
            advance(1)
    pairs, cosines = _closest(pairs, cosines, keep)
    closest = [(a, b, cosine) for (a, b), cosine in zip(pairs.tolist(), cosines.tolist(), strict=True)]
    members: dict[int, list[int]] = {}
    for row, root in enumerate(_roots(parents, parents).tolist()):
        members.setdefault(root, []).append(row)
    groups = sorted((rows for rows in members.values() if len(rows) > 1), key=len, reverse=True)
    return Duplicates(closest, total, groups)


def _closest(pairs: Array, cosines: Array, keep: int) -> tuple[Array, Array]:
    order = np.lexsort((pairs[:, 1], pairs[:, 0], -cosines))[:keep]
    return pairs[order], cosines[order]


def unite(parents: NDArray[np.int64], pairs: NDArray[np.int64]) -> None:
    """Link the rows of pairs, in place: each row's parent is itself or a lesser row of its group.

    A union-find over arrays: a million pairs take 0.3 s, with networkx' UnionFind 5 s. SciPy's connected
    components would need all pairs in memory, and a low threshold gives billions.
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


def write_json(path: Path, found: Duplicates, names: Sequence[str], config: DuplicatesConfig) -> None:
    result = {
        "embeddings": str(Path(config.embeddings).absolute()),
        "threshold": config.threshold,
        "pair_count": found.total,
        "pairs": [
            {"images": [names[first], names[second]], "cosine": round(cosine, 6)}
            for first, second, cosine in found.pairs
        ],
        "groups": [[names[row] for row in rows] for rows in found.groups],
    }
    write_bytes(path, json.dumps(result, indent=1).encode())


def write_csv(path: Path, found: Duplicates, names: Sequence[str]) -> None:
    groups = {row: number for number, rows in enumerate(found.groups) for row in rows}
    with replacing(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("first", "second", "cosine", "group"))
        for first, second, cosine in found.pairs:
            writer.writerow((names[first], names[second], f"{cosine:.6f}", groups[first]))


def draw_pairs(embeddings: Embeddings, pairs: Sequence[Pair], path: Path) -> None:
    """Draw pairs, several in a row with gaps between them."""
    images = EmbeddedImages(embeddings)
    panels: list[Panel | None] = []
    for (first, second, _), text in zip(pairs, _cosines(pairs), strict=True):
        panels.append(images.panel(first, f"{text}  {shorten(embeddings.names[first], 20)}"))
        panels += [images.panel(second, embeddings.names[second]), None]
    width = 3 * PAIRS_PER_ROW
    write_sheet([panels[start : start + width][:-1] for start in range(0, len(panels), width)], path)


def _cosines(pairs: Sequence[Pair]) -> list[str]:
    return format_cosines([cosine for _, _, cosine in pairs])
