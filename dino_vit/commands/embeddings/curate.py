"""Weigh embedded images for pretraining: copies are never drawn, and clusters are drawn equally often.

Hierarchical k-means as in "Automatic Data Curation for Self-Supervised Learning" (Vo et al., 2024): images
are clustered, then the centroids, and so on. Each level clusters again only what is closest to its centroids,
so that these spread over all kinds of images and not over the frequent ones.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from pyarrow.csv import write_csv

from dino_vit.commands import Result, format_table
from dino_vit.commands.embeddings.duplicates import find_duplicates
from dino_vit.config.embeddings import CurateConfig
from dino_vit.core.outputs import after_figures, claim, write_output
from dino_vit.core.runtime import start_processes
from dino_vit.core.text import Advance, plural, progress
from dino_vit.eval.embeddings import Array, Embeddings, embedded_panels, read_image_embeddings
from dino_vit.eval.knn import FAISS, nearest, unit
from dino_vit.eval.maps.pictures import draw_sheet
from dino_vit.eval.results import write_results
from dino_vit.views.sampler import describe_sampling

# As published: points in a cluster of each level, iterations of k-means, how often a level clusters again.
POINTS_IN_CLUSTER, ITERATIONS, RESAMPLINGS = (74, 20, 10, 5), 50, 10
CLUSTERS_SHOWN, IMAGES_SHOWN = 12, 8  # on the sheet
_BLOCK = 2**14  # points that are assigned at a time
Indices = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class CurateResult(Result):
    """How often to draw each image."""

    names: list[str] = field(repr=False)
    weights: Array = field(repr=False)  # their sum is the number of images to draw from
    path: Path | None  # of the file for data.weights, if there is an output


def run(config: CurateConfig) -> CurateResult:
    """Weigh images; with an output, write the file for data.weights, a sheet of clusters and JSON."""
    output = None if config.output is None else Path(config.output)
    if output:
        claim(output, output.with_suffix(".json"), output.with_suffix(".png"))
    if not FAISS:
        raise ValueError("curate needs FAISS, which is not installed, or cannot run beside PyTorch (macOS)")
    embeddings, device = (
        read_image_embeddings(config.embeddings, trust=config.trust),
        start_processes().device,
    )
    rows = choose_candidates(embeddings, config, device)
    if config.keep and config.keep > len(rows):
        raise ValueError(f"keep={config.keep} is more than the {plural(len(rows), 'image')} to choose from")
    sizes = config.clusters or default_clusters(len(rows))
    levels = cluster(embeddings.values[rows], sizes, device)
    random = np.random.default_rng(0)
    of_rows = choose(levels, config.keep, random) if config.keep else share_alike(levels) * len(rows)
    names = list(embeddings.names)
    if unreadable := embeddings.metadata["source"].get("unreadable"):  # a weight file names all images
        source = embeddings.open_source()
        embedded = set(names)
        names += [name for name in map(source.name, range(len(source))) if name not in embedded]
        if more := max(0, len(names) - len(embedded) - unreadable):
            counted = f"{'is' if more == 1 else 'are'} {plural(more, 'image')}"
            raise ValueError(f"there {counted} more than in {config.embeddings}; embed them again")
    weights = np.zeros(len(names))
    weights[rows] = of_rows
    table = describe(levels, of_rows)
    lines = [f"{len(rows):,} of {plural(len(names), 'image')} to draw from, without copies"]
    lines.append(format_table(list(table[0]), [list(map(str, level.values())) for level in table]))
    lines.append(describe_sampling(weights))
    if output:
        file = BytesIO()
        write_csv(pa.table({"name": names, "weight": weights}), file)
        content = {"settings": config.model_dump(), "images": len(names), "candidates": len(rows)}
        content |= {"levels": table, "sha256": hashlib.sha256(file.getvalue()).hexdigest()}
        with after_figures():
            write_output(output, file.getvalue())  # before the digest that makes it ours
            write_results(output.with_suffix(".json"), content)
            sheet = draw_clusters(embeddings, rows, of_rows, levels[-1], random)
            write_output(output.with_suffix(".png"), sheet)
        lines.append(f"{output}: for `pretrain` with data.weights={output}; beside it a sheet of clusters")
    return CurateResult(names=names, weights=weights, path=output, text="\n".join(lines))


def choose_candidates(embeddings: Embeddings, config: CurateConfig, device: torch.device) -> Indices:
    """Return the rows of images that are no copies of earlier ones, and near an example if there are any."""
    kept = np.ones(len(embeddings.names), dtype=bool)
    if config.threshold is not None:
        for group in find_duplicates(embeddings.values, config.threshold, [], device=device):
            kept[group[1:]] = False
    rows = np.flatnonzero(kept)
    if config.like is None:
        return rows
    examples = read_image_embeddings(config.like, trust=config.trust)
    facts = [(each.metadata["weights"]["sha256"], each.metadata["tokens"]) for each in (embeddings, examples)]
    if facts[0] != facts[1] or embeddings.transform != examples.transform:
        text = f"like={config.like} was embedded with other weights or settings than {config.embeddings}"
        raise ValueError(f"{text}; embed both alike")
    queries = torch.as_tensor(examples.values, device=device)
    return rows[np.unique(nearest(embeddings.values[rows], queries, k=config.k)[1].cpu().numpy())]


def default_clusters(images: int) -> list[int]:
    """Return how many clusters each level has, as published as long as there are several."""
    first, *others = np.cumprod(POINTS_IN_CLUSTER).tolist()
    return [max(2, images // first), *(images // size for size in others if images >= 2 * size)]


def cluster(values: Array, sizes: Sequence[int], device: torch.device) -> list[Indices]:
    """Cluster images, then the centroids, and so on; return the cluster of each image at each level."""
    points, levels = unit(torch.as_tensor(values)).numpy(), list[Indices]()
    with progress("Iterations of k-means", len(sizes) * (1 + RESAMPLINGS) * ITERATIONS) as advance:
        for clusters in sizes:
            few = len(points) // (2 * clusters)  # half of a cluster, as published
            centroids = kmeans(points, clusters, 0, advance)
            for seed in range(1, RESAMPLINGS + 1) if few > 1 else ():
                assigned, cosines = assign(points, centroids, device)
                closest = points[place_in_cluster(assigned, -cosines) < few]
                centroids = kmeans(closest, clusters, seed, advance)
            used, assigned = np.unique(assign(points, centroids, device)[0], return_inverse=True)
            levels.append(assigned[levels[-1]] if levels else assigned)
            points = centroids[used]
    return levels


def kmeans(points: Array, clusters: int, seed: int, advance: Advance) -> Array:
    """Return centroids by cosine; points and centroids have length 1."""
    import faiss

    options = {"niter": 1, "spherical": True, "gpu": faiss.get_num_gpus(), "min_points_per_centroid": 1}
    options |= {"init_method": faiss.ClusteringInitMethod_KMEANS_PLUS_PLUS, "seed": seed}
    clustering = faiss.Kmeans(points.shape[1], min(clusters, len(points)), **options)
    for _ in range(ITERATIONS):
        clustering.train(points, init_centroids=clustering.centroids)
        advance(1)
    return np.asarray(clustering.centroids)


def assign(points: Array, centroids: Array, device: torch.device) -> tuple[Indices, Array]:
    """Return the nearest centroid of each point, and its cosine."""
    blocks = torch.split(torch.as_tensor(points), _BLOCK)
    nearest_ones = zip(*(nearest(centroids, block.to(device), k=1) for block in blocks), strict=True)
    cosines, rows = (torch.cat(parts)[:, 0].cpu().numpy() for parts in nearest_ones)
    return rows, cosines


def place_in_cluster(assigned: Indices, *keys: Array) -> Indices:
    """Return the place of each item among those of its cluster, by the last key first, as np.lexsort."""
    order, places = np.lexsort((*keys, assigned)), np.empty_like(assigned)
    places[order] = np.arange(len(order)) - np.searchsorted(assigned[order], assigned[order])
    return places


def share_alike(levels: Sequence[Indices]) -> Array:
    """Return the share of each image: the clusters in a cluster have equal shares, at each level."""
    shares = np.ones(len(levels[0]))
    for assigned in (*levels, np.zeros_like(levels[0])):
        shares /= np.bincount(assigned, shares)[assigned]  # those of a cluster below add up to 1
    return shares


def choose(levels: Sequence[Indices], keep: int, random: np.random.Generator) -> Array:
    """Return 1 for the images to keep: each cluster takes from those in it in turn, as long as they last."""
    chance = random.permutation(len(levels[0]))
    places = chance
    for assigned in (*levels, np.zeros_like(levels[0])):
        places = place_in_cluster(assigned, chance, places)
    return (places < keep).astype(float)


def describe(levels: Sequence[Indices], weights: Array) -> list[dict[str, Any]]:
    """Return the number of clusters of each level, and how often the images of the largest are drawn."""
    table = list[dict[str, Any]]()
    for number, assigned in enumerate(levels, 1):
        counts = np.bincount(assigned)
        drawn = weights[assigned == counts.argmax()].sum() / weights.sum()
        largest = {"largest": int(counts.max()), "of images": f"{counts.max() / len(assigned):.1%}"}
        table.append({"level": number, "clusters": len(counts), **largest, "of draws": f"{drawn:.1%}"})
    return table


def draw_clusters(
    embeddings: Embeddings, rows: Indices, weights: Array, assigned: Indices, random: np.random.Generator
) -> bytes:
    """Draw clusters of the last level, the largest first: some images of each that a training draws."""
    counts = np.bincount(assigned[weights > 0])
    order = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)]
    shown = order[:: math.ceil(len(order) / CLUSTERS_SHOWN)].tolist()
    drawn = []
    for number in shown:
        of_cluster = np.where(assigned == number, weights, 0.0)
        count = min(IMAGES_SHOWN, int(counts[number]))
        drawn.append(rows[random.choice(len(rows), count, replace=False, p=of_cluster / of_cluster.sum())])
    captions = [(row, embeddings.names[row]) for row in np.concatenate(drawn).tolist()]
    panels = iter(embedded_panels(embeddings, captions))
    sheet = [[next(panels) for _ in of_cluster] for of_cluster in drawn]
    return draw_sheet(sheet, names=[plural(int(counts[number]), "image") for number in shown])
