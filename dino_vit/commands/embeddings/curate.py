"""Weigh embedded images for pretraining: copies are never drawn, and clusters are drawn equally often.

Hierarchical k-means as in "Automatic Data Curation for Self-Supervised Learning" (Vo et al., 2024): images
are clustered, then the centroids, and so on. Each level clusters again only what is closest to its centroids,
so that these spread over all kinds of images and not over the frequent ones.
"""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dino_vit.commands import Result, format_table
from dino_vit.commands.embeddings.duplicates import BLANK, find_duplicates
from dino_vit.config.commands import CurateConfig
from dino_vit.core.runtime import start_processes
from dino_vit.core.storage import write_bytes
from dino_vit.core.text import Advance, plural, progress
from dino_vit.data.sources.open import open_source
from dino_vit.eval.embeddings import Array, Embeddings, embedded_panels, read_image_embeddings
from dino_vit.eval.knn import FAISS, nearest, unit
from dino_vit.eval.maps.pictures import draw_sheet, shorten
from dino_vit.eval.results import write_results
from dino_vit.views.sampler import describe_sampling

# As published: points in a cluster of each level, iterations of k-means, how often a level clusters again.
POINTS_IN_CLUSTER, ITERATIONS, RESAMPLINGS = (74, 20, 10, 5), 50, 10
CLUSTERS_SHOWN, IMAGES_SHOWN = 12, 8  # on the sheet
_BLOCK, _TRAINED = 2**14, 2**29  # points that are assigned at a time; numbers that k-means takes at most
Indices = NDArray[np.int64]
Tree = Sequence[Indices]  # the cluster of each image, the cluster of each of these clusters, ...


@dataclass(frozen=True, kw_only=True)
class CurateResult(Result):
    """How often to draw each image."""

    names: list[str] = field(repr=False)
    weights: Array = field(repr=False)  # 1 on average; with keep=, 1 for the images to keep and 0 for others
    path: Path | None  # of the file for data.weights, if there is an output
    sheet: Path | None


def run(config: CurateConfig) -> CurateResult:
    """Weigh images; with an output, write the file for data.weights, a sheet of clusters and JSON."""
    output = None if config.output is None else Path(config.output)
    if output and output.suffix != ".csv":
        raise ValueError(f"output={output} must end in .csv")
    if not FAISS:
        raise ValueError("curate needs FAISS, which is not installed, or cannot run beside PyTorch (macOS)")
    embeddings, device = read_image_embeddings(config.embeddings), start_processes().device
    names, random = list(embeddings.names), np.random.default_rng(config.seed)
    rows = candidates(embeddings, config, device)
    if config.keep and config.keep > len(rows):
        raise ValueError(f"keep={config.keep} is more than the {plural(len(rows), 'image')} to choose from")
    tree = cluster(
        embeddings.values[rows], config.clusters or default_clusters(len(rows)), config.seed, device
    )
    weights = choose(tree, config.keep, random) if config.keep else share_alike(tree) * len(rows)
    levels = describe_levels(tree, weights)
    sheet = output and output.with_suffix(".png")
    if output and sheet:
        write_bytes(sheet, draw_clusters(embeddings, rows, weights, flat_clusters(tree)[-1], random))
    if embeddings.metadata["source"].get("unreadable"):  # a training draws from all images of the source
        source = open_source(embeddings.metadata["source"]["spec"])
        names += [source.name(index) for index in set(range(len(source))).difference(embeddings.indices)]
    everything = np.zeros(len(names))
    everything[rows] = weights
    table = format_table(list(levels[0]), [list(map(str, level.values())) for level in levels])
    lines = [
        f"{len(rows):,} of {plural(len(names), 'image')} to draw from",
        table,
        describe_sampling(everything),
    ]
    if output:
        write_weights(output, names, everything)
        facts = {"images": len(names), "candidates": len(rows), "levels": levels}
        write_results(output.with_suffix(".json"), {"settings": config.model_dump(), **facts})
        lines.append(f"{output}: for dino-vit pretrain ... data.weights={output}; {sheet}: what it draws")
    return CurateResult(names=names, weights=everything, path=output, sheet=sheet, text="\n".join(lines))


def candidates(embeddings: Embeddings, config: CurateConfig, device: torch.device) -> Indices:
    """Return the rows of images that are no copies of earlier ones, and near an example if there are any."""
    kept = np.ones(len(embeddings.names), dtype=bool)
    if config.threshold is not None:
        for group in find_duplicates(embeddings.values, config.threshold, [], device=device):
            kept[group[1:]] = False
    rows = np.flatnonzero(kept)
    if config.like is None:
        return rows
    examples = read_image_embeddings(config.like)
    for key in ("weights", "tokens", "transform"):
        theirs, ours = (each.metadata[key] for each in (examples, embeddings))
        if theirs != ours and (key != "weights" or theirs["sha256"] != ours["sha256"]):
            text = f"like={config.like} and {config.embeddings} were embedded with different {key}"
            raise ValueError(f"{text}; embed both with the same")
    queries = torch.as_tensor(examples.values, device=device)
    return rows[np.unique(nearest(embeddings.values[rows], queries, k=config.k)[1].cpu().numpy())]


def default_clusters(images: int) -> list[int]:
    """Return the clusters of each level, whose sizes are those published as long as there are several."""
    first, *others = np.cumprod(POINTS_IN_CLUSTER).tolist()
    return [max(2, images // first), *(images // size for size in others if images >= 2 * size)]


def cluster(values: Array, sizes: Sequence[int], seed: int, device: torch.device) -> Tree:
    """Cluster images, then the centroids, and so on."""
    tree, points = list[Indices](), values
    with progress("Iterations of k-means", len(sizes) * (1 + RESAMPLINGS) * ITERATIONS) as advance:
        for clusters in sizes:
            few = len(points) // (2 * clusters)  # half of a cluster, as published
            centroids = kmeans(points, clusters, seed, advance)
            for again in range(RESAMPLINGS if few > 1 else 0):
                closest = closest_points(*assign(points, centroids, device), few)
                centroids = kmeans(points[closest], clusters, seed + 1 + again, advance)
            used, assigned = np.unique(assign(points, centroids, device)[0], return_inverse=True)
            tree.append(assigned)
            points = centroids[used]
    return tree


def kmeans(points: Array, clusters: int, seed: int, advance: Advance) -> Array:
    """Return centroids by cosine, of length 1."""
    import faiss

    most = max(_TRAINED // points.shape[1], clusters)
    if len(points) > most:
        points = points[np.random.default_rng(seed).choice(len(points), most, replace=False)]
    points = unit(torch.as_tensor(points)).numpy()
    limits = {"min_points_per_centroid": 1, "max_points_per_centroid": len(points)}
    options = {"niter": 1, "spherical": True, "gpu": faiss.get_num_gpus(), "seed": seed, **limits}
    clustering = faiss.Kmeans(points.shape[1], min(clusters, len(points)), **options)
    for _ in range(ITERATIONS):
        clustering.train(points, init_centroids=clustering.centroids)
        advance(1)
    return np.asarray(clustering.centroids)


def assign(points: Array, centroids: Array, device: torch.device) -> tuple[Indices, Array]:
    """Return the nearest centroid of each point, and its cosine."""
    starts = range(0, len(points), _BLOCK)
    blocks = (torch.as_tensor(points[start : start + _BLOCK], device=device) for start in starts)
    cosines, rows = zip(*(nearest(centroids, block, k=1) for block in blocks), strict=True)
    return torch.cat(rows)[:, 0].cpu().numpy(), torch.cat(cosines)[:, 0].cpu().numpy()


def closest_points(assigned: Indices, cosines: Array, count: int) -> Indices:
    """Return the points of each cluster that are closest to its centroid, at most so many."""
    order = np.lexsort((-cosines, assigned))
    starts = np.searchsorted(assigned[order], assigned[order])  # where the cluster of each begins
    return order[np.arange(len(order)) - starts < count]


def flat_clusters(tree: Tree) -> Tree:
    """Return the cluster of each image at each level."""
    flat = [tree[0]]
    for assigned in tree[1:]:
        flat.append(assigned[flat[-1]])
    return flat


def share_alike(tree: Tree) -> Array:
    """Return the share of each image: in each cluster, those of a level below have equal shares."""
    share = np.ones(1)
    for assigned in [*tree, np.zeros(tree[-1].max() + 1, dtype=np.int64)][::-1]:
        share = (share / np.bincount(assigned))[assigned]
    return share


def choose(tree: Tree, keep: int, random: np.random.Generator) -> Array:
    """Return 1 for the images to keep and 0 for others: clusters keep equally many as far as they can."""
    chosen, flat = (
        np.zeros(len(tree[0])),
        [*flat_clusters(tree), np.zeros(len(tree[0]), dtype=np.int64)][::-1],
    )

    def divide(members: Indices, depth: int, total: int) -> None:
        if depth == len(flat):
            chosen[random.choice(members, total, replace=False)] = 1
            return
        _, inverse, sizes = np.unique(flat[depth][members], return_inverse=True, return_counts=True)
        parts = np.zeros_like(sizes)
        while (rest := total - parts.sum()) > 0:
            open_parts = random.permutation(np.flatnonzero(parts < sizes))
            parts[open_parts[:rest]] += np.minimum(
                max(rest // len(open_parts), 1), (sizes - parts)[open_parts[:rest]]
            )
        order = np.argsort(inverse, kind="stable")
        for part, of_cluster in zip(
            parts.tolist(), np.split(members[order], np.cumsum(sizes)[:-1]), strict=True
        ):
            if part:
                divide(of_cluster, depth + 1, part)

    divide(np.arange(len(tree[0])), 0, keep)
    return chosen


def describe_levels(tree: Tree, weights: Array) -> list[dict[str, Any]]:
    """Return the sizes of the clusters of each level, and how often the largest is drawn."""
    levels = []
    for number, assigned in enumerate(flat_clusters(tree), 1):
        counts = np.bincount(assigned)
        drawn = weights[assigned == counts.argmax()].sum() / weights.sum()
        sizes = {
            "smallest": int(counts.min()),
            "median": int(np.median(counts)),
            "largest": int(counts.max()),
        }
        levels.append({"level": number, "clusters": len(counts), **sizes, "drawn from it": f"{drawn:.1%}"})
    return levels


def draw_clusters(
    embeddings: Embeddings, rows: Indices, weights: Array, assigned: Indices, random: np.random.Generator
) -> bytes:
    """Draw clusters of the last level, the largest first: some images that a training draws."""
    counts = np.bincount(assigned)
    steps = np.linspace(0, len(counts) - 1, min(CLUSTERS_SHOWN, len(counts))).round().astype(int)
    shown, sheet = np.argsort(-counts, kind="stable")[steps].tolist(), []
    for number in shown:
        drawn = random.permutation(np.flatnonzero((assigned == number) & (weights > 0)))[:IMAGES_SHOWN]
        captions = [(row, shorten(embeddings.names[row])) for row in rows[drawn].tolist()]
        panels = embedded_panels(embeddings, captions)
        sheet.append([*panels, *[BLANK] * (IMAGES_SHOWN - len(panels))])
    return draw_sheet(sheet, names=[f"{counts[number]:,} images" for number in shown])


def write_weights(path: Path, names: Sequence[str], weights: Array) -> None:
    """Write the weight of each image by its name, as data.weights reads it."""
    text = io.StringIO(newline="")
    table = csv.writer(text)
    table.writerow(["name", "weight"])
    table.writerows((name, f"{weight:.6g}") for name, weight in zip(names, weights.tolist(), strict=True))
    write_bytes(path, text.getvalue().encode())
