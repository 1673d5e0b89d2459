"""Retrieval in Revisited Oxford and Paris (Radenović et al., 2018; Caron et al., 2021, table 3).

    python eval/oxford_paris.py roxford5k weights=dino_deitsmall16_pretrain.pth
    python eval/oxford_paris.py rparis6k weights=runs/vits16 boxes=true

The folder holds the images, at any depth, and the ground truth, gnd_roxford5k.pkl or gnd_rparis6k.pkl. The
longer side of an image is at most 512 pixels. Images are ranked by the cosine of their CLS tokens, the mean
of three scales. As in the 2021 code queries are whole images; `boxes=true` cuts them to the boxes of the
ground truth, as the benchmark's authors do.

Each query has easy, hard and junk images. Easy: the hard ones are junk too; medium: easy and hard ones are
relevant; hard: the easy ones are junk too. Junk is left out of the ranking, all other images are wrong. mAP
is the area below the line through (recall, precision), by trapezoids; mP@k stops at the last relevant image.

Published mAP, medium / hard: ViT-S/16 on ImageNet: Oxford 41.8 / 13.7, Paris 63.1 / 34.4; ViT-S/16 on Google
Landmarks v2: Oxford 51.5 / 24.3, Paris 75.3 / 51.6. Images are reduced bicubically, where the published code
uses Lanczos' filter.
"""

import pickle
import sys
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from dino_vit.cli import run_program
from dino_vit.commands import Written
from dino_vit.config.commands import OVERWRITE, RESULTS, JsonFile
from dino_vit.config.settings import Dimension, NonEmpty, Positive, Settings, setting
from dino_vit.core.runtime import start_processes
from dino_vit.core.text import format_table, progress
from dino_vit.data.image_set import ImageSet
from dino_vit.data.images.decode import read_image
from dino_vit.data.open import open_source
from dino_vit.eval.results import output_of, write_results
from dino_vit.models.backbone import Backbone, eval_mode
from dino_vit.views.eval_transform import eval_transform_of
from dino_vit.views.pictures import resize_sides
from dino_vit.weights import load_backbone
from ranking import trapezoid_precision

# Of each difficulty: the lists whose images are relevant, and those that are junk beside "junk".
DIFFICULTIES = {
    "easy": (("easy",), ("hard",)),
    "medium": (("easy", "hard"), ()),
    "hard": (("hard",), ("easy",)),
}
PRECISION_AT = 1, 5, 10


class OxfordParisConfig(Settings):
    """Judge a frozen backbone by retrieval in Revisited Oxford or Paris."""

    source: str = Field(description="folder with the images and gnd_*.pkl")
    weights: str = Field(description="run folder or weights file")
    boxes: bool = setting(False, "cut queries to the boxes of the ground truth")
    scales: NonEmpty[Positive] = setting((1.0, 0.7071, 0.5), "sizes to take the mean of the features at")
    longest: Dimension = setting(512, "pixels of the longer side of an image, at most")
    output: JsonFile | None = RESULTS
    overwrite: bool = OVERWRITE
    writes: ClassVar = "eval/oxford-paris"

    positional: ClassVar = ("source",)


class Query(NamedTuple):
    """A query: a box (left, top, right, bottom) of an image, and rows of the bank by their list."""

    name: str
    box: tuple[float, ...]
    lists: dict[str, NDArray[np.int64]]  # "easy", "hard" and "junk"


class _ArraysOnly(pickle.Unpickler):
    """Reads lists, numbers and NumPy's arrays; a pickle can otherwise run any program."""

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "numpy" and name in ("_reconstruct", "scalar", "ndarray", "dtype"):
            return super().find_class(module, name)
        if (module, name) in (("_codecs", "encode"), ("__builtin__", "bytes")):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is neither a number nor a list")


def read_ground_truth(folder: Path) -> tuple[list[str], list[Query]]:
    """Return the names of the bank's images, without suffix, and the queries."""
    paths = sorted(folder.glob("gnd_*.pkl"))
    if len(paths) != 1:
        raise ValueError(f"{folder} has {len(paths)} files gnd_*.pkl; it needs one, the ground truth")
    try:
        with paths[0].open("rb") as file:
            truth = _ArraysOnly(file, encoding="latin1").load()
        queries = [
            Query(
                name,
                tuple(lists["bbx"]),
                {kind: np.array(lists[kind], int) for kind in ("easy", "hard", "junk")},
            )
            for name, lists in zip(truth["qimlist"], truth["gnd"], strict=True)
        ]
        return list(truth["imlist"]), queries
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{paths[0]} is no ground truth of Revisited Oxford or Paris: {error}") from error


def indices_of(source: ImageSet, names: list[str]) -> list[int]:
    """Return where in a source the images of these names are."""
    index = {Path(source.name(i)).stem: i for i in range(len(source))}
    if missing := [name for name in names if name not in index]:
        raise ValueError(
            f"{len(missing):,} of the {len(names):,} images are missing, such as {missing[0]}.jpg"
        )
    return [index[name] for name in names]


def at_scales(model: Backbone, image: Tensor, scales: tuple[float, ...]) -> Tensor:
    """Return the mean CLS feature (D,) of a normalised image (C, H, W), cut to whole patches."""
    features = []
    for scale in scales:
        scaled = (
            F.interpolate(image[None], scale_factor=scale, mode="bilinear") if scale != 1 else image[None]
        )
        sides = zip(scaled.shape[-2:], model.patch_size, strict=True)
        height, width = (side // step * step for side, step in sides)
        if not height or not width:
            raise ValueError(f"an image of {scaled.shape[-1]} x {scaled.shape[-2]} pixels has no whole patch")
        features.append(model.forward_cls(scaled[..., :height, :width])[0])
    return torch.stack(features).mean(0)


@torch.no_grad()
def embed_images(
    config: OxfordParisConfig, model: Backbone, source: ImageSet, names: list[str], boxes: Any, title: str
) -> Tensor:
    """Return the L2-normalised features (n, D) of images, or of boxes of them."""
    transform, features = eval_transform_of(model), []
    normalise = transform.normaliser(model.device)
    with progress(title, len(names)) as advance:
        for index, box in zip(indices_of(source, names), boxes, strict=True):
            image = read_image(source, index, transform.pixels)
            if box:
                left, top, right, bottom = (max(0, round(side)) for side in box)
                image = image[:, top:bottom, left:right]
            if max(image.shape[1:]) > config.longest:
                image = resize_sides(image, None, config.longest)
            features.append(at_scales(model, normalise(image), config.scales))
            advance(1)
    return F.normalize(torch.stack(features).float(), dim=1)


def ranks_of_relevant(order: NDArray[np.int64], query: Query, difficulty: str) -> NDArray[np.int64]:
    """Return the ranks, from 0, of a query's relevant images in an order of the bank without its junk."""
    relevant_lists, junk_lists = DIFFICULTIES[difficulty]
    relevant = np.concatenate([query.lists[kind] for kind in relevant_lists])
    junk = np.concatenate([query.lists[kind] for kind in ("junk", *junk_lists)])
    kept = order[~np.isin(order, junk)]
    return np.flatnonzero(np.isin(kept, relevant))


def precision_at(ranks: NDArray[np.int64], k: int) -> float:
    """Return the share of relevant images among the first k, or up to the last one if that comes earlier."""
    last = min(int(ranks.max()) + 1, k)
    return float((ranks < last).sum() / last)


def mean_precisions(orders: NDArray[np.int64], queries: list[Query]) -> dict[str, dict[str, float]]:
    """Return the figures by difficulty, the means over the queries that have relevant images there."""
    figures = {}
    for difficulty in DIFFICULTIES:
        ranks = [
            ranks_of_relevant(order, query, difficulty) for order, query in zip(orders, queries, strict=True)
        ]
        judged = [each for each in ranks if len(each)]
        if not judged:
            continue
        values = {"mAP": [trapezoid_precision(each, len(each)) for each in judged]}
        values |= {f"mP@{k}": [precision_at(each, k) for each in judged] for k in PRECISION_AT}
        figures[difficulty] = {title: 100 * float(np.mean(column)) for title, column in values.items()}
    return figures


def run(config: OxfordParisConfig) -> Written:
    """Rank the bank for each query, and write the JSON."""
    names, queries = read_ground_truth(Path(config.source))
    source = open_source(config.source, labels="none")
    model = load_backbone(config.weights).to(start_processes().device)
    path = output_of(config, model.provenance.source)
    with eval_mode(model):
        bank = embed_images(config, model, source, names, [None] * len(names), "features of the bank")
        boxes = [query.box if config.boxes else None for query in queries]
        asked = embed_images(
            config, model, source, [query.name for query in queries], boxes, "features of the queries"
        )
    orders = (asked @ bank.T).argsort(dim=1, descending=True, stable=True).cpu().numpy()
    figures = mean_precisions(orders, queries)
    write_results(
        path, {"settings": config.model_dump(mode="json"), "queries": len(queries), "results": figures}
    )
    rows = [[name, *(f"{value:.2f}" for value in row.values())] for name, row in figures.items()]
    table = format_table(["%", "mAP", *(f"mP@{k}" for k in PRECISION_AT)], rows)
    title = f"{len(queries)} queries among {len(names):,} images"
    return Written(path=path, text=f"{title}\n\n{table}\n\n{path}")


if __name__ == "__main__":
    sys.exit(run_program(OxfordParisConfig, run))
