"""Judge how early images of the same class come when a set is ranked by similarity to a query."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from dino_vit.commands import Result, format_table
from dino_vit.config.settings import Count, Dimension, FewOrZero, NonEmpty, Problem, setting
from dino_vit.core.distributed import all_gather, is_main_process, share
from dino_vit.core.progress import plural, progress
from dino_vit.core.sizes import height_width
from dino_vit.data.images.pixels import RGB
from dino_vit.data.sources.open import Source, open_source
from dino_vit.eval.accuracy import results_path, write_results
from dino_vit.eval.classification.datasets import LabelledSubset, open_subset
from dino_vit.eval.confidence import Interval, Measured, measured_share
from dino_vit.eval.features.extraction import FeatureSpec
from dino_vit.eval.features.frozen import EvaluationConfig, FrozenBackbone, frozen_backbone
from dino_vit.eval.maps.pictures import EMPTY, Panel, frame, shorten, thumbnail, write_sheet
from dino_vit.eval.neighbours import format_cosines, nearest
from dino_vit.eval.retrieval.descriptors import descriptors, whitened
from dino_vit.eval.retrieval.ranking import Ranks, device_of_figures, rank_relevant, same_label
from dino_vit.eval.retrieval.revisited import (
    LONGEST,
    find_ground_truth,
    judge_as_published,
    read_ground_truth,
)
from dino_vit.eval.retrieval.whitening import Whitening

Scale = Annotated[float, Field(gt=0, le=4)]
RESULTS_DRAWN = 8  # of a query
_CLASSES_SHOWN = 20
_GREEN, _RED = (40, 160, 60), (215, 40, 40)


class RetrievalConfig(EvaluationConfig):
    """Rank images by their similarity to queries; images of the query's class are relevant."""

    queries: str | None = setting(None, "labelled queries; null: each image of source, among the others")
    query_labels: str | None = setting(None, "CSV or JSON file of the labels of queries; null: their own")
    tokens: Literal["cls", "cls+mean", "cls+gem", "gem"] = setting(
        "cls", "features of an image: the CLS token, the mean or generalised mean (GeM) of patches"
    )
    scales: NonEmpty[Scale] = setting(
        (1.0,), "sizes to take the mean of features at; published: [1,0.707,0.5]"
    )
    whitening: str | None = setting(None, "images to learn a whitening of the features from; need no labels")
    dimensions: Dimension | None = setting(None, "dimensions that whitening keeps; null: all")
    boxes: bool = setting(
        True, "Oxford and Paris: cut queries to their boxes, which the code of 2021 does not"
    )
    k: NonEmpty[Count] = setting((1, 5, 10), "numbers of first results for recall and precision")
    pictures: FewOrZero = setting(8, "queries to draw with their first results: half the worst, half typical")
    output: str | None = setting(
        None,
        "JSON file, with the sheet beside; null: retrieval.json in eval/ of the run or beside the weights",
    )

    def contradictions(self) -> Iterator[Problem]:
        """Yield settings that would have no effect."""
        if self.queries == self.source:
            text = "each image of queries would find itself in source, which is the same; leave queries out"
            yield Problem(text, ("queries", "source"))
        if self.query_labels and not self.queries:
            text = "query_labels are those of queries, which is not given"
            yield Problem(text, ("query_labels", "queries"))
        if self.dimensions and not self.whitening:
            text = "dimensions is for whitening, which is not given; whitening=SOURCE learns it from images"
            yield Problem(text, ("dimensions", "whitening"))


class LabelledVectors(NamedTuple):
    """What is searched for or in: a vector, a class and a place in the source of each image."""

    source: Source
    features: Tensor  # (n, D)
    targets: Tensor  # (n,), -1 for a class that the searched images lack
    labels: list[str]
    indices: NDArray[np.int64]

    def panel(self, row: int, caption: str, colour: tuple[int, int, int] | None = None) -> Panel:
        """Return the picture of a row, in a frame if there is a colour."""
        picture = thumbnail(self.source, int(self.indices[row]), RGB)
        if colour:
            picture = frame(EMPTY if picture is None else picture, colour)
        return Panel(picture, caption)


@dataclass(frozen=True, kw_only=True)
class RetrievalResult(Result):
    """How early the relevant images come, in per cent, with confidence over the queries."""

    mean_ap: Interval
    recall: dict[int, Interval]  # by k: queries with a relevant image among the first k
    precision: dict[int, Interval]  # by k: relevant images among the first k
    r_precision: Interval
    per_class: dict[str, float]  # mean average precision of the queries of each class, the lowest first
    difficulties: dict[str, dict[str, Interval]] = field(
        default_factory=dict
    )  # of Oxford and Paris, by title
    measured: list[Measured] = field(repr=False)  # the figures with what each query contributes
    path: Path  # of the JSON file
    sheet: Path | None  # of queries with their first results
    details: dict[str, Any] = field(repr=False)  # all that the JSON file holds


def run(config: RetrievalConfig) -> RetrievalResult:
    """Rank, write the JSON and a sheet of some queries."""
    frozen = frozen_backbone(config)
    path = results_path("retrieval", weights=config.weights, output=config.output)
    if truth := find_ground_truth(config.source):
        return _as_published(config, frozen, truth, path)
    if not config.boxes:
        raise ValueError("boxes=false is for a folder with the ground truth of Oxford or Paris; leave it out")
    bank, queries = _open(config, frozen)
    of_each = _judge(config, frozen, bank, queries)
    judged = ~of_each["mAP"].isnan()
    if not judged.any():
        others = "another image" if queries is bank else f"an image of {config.source}"
        raise ValueError(f"no query has {others} of its class, so there is nothing to find")
    images = queries.indices[judged.numpy()]
    measured = {title: measured_share(title, images, of[judged]) for title, of in of_each.items()}
    figures = {title: one.interval for title, one in measured.items() if title != "random"}
    per_class = _per_class(of_each["mAP"], queries.labels)
    sheet = path.with_name(f"{path.stem}.png") if config.pictures else None
    details = {
        "weights": frozen.describe_weights(),
        "settings": config.model_dump(mode="json"),
        "images": len(bank.indices),
        "queries": len(images),
        "queries_without_relevant_images": int((~judged).sum()),
        "r_precision_of_a_random_order": 100 * measured["random"].value,
        "results": {title: one._asdict() for title, one in figures.items()},
        "per_class": per_class,
    }
    if is_main_process():
        write_results(path, details)
        if sheet:
            _draw(bank, queries, of_each["mAP"], sheet, config.pictures, frozen.device)
    written = "\n".join(map(str, [path, *([sheet] if sheet else [])]))
    return RetrievalResult(
        mean_ap=figures["mAP"],
        recall={k: figures[f"recall@{k}"] for k in config.k},
        precision={k: figures[f"precision@{k}"] for k in config.k},
        r_precision=figures["R-precision"],
        per_class=per_class,
        measured=[measured[title] for title in figures],
        path=path,
        sheet=sheet,
        details=details,
        text="\n\n".join([*_tables(config, details), written]),
    )


def _as_published(
    config: RetrievalConfig, frozen: FrozenBackbone, truth: Path, path: Path
) -> RetrievalResult:
    """Judge a backbone on Revisited Oxford or Paris; the result's own figures are those of medium."""
    _check_published(config, truth)
    known = read_ground_truth(truth)
    of_each = judge_as_published(
        frozen,
        known,
        open_source(config.source),
        cut=config.boxes,
        longest=LONGEST if config.size is None else max(height_width(config.size)),
        scales=config.scales,
        spec=FeatureSpec(tokens=config.tokens),
        learned_from=open_source(config.whitening) if config.whitening else None,
        dimensions=config.dimensions,
        k=config.k,
    )
    measured = []
    for difficulty, figures in of_each.items():
        for title, values in figures.items():
            rows = np.flatnonzero(~values.isnan().numpy())
            measured.append(measured_share(f"{difficulty} {title}", rows, values[rows]))
    found = {one.title: one.interval for one in measured}
    difficulties = {
        difficulty: {title: found[f"{difficulty} {title}"] for title in figures}
        for difficulty, figures in of_each.items()
    }
    details = {
        "weights": frozen.describe_weights(),
        "settings": config.model_dump(mode="json"),
        "images": len(known.images),
        "queries": len(known.queries),
        "results": {
            name: {title: one._asdict() for title, one in of.items()} for name, of in difficulties.items()
        },
    }
    if is_main_process():
        write_results(path, details)
    medium = difficulties["medium"]
    table = format_table(
        ["%", *medium], [[name, *map(str, of.values())] for name, of in difficulties.items()]
    )
    queries = plural(len(known.queries), "query", "queries")
    return RetrievalResult(
        mean_ap=medium["mAP"],
        recall={},
        precision={k: medium[f"mP@{k}"] for k in config.k},
        r_precision=medium["R-precision"],
        per_class={},
        difficulties=difficulties,
        measured=measured,
        path=path,
        sheet=None,
        details=details,
        text=f"{queries} among {len(known.images):,} images, as published\n\n{table}\n\n{path}",
    )


def _check_published(config: RetrievalConfig, truth: Path) -> None:
    """Raise if settings are given that the published protocol has no use for."""
    for name in ("queries", "labels"):
        if getattr(config, name):
            raise ValueError(f"{name}: {truth} says which images are relevant; leave it out")
    if config.fit != "crop":
        raise ValueError(f"fit: images whose ground truth is {truth} keep their aspect ratio; leave it out")


def _open(config: RetrievalConfig, frozen: FrozenBackbone) -> tuple[LabelledVectors, LabelledVectors]:
    """Return the images to search in and the queries; each image is searched for if these are the same."""
    spec, whitening = FeatureSpec(tokens=config.tokens), None
    if config.whitening:
        values, _ = descriptors(
            frozen, open_source(config.whitening), None, spec=spec, scales=config.scales, title="whitening"
        )
        whitening = Whitening.learn(values, frozen.device, config.dimensions)

    def vectors(subset: LabelledSubset, classes: Sequence[str], title: str) -> LabelledVectors:
        indices = None if subset.whole else subset.indices.tolist()
        values, found = descriptors(
            frozen, subset.source, indices, spec=spec, scales=config.scales, title=title
        )
        numbers = subset.targets[np.searchsorted(subset.indices, found)]
        labels = [subset.source.classes[number] for number in numbers.tolist()]
        number = {name: place for place, name in enumerate(classes)}
        targets = torch.tensor([number.get(label, -1) for label in labels], dtype=torch.long)
        features = values if whitening is None else whitened(values, whitening)
        return LabelledVectors(subset.source, features, targets, labels, found)

    images = open_subset(config.source, config.labels)
    bank = vectors(images, images.source.classes, "features")
    if config.queries is None:
        return bank, bank
    asked = open_subset(config.queries, config.query_labels, "query_labels")
    return bank, vectors(asked, images.source.classes, "features of the queries")


def _judge(
    config: RetrievalConfig, frozen: FrozenBackbone, bank: LabelledVectors, queries: LabelledVectors
) -> dict[str, Tensor]:
    """Return every figure of each query, NaN without relevant images; each process ranks for a share."""
    mine, device = share(range(len(queries.indices))), frozen.device
    rows = slice(mine.start, mine.stop)
    own = mine.start if queries is bank else None
    judge = same_label(bank.targets, queries.targets[rows], device, own=own)
    others = len(bank.indices) - (queries is bank)
    figures: dict[str, Callable[[Ranks], Tensor]] = {
        "mAP": Ranks.average_precision,
        **{f"recall@{k}": partial(Ranks.found_at, k=k) for k in config.k},
        **{f"precision@{k}": partial(Ranks.precision_at, k=k) for k in config.k},
        "R-precision": Ranks.r_precision,
        "random": lambda ranks: torch.where(ranks.counts > 0, ranks.counts.double() / others, torch.nan),
    }
    found = [torch.zeros(0, len(figures), dtype=torch.double, device=device_of_figures(device))]
    with progress("ranking", len(mine)) as advance:
        for block, ranks in rank_relevant(bank.features, queries.features[rows], judge, device):
            found.append(torch.stack([figure(ranks) for figure in figures.values()], dim=1))
            advance(block.stop - block.start)
    columns = all_gather(torch.cat(found)).cpu().unbind(1)
    return dict(zip(figures, columns, strict=True))


def _per_class(average: Tensor, labels: Sequence[str]) -> dict[str, float]:
    """Return the mean average precision in per cent by class, the lowest first."""
    of_class: dict[str, list[float]] = {}
    for value, label in zip(average.tolist(), labels, strict=True):
        if value == value:
            of_class.setdefault(label, []).append(value)
    means = {label: 100 * sum(values) / len(values) for label, values in of_class.items()}
    return dict(sorted(means.items(), key=lambda item: item[1]))


def _draw(
    bank: LabelledVectors,
    queries: LabelledVectors,
    average: Tensor,
    path: Path,
    count: int,
    device: torch.device,
) -> None:
    """Draw the worst queries, of as many classes as possible, and typical ones, with their first results."""
    rows = average.argsort()[: int((~average.isnan()).sum())].tolist()  # NaN is last
    first: dict[str, int] = {}
    for row in rows:
        first.setdefault(queries.labels[row], row)
    worst = list(dict.fromkeys([*first.values(), *rows]))[: -(-count // 2)]
    middle = sorted(range(len(rows)), key=lambda place: abs(place - len(rows) // 2))
    typical = [rows[place] for place in middle if rows[place] not in worst][: count // 2]
    shown = sorted(worst, key=lambda row: float(average[row])) + typical
    itself = queries is bank
    cosines, found = nearest(bank.features, queries.features[shown].to(device), k=RESULTS_DRAWN + itself)
    sheet: list[list[Panel | None]] = []
    for row, near, results in zip(shown, cosines.tolist(), found.tolist(), strict=True):
        texts = dict(zip(results, format_cosines(near), strict=True))
        others = [one for one in results if not (itself and one == row)][:RESULTS_DRAWN]
        panels: list[Panel | None] = [queries.panel(row, f"AP {100 * average[row]:.1f} %"), None]
        for one in others:
            colour = _GREEN if bank.targets[one] == queries.targets[row] else _RED
            panels.append(bank.panel(one, f"{texts[one]}  {shorten(bank.labels[one], 20)}", colour))
        sheet.append(panels)
    write_sheet(sheet, path, names=[queries.labels[row] for row in shown], titles=["query"])


def _tables(config: RetrievalConfig, details: dict[str, Any]) -> Iterator[str]:
    """Yield what was judged, the figures, and the lowest classes."""
    asked = f"{config.queries} " if config.queries else ""
    among = f"{details['images']:,} images of {config.source}" if config.queries else "the other images"
    yield f"{asked}{plural(details['queries'], 'query', 'queries')}, each ranks {among}"
    rows = [[title, str(Interval(**one))] for title, one in details["results"].items()]
    note = f"in a random order R-precision would be {details['r_precision_of_a_random_order']:.2f} %"
    if left := details["queries_without_relevant_images"]:
        note += f"\n{plural(left, 'query', 'queries')} without a relevant image left out"
    yield f"{format_table(['', '%'], rows)}\n{note}"
    title = "class" + (", the lowest" if len(details["per_class"]) > _CLASSES_SHOWN else "")
    lowest = list(details["per_class"].items())[:_CLASSES_SHOWN]
    yield format_table([title, "mAP %"], [[name, f"{value:.2f}"] for name, value in lowest])
