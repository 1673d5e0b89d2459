r"""Copy detection by frozen features (Douze et al., 2009; Berman et al., 2019; Caron et al., 2021, table 4).

    python eval/copydays.py copydays/original queries=copydays/strong distractors=yfcc100m-10k \
        whitening=yfcc100m-20k size=320 weights=dino_vitbase8_pretrain.pth

The features of an image, resized whole to a square, are its CLS token and the generalised mean of its patches
(power 4, cut off below at 0), whitened by what the `whitening` images have. Originals are ranked by cosine
among the distractors. In Copydays the first four digits of a name are the same for an original and its
copies, and this pairs them; `pairs` is a CSV file with lines of query,original for other sets.

mAP is by trapezoids, as INRIA's evaluation of Holidays and Copydays has it, over all images that are ranked.
micro-AP is the average precision of all pairs of a query and an image in one ranking: it asks for one
threshold that tells copies from other images for every query.

Published mAP on the subset "strong", with 10,000 distractors of YFCC100M and a whitening learned from 20,000
further images: ViT-B/16 at 224 pixels 81.7, ViT-B/8 at 320 pixels 85.5. As in that code the mAP counts the
20 nearest images only, and the whitening centres what it whitens, but not what it learns from.
"""

import csv
import sys
from collections.abc import Callable
from pathlib import PurePath
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from dino_vit.cli import run_program
from dino_vit.commands import Written
from dino_vit.config.commands import OVERWRITE, RESULTS, JsonFile
from dino_vit.config.settings import Dimension, Settings, setting
from dino_vit.core import log
from dino_vit.core.process import in_batches
from dino_vit.core.runtime import start_processes
from dino_vit.core.text import format_table, progress
from dino_vit.data.open import open_source
from dino_vit.eval.results import output_of, write_results
from dino_vit.features.batches import read_batches
from dino_vit.models.backbone import Backbone, eval_mode
from dino_vit.views.eval_transform import eval_transform_of
from dino_vit.weights import load_backbone
from ranking import micro_average_precision, trapezoid_precision

GEM_POWER = 4
NEAREST = 20  # images of a query that count for its average precision
LEAST_VARIANCE = 1e-5  # of the greatest; smaller ones are rounding, which whitening would blow up


class CopydaysConfig(Settings):
    """Judge a frozen backbone by how early the originals of copies are found."""

    originals: str = Field(description="images that the queries are copies of")
    queries: str = Field(description="copies of the originals")
    weights: str = Field(description="run folder or weights file")
    distractors: str | None = setting(None, "further images to search in")
    whitening: str | None = setting(None, "further images to learn a whitening of the features from")
    pairs: str | None = setting(None, "CSV file of query,original; null: equal first four characters")
    size: Dimension | None = setting(None, "side in pixels; null: that of the weights")
    batch_size: Dimension = setting(32, "images per forward pass")
    output: JsonFile | None = RESULTS
    overwrite: bool = OVERWRITE
    writes: ClassVar = "eval/copydays"

    positional: ClassVar = ("originals",)


@torch.no_grad()
def embed_images(config: CopydaysConfig, model: Backbone, spec: str, title: str) -> tuple[list[str], Tensor]:
    """Return the names of the readable images of a source, and their features (n, 2 D): CLS and GeM."""
    source, names = open_source(spec, labels="none"), list[str]()
    size = (config.size, config.size) if config.size else None
    transform = eval_transform_of(model, size=size, resize_mode="whole")
    normalise, features = transform.normaliser(model.device), []
    with progress(title, len(source)) as advance:
        for batch in read_batches(source, transform, in_batches(range(len(source)), config.batch_size)):
            for image in batch.unreadable:
                log.warning("left out: %s", image)
            if not len(batch.values):
                continue
            names += [source.name(index) for index in batch.indices.tolist()]
            tokens = model.forward_features(normalise(batch.values)).float()
            patches = tokens[:, model.first_patch :].clamp(min=1e-6)
            pooled = patches.pow(GEM_POWER).mean(1).pow(1 / GEM_POWER)
            features.append(torch.cat([tokens[:, 0], pooled], dim=1))
            advance(len(batch.values))
    if not names:
        raise ValueError(f"none of the images of {spec} can be read")
    return names, torch.cat(features)


def learn_whitening(features: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function that centers features and divides their principal components by their deviation.

    The cosine of its results counts all directions alike (Jégou and Chum, 2012). As in 2021 it learns these
    from features that are not centered.
    """
    learned = features.cpu().double()
    mean = learned.mean(0)
    variances, directions = torch.linalg.eigh(learned.T @ learned / len(learned))
    if torch.equal(learned, mean.expand_as(learned)):
        raise ValueError("whitening has nothing to learn from: all its features are the same")
    scale = variances.clamp(min=LEAST_VARIANCE * float(variances[-1])).rsqrt()
    matrix = (directions * scale).float().to(features.device)
    center = mean.float().to(features.device)
    return lambda rows: F.normalize((rows - center) @ matrix, dim=1)


def true_pairs(queries: list[str], originals: list[str], table: str | None) -> Tensor:
    """Return which original each query is a copy of: (queries, originals) of bool."""
    if table:
        with open(table, newline="") as file:
            pairs = [tuple(row) for row in csv.reader(file) if row]
        if missing := [pair for pair in pairs if pair[0] not in queries or pair[-1] not in originals]:
            raise ValueError(f"{table}: no two images that can be read are called {','.join(missing[0])}")
        given = set(pairs)
        truth = torch.tensor([[(query, name) in given for name in originals] for query in queries])
    else:
        starts = [[PurePath(name).name[:4] for name in names] for names in (queries, originals)]
        truth = torch.tensor([[query == name for name in starts[1]] for query in starts[0]])
    if not truth.any():
        example = f"{queries[0]} and {originals[0]}"
        raise ValueError(f"no query is paired with an original, such as {example}; give pairs=FILE.csv")
    return truth


def average_precisions(cosines: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """Return the average precision by trapezoids, and whether the nearest is an original, of each query (q,).

    Of equal cosines the wrong image counts as the earlier one.
    """
    order = (cosines.double() - 1e-12 * truth).argsort(dim=1, descending=True, stable=True)
    relevant = truth.gather(1, order).numpy()
    found = (np.flatnonzero(row[:NEAREST]) for row in relevant)
    areas = [trapezoid_precision(ranks, row.sum()) for ranks, row in zip(found, relevant, strict=True)]
    return torch.tensor(areas, dtype=torch.double), torch.from_numpy(relevant[:, 0]).double()


def run(config: CopydaysConfig) -> Written:
    """Search for the originals of all queries, and write the JSON."""
    model = load_backbone(config.weights).to(start_processes().device)
    if not model.has_patches:
        raise ValueError(f"{config.weights} has no patches: its features are made after pooling")
    path = output_of(config, model.provenance.source)
    whiten: Callable[[Tensor], Tensor] = F.normalize
    with eval_mode(model):
        originals, bank = embed_images(config, model, config.originals, "features of the originals")
        queries, asked = embed_images(config, model, config.queries, "features of the queries")
        if config.distractors:
            others = embed_images(config, model, config.distractors, "features of the distractors")[1]
            bank = torch.cat([bank, others])
        if config.whitening:
            whiten = learn_whitening(
                embed_images(config, model, config.whitening, "features for the whitening")[1]
            )
    truth = F.pad(true_pairs(queries, originals, config.pairs), (0, len(bank) - len(originals)))
    judged = truth.any(1)
    cosines = (whiten(asked) @ whiten(bank).T).cpu()[judged]
    precisions, nearest_is_right = average_precisions(cosines, truth[judged])
    results = {
        "mAP": 100 * float(precisions.mean()),
        "micro-AP": 100 * micro_average_precision(cosines, truth[judged]),
        "recall@1": 100 * float(nearest_is_right.mean()),
    }
    counts = {"queries": int(judged.sum()), "images": len(bank)}
    write_results(path, {"settings": config.model_dump(mode="json"), **counts, "results": results})
    table = format_table(["", "%"], [[name, f"{value:.2f}"] for name, value in results.items()])
    title = f"{counts['queries']:,} copies, originals among {len(bank):,} images"
    return Written(path=path, text=f"{title}\n\n{table}\n\n{path}")


if __name__ == "__main__":
    sys.exit(run_program(CopydaysConfig, run))
