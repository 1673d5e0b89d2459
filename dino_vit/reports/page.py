"""The page of a run: one HTML file that loads nothing else, and in which names of files are only text."""

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from dino_vit.config.sections import BASELINES
from dino_vit.core.text import printable, public
from dino_vit.method.terms import all_terms
from dino_vit.reports.accuracies import better_baseline
from dino_vit.reports.record import RunRecord, changed_settings, diagnosis, facts, verdict
from dino_vit.reports.verdict import BAD, RISES, WAITING, WAITING_HELP
from dino_vit.views.build import MASKED_VIEWS

FIGURES = 4  # the numbers to look at first
SHOWN = 4  # charts; the page has the others behind a line to open
BUCKETS = 300  # the lowest and the highest point of each are kept
COMPARED = {
    "knn": "before training it was",
    "pixels": "without a network, by their pixels alone, it is",
    "gradients": "without a network, by their edges alone (gradients), it is",
}
LOSS = "Cross-entropy of student and teacher. At the dashed line the student's output is uniform."
IMITATED = "1 minus the cosine with the features of the frozen teacher."
ENTROPIES = "Both at the dashed line: a collapse to uniform outputs. Both 0: to a single prototype."
GAP = "Difference between the two entropies: how much an output depends on its image. 0 is a collapse."
KNN = "Share of images whose class is predicted (%), or the mAP of several labels."
RANK = "How many dimensions the features of the teacher span."
SINGLE = [  # field of a record, title, caption
    (
        "probe",
        "Ridge probe",
        "The same by a linear classifier, trained on the images that vote in k-NN or on each half.",
    ),
    ("colour", "Explained by colour", "Share of the features' variance that the images' colours explain."),
    ("embedding_std", "Feature spread", "1: over the whole sphere, 0: all images at one point."),
    ("prototypes_in_use", "Prototypes in use", "By the teacher, in a batch."),
    *((name, term.title, term.caption) for name, term in all_terms().items() if term.title),
    ("gradient_norm", "Gradient norm", "Of the student, before clipping."),
    ("lr", "Learning rate", ""),
    ("momentum", "Teacher momentum", "At 1 the teacher does not change."),
    ("teacher_temp", "Teacher temperature", "A lower one gives sharper outputs."),
    ("weight_decay", "Weight decay", ""),
    ("images_per_second", "Throughput", "In images per second."),
    ("data_wait", "Waiting for images", f"Share of the time; above {WAITING:g}, {WAITING_HELP}."),
]
MAX_NAME = 120  # characters


class Tile(NamedTuple):
    """A picture and its caption."""

    uri: str
    caption: str


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


def render(record: RunRecord, pictures: Pictures) -> str:
    """Return the page of a run, in which all text but our own is escaped."""
    environment = Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        # Markup is our own; all other text may come from names of files.
        finalize=lambda value: value if isinstance(value, Markup) else printable(public(str(value))),
        loader=PackageLoader("dino_vit.reports", "assets"),
    )
    environment.filters["code"] = _with_code
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}  # in the order given
    name, history = diagnosis(record)
    return environment.get_template("page.html").render(
        nonce=secrets.token_urlsafe(),
        title=record.folder.resolve().name,
        folder=record.folder,
        diagnosis=name,
        tone="bad" if name in BAD else "good" if name in ("learning", "done") else "plain",
        history=history,
        plain=plain(record),
        outcome=verdict(record).paragraphs,
        figures=figures(record),
        facts=facts(record),
        settings=changed_settings(record),
        evaluations=record.evaluations,
        pictures=pictures,
        shown=SHOWN,
        data={"charts": charts(record), "shown": SHOWN, "map": pictures.map},
    )


def _with_code(text: str) -> Markup:
    """Return text whose parts in backticks are code."""
    parts = printable(public(text)).split("`")
    return Markup().join(
        Markup("<code>{}</code>" if n % 2 else "{}").format(part) for n, part in enumerate(parts)
    )


def plain(record: RunRecord) -> str:
    """Say what the network does with images, for readers who know no statistics."""
    knn, rank, before = record.latest("knn"), record.latest("rankme"), record.baseline.figures()
    if knn is None:
        if rank is None:
            return ""
        ways = f", before training in {before['rankme']:.0f}" if "rankme" in before else ""
        matter = "only labels can say whether these are the ways that matter"
        return f"The network tells images apart in about {rank:.0f} ways{ways}; {matter}."
    metric = record.baseline.metric
    right = f"gets {knn:.0f} of 100 right"
    right = right if metric == "top-1" else f"finds labels with an {metric} of {knn:.0f} %"
    text = f"Labelling each image by the most similar others, the network {right}"
    levels = {name: before[name] for name in COMPARED if name in before}
    if not levels:
        return f"{text}."
    best = max(levels, key=lambda name: levels[name])
    worth = "so far it is no better" if knn < levels[best] + RISES else "so it has learned"
    worth = "it has not learned enough yet" if knn <= levels[best] - RISES else worth
    return f"{text}; {COMPARED[best]} {levels[best]:.0f}: {worth}."


def figures(record: RunRecord) -> dict[str, tuple[str, str]]:
    """Return the few numbers to look at first, and beside each what it compares with."""
    before, found = record.baseline.figures(), {}
    knn, probe, rank = (record.latest(name) for name in ("knn", "probe", "rankme"))
    kind = "accuracy" if record.baseline.metric == "top-1" else record.baseline.metric
    if knn is not None:
        of = "among the training images" if record.baseline.leave_one_out else ""
        beside = ", ".join(filter(None, (of, _before(before, "knn"))))
        found[f"{kind} of neighbours"] = f"{knn:.1f} %", beside
    if probe is not None:
        found[f"{kind} of a simple classifier"] = f"{probe:.1f} %", _before(before, "probe")
    if knn is not None and (better := better_baseline(record.baseline)):
        levels = [f"{name} {before[name]:.1f} %" for name in BASELINES if name in before]
        name, above = "above gradients and pixels", knn - better[1]
        if above < 0:
            name = f"below {better[0]}"
        found[f"points {name}"] = f"{abs(above):.1f}", ", ".join(levels)
    found |= newest_evaluation(record)
    if rank is not None and len(found) < FIGURES:
        found["dimensions that the features use"] = f"{rank:.0f}", _before(before, "rankme")
    return found


def _before(levels: Mapping[str, float], name: str) -> str:
    """Return a figure before training, if there is one."""
    unit = "" if name == "rankme" else " %"
    return f"before training {levels[name]:.{1 if unit else 0}f}{unit}" if name in levels else ""


def newest_evaluation(record: RunRecord) -> dict[str, tuple[str, str]]:
    """Return the figure of the newest file of results, which may be of images that were held out."""
    for evaluation in record.evaluations:
        if evaluation.percent:
            percent, _, interval = evaluation.percent.partition(" ")
            title = f"{evaluation.figure}: {evaluation.data}" if evaluation.data else evaluation.figure
            return {title: (f"{float(percent):.1f} %", f"{evaluation.command} {interval}")}
    return {}


def charts(record: RunRecord) -> list[dict[str, Any]]:
    """Return the charts that the records of a run allow, as `page.js` draws them; the first matter most."""
    prototypes = record.history[-1].prototypes if record.history else None
    uniform = {f"ln({prototypes})": math.log(prototypes)} if prototypes else {}
    share = MASKED_VIEWS  # of the global views, by which the loss of patches is divided
    uniform_patches = {f"{share:g} · {name}": share * value for name, value in uniform.items()}
    entropies = {"mean output": "mean_output_entropy", "each output": "output_entropy"}
    patch_entropies = {name: f"patch_{field}" for name, field in entropies.items()}
    knn = record.baseline_levels("knn", *BASELINES, "largest_class")
    metric = record.baseline.metric.replace("top-1", "accuracy")
    rank = record.baseline_levels("rankme")
    loss = LOSS if prototypes else IMITATED
    specs: list[tuple[str, str, dict[str, str], dict[str, float], str]] = [
        # title, caption, fields of records by the name of their curve, values to compare with by name, unit
        ("Loss", loss, {"loss": "loss"}, uniform, ""),
        ("Teacher entropies", ENTROPIES, entropies, uniform, ""),
        (f"k-NN {metric}", KNN, {"k-NN": "knn", "best tokens": "best_knn"}, knn, "%"),
        ("Effective rank", RANK, {"effective rank": "rankme"}, rank, ""),
        ("Entropy gap", GAP, {"gap": "entropy_gap"}, {}, ""),
        ("Loss of masked patches", loss, {"loss": "patch"}, uniform_patches, ""),
        ("Teacher entropies of masked patches", ENTROPIES, patch_entropies, uniform, ""),
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


def curve(record: RunRecord, field: str) -> list[tuple[int, float]]:
    """Return the points of a curve, from step 0 if the figure was measured before training."""
    values = [(metrics.step, getattr(metrics, field, metrics.terms.get(field))) for metrics in record.history]
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
