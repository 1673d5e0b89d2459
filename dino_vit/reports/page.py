"""The page of a run: one HTML file that loads nothing else, and in which names of files are only text."""

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from dino_vit.config.sections import BASELINES
from dino_vit.core.text import printable, public
from dino_vit.method.terms import all_terms
from dino_vit.reports.accuracies import accuracies, describe_knn, evaluations_of
from dino_vit.reports.record import RecordedRun, changed_settings, facts, label_command, verdict
from dino_vit.reports.verdict import BAD, WAITING, WAITING_HELP
from dino_vit.views.build import MASKED_VIEWS
from dino_vit.views.pictures import Tile

SHOWN = 4  # charts; the page has the others behind a line to open
BUCKETS = 300  # the lowest and the highest point of each are kept
LOSS = "How far the student is from the teacher. At the dashed line all images are alike to the student."
IMITATED = "How far the student's features are from the teacher's: 1 minus the cosine."
ENTROPIES = (
    "How undecided the teacher is. Both at the dashed line, or both 0: a collapse, all images are alike."
)
GAP = "Difference between the two entropies: how much an answer depends on its image. 0 is a collapse."
KNN = (
    "Images labelled right by those most similar to them (%), or mAP. The CLS token sums up an image, cells "
    "are what the network sees at 3 × 3 places."
)
RANK = "In about how many ways the network tells images apart."
SINGLE = [  # field of a record, title, caption
    ("probe", "Linear classifier", "Images labelled right (%), or mAP, by a ridge regression to the labels."),
    ("colour", "Explained by colour", "Share of the features' variance that the images' colours explain."),
    ("embedding_std", "Feature spread", "1: over the whole sphere, 0: all images at one point."),
    ("prototypes_in_use", "Prototypes in use", "By the teacher, in a batch."),
    *((name, term.title, term.caption) for name, term in all_terms().items() if term.title),
    ("gradient_norm", "Gradient norm", "Length of the student's gradient, before clipping."),
    ("lr", "Learning rate", ""),
    ("momentum", "Teacher momentum", "At 1 the teacher does not change."),
    ("teacher_temp", "Teacher temperature", "A lower one gives more decided answers."),
    ("weight_decay", "Weight decay", ""),
    ("images_per_second", "Throughput", "In images per second."),
    ("data_wait", "Waiting for images", f"Share of the time; above {WAITING:g}, {WAITING_HELP}."),
]
MAX_NAME = 120  # characters


class Row(NamedTuple):
    """An image and the pictures that belong to it."""

    name: str
    tiles: list[Tile]


@dataclass(kw_only=True)
class Pictures:
    """The sections of a page that need the images or a checkpoint, empty where these are missing."""

    views: list[Row] = field(default_factory=list)
    attention: list[Row] = field(default_factory=list)
    map: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)


def render(record: RecordedRun, pictures: Pictures) -> str:
    """Return the page of a run."""
    outcome = verdict(record)
    return fill_in(
        "page.html",
        title=record.folder.resolve().name,
        folder=record.folder,
        tone="bad" if outcome.diagnosis in BAD else outcome.diagnosis,
        outcome=outcome,
        label=label_command(record.config, record.folder) if record.baseline.knn is None else "",
        training=facts(record)["training"],
        figures=figures(record),
        facts=facts(record),
        settings=changed_settings(record),
        evaluations=record.evaluations,
        pictures=pictures,
        shown=SHOWN,
        data={"charts": charts(record), "shown": SHOWN, "map": pictures.map},
    )


def fill_in(template: str, **values: Any) -> str:
    """Return a page that loads nothing else, in which all text but our own is escaped."""
    environment = Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        # Markup is our own; all other text may come from names of files.
        finalize=lambda value: value if isinstance(value, Markup) else printable(public(str(value))),
        loader=PackageLoader("dino_vit.reports", "assets"),
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}  # in the order given
    return environment.get_template(template).render(nonce=secrets.token_urlsafe(), **values)


def figures(record: RecordedRun) -> dict[str, str]:
    """Return the few numbers to look at first: the accuracy or the rank, and what it compares with."""
    before, newest = record.baseline, evaluations_of(record.history)[-1:]
    if newest and newest[0].knn is not None:
        (name, knn), *others = accuracies(newest[0], before).items()
        return {f"{describe_knn(before)}, {name}": knn, **dict(others)}
    rank = newest[0].rankme if newest else None
    ways = "ways to tell images apart"
    ranks = {ways: rank, f"{ways}, before training": before.rankme}
    return {name: f"{value:.0f}" for name, value in ranks.items() if value}


def charts(record: RecordedRun) -> list[dict[str, Any]]:
    """Return the charts that the records of a run allow, as `page.js` draws them; the first matter most."""
    prototypes = record.history[-1].prototypes if record.history else None
    alike = {"all alike": math.log(prototypes)} if prototypes else {}
    share = MASKED_VIEWS  # of the global views, by which the loss of patches is divided
    alike_patches = {name: share * value for name, value in alike.items()}
    entropies = {"on average": "mean_output_entropy", "about each image": "output_entropy"}
    patch_entropies = {name: f"patch_{field}" for name, field in entropies.items()}
    knn = record.baseline_levels("knn", *BASELINES, "largest_class")
    metric = record.baseline.metric.replace("top-1", "accuracy")
    rank = record.baseline_levels("rankme")
    loss = LOSS if prototypes else IMITATED
    specs: list[tuple[str, str, dict[str, str], dict[str, float], str]] = [
        # title, caption, fields of records by the name of their curve, values to compare with by name, unit
        ("Loss", loss, {"loss": "loss"}, alike, ""),
        ("Teacher entropies", ENTROPIES, entropies, alike, ""),
        (f"k-NN {metric}", KNN, {"CLS token": "knn", "with levelled cells": "levelled_knn"}, knn, "%"),
        ("Effective rank", RANK, {"effective rank": "rankme"}, rank, ""),
        ("Entropy gap", GAP, {"gap": "entropy_gap"}, {}, ""),
        ("Loss of masked patches", loss, {"loss": "patch"}, alike_patches, ""),
        ("Teacher entropies of masked patches", ENTROPIES, patch_entropies, alike, ""),
        ("Entropy gap of masked patches", GAP, {"gap": "patch_entropy_gap"}, {}, ""),
        *((title, caption, {title: field}, {}, "") for field, title, caption in SINGLE),
    ]
    drawn = []
    for title, caption, fields, levels, unit in specs:
        curves = {name: thin(curve(record, field)) for name, field in fields.items()}
        if series := {name: points for name, points in curves.items() if points}:
            texts = {"title": title, "caption": caption, "unit": unit}
            drawn.append({**texts, "series": series, "levels": levels})
    return drawn


def curve(record: RecordedRun, field: str) -> list[tuple[int, float]]:
    """Return the points of a curve, from step 0 if the figure was measured before training."""
    values = [(metrics.step, getattr(metrics, field, metrics.terms.get(field))) for metrics in record.history]
    if record.history and hasattr(record.history[0], field):  # a term of the loss may be named as a baseline
        values = [(0, getattr(record.baseline, field, None)), *values]
    return [(step, value) for step, value in values if value is not None and math.isfinite(value)]


def thin(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Keep few enough points for a light page, with both ends and every peak among them."""
    if len(points) <= 2 * BUCKETS:
        return list(points)
    kept = {0, len(points) - 1}
    for bucket in np.array_split(np.arange(len(points)), BUCKETS):
        kept |= {min(bucket, key=lambda i: points[i][1]), max(bucket, key=lambda i: points[i][1])}
    return [points[i] for i in sorted(kept)]
