"""Find the originals of copies among other images: of own copies, or of copies that it makes of photos."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from dino_vit.commands import Result, format_table
from dino_vit.config.settings import Dimension, FewOrZero, NonEmpty, Problem, Seed, setting
from dino_vit.core.distributed import is_main_process
from dino_vit.core.progress import plural
from dino_vit.data.images.pixels import RGB
from dino_vit.data.sources.open import Source, open_source
from dino_vit.data.sources.source import Subset, spread
from dino_vit.eval.accuracy import Accuracy, results_path, write_results
from dino_vit.eval.confidence import Interval, Measured, measured_share
from dino_vit.eval.disturbances.copies import COPY_KINDS, Kind, copies
from dino_vit.eval.disturbances.source import Disturbance, DisturbedSource
from dino_vit.eval.features.extraction import FeatureSpec
from dino_vit.eval.features.frozen import CachedConfig, FrozenBackbone, frozen_backbone
from dino_vit.eval.features.store import StoredFeatures
from dino_vit.eval.maps.pictures import Panel, thumbnail, write_sheet
from dino_vit.eval.neighbours import unit
from dino_vit.eval.retrieval.copies import CopyFigures, Search, Transform, copy_figures, search_originals
from dino_vit.eval.retrieval.pairs import true_pairs
from dino_vit.eval.retrieval.pictures import draw_copies
from dino_vit.eval.retrieval.whitening import Whitening
from dino_vit.views.preparation import Fit


class CopiesConfig(CachedConfig):
    """Find the originals of copies by the features of a frozen backbone."""

    source: str | None = setting(None, "photos to make copies of; null: originals= and queries= are given")  # type: ignore[assignment]
    originals: str | None = setting(None, "images to search among")
    queries: str | None = setting(None, "copies of some of originals, and possibly other images")
    pairs: str | None = setting(None, "CSV of query,original by name; null: a copy is named as its original")
    distractors: str | None = setting(None, "further images to search among")
    whitening: str | None = setting(None, "images to learn a whitening of features from; null: none")
    kinds: NonEmpty[Kind] = setting(get_args(Kind), "kinds of copies to make, each at several strengths")
    sample: Dimension = setting(200, "photos of source to make copies of, at most; all are searched")
    seed: Seed = setting(0, "of what is random in copies")
    tokens: Literal["cls", "cls+mean", "cls+gem", "gem"] = setting(
        "cls+gem", "features of an image: the CLS token, the mean or generalised mean (GeM) of patches"
    )
    fit: Fit = setting("whole", "crop: resize and centre-crop; whole: resize the whole image to the size")
    examples: FewOrZero = setting(6, "images to draw, with what was found")
    output: str | None = setting(
        None, "JSON file, pictures beside; null: copies.json in eval/ of the run or beside the weights"
    )

    def contradictions(self) -> Iterator[Problem]:
        """Yield ways that exclude each other, and settings that would have no effect."""
        own = {name: getattr(self, name) for name in ("originals", "queries", "pairs")}
        if self.source and any(own.values()):
            given = next(name for name, value in own.items() if value)
            text = f"source={self.source} asks for copies of these photos, {given}= for own copies; give one"
            yield Problem(text, ("source", given))
        elif not self.source and not (self.originals and self.queries):
            text = "give photos to make copies of, or originals=FOLDER queries=FOLDER with own copies"
            yield Problem(text, ("source", "originals", "queries"))
        elif self.originals == self.queries and not self.source:
            text = "each image of queries would find itself in originals, which are the same; give copies"
            yield Problem(text, ("queries", "originals"))
        for name in ("kinds", "sample", "seed"):
            if self.queries and getattr(self, name) != type(self).model_fields[name].default:
                yield Problem(f"{name} is for copies of source, which is not given", (name, "source"))


@dataclass(frozen=True, kw_only=True)
class CopiesResult(Result):
    """How well the originals of copies are found."""

    figures: CopyFigures  # of own queries; of photos those of the photos themselves
    kinds: dict[str, dict[float, CopyFigures]]  # by kind and strength; empty for own queries
    measured: Measured | None = field(repr=False)  # the share of its copies by which each photo is found
    path: Path  # of the JSON file
    plot: Path | None  # of the figures by kind and strength
    sheet: Path | None  # of examples
    details: dict[str, Any] = field(repr=False)  # all that the JSON file holds


class _Bank:
    """The images that are searched: originals, and distractors after them."""

    def __init__(self, config: CopiesConfig, frozen: FrozenBackbone, originals: str) -> None:
        self.frozen, self.spec = frozen, FeatureSpec(tokens=config.tokens)
        self.sources = [open_source(one) for one in (originals, config.distractors) if one]
        titles = ("features of the originals", "features of the distractors")
        self.features = [self.of(source, title) for source, title in zip(self.sources, titles, strict=False)]
        self.transform: Transform = unit
        if config.whitening:
            learned = self.of(open_source(config.whitening), "features for the whitening")
            self.transform = Whitening.learn(learned.values, frozen.device)
        known = self.features[0].indices
        self.row = dict(zip(known.tolist(), range(len(known)), strict=True))  # by index in the originals

    def __len__(self) -> int:
        return sum(len(one.values) for one in self.features)

    def of(self, source: Source, title: str) -> StoredFeatures:
        """Return the features of a source."""
        return self.frozen.features(source, spec=self.spec, title=title)

    def search(self, queries: NDArray[Any], pairs: Sequence[tuple[int, int]]) -> Search:
        """Search for the originals of queries; `pairs` are rows of queries and of the bank."""
        true = torch.tensor(sorted(set(pairs)))
        banks = [one.values for one in self.features]
        device = self.frozen.device
        return search_originals(torch.as_tensor(queries), banks, true, device, self.transform)

    def panel(self, row: int, caption: str = "{}") -> Panel:
        """Return the picture of a row; {} in the caption is its name."""
        originals = len(self.features[0].indices)
        part, row = (0, row) if row < originals else (1, row - originals)
        source, index = self.sources[part], int(self.features[part].indices[row])
        return Panel(thumbnail(source, index, RGB), caption.format(source.name(index)))


def run(config: CopiesConfig) -> CopiesResult:
    """Search for originals, write JSON and pictures."""
    frozen = frozen_backbone(config)
    path = results_path("copies", weights=config.weights, output=config.output)
    return _of_photos(config, frozen, path) if config.source else _of_queries(config, frozen, path)


def _of_queries(config: CopiesConfig, frozen: FrozenBackbone, path: Path) -> CopiesResult:
    """Search for the originals of own copies."""
    assert config.originals
    assert config.queries
    bank, source = _Bank(config, frozen, config.originals), open_source(config.queries)
    true = true_pairs(source, bank.sources[0], config.pairs)
    queries = bank.of(source, "features of the queries")
    rows = dict(zip(queries.indices.tolist(), range(len(queries.indices)), strict=True))
    pairs = [(rows[query], bank.row[one]) for query, one in true if query in rows and one in bank.row]
    if not pairs:
        raise ValueError("of no query with an original can both images be read")
    search = bank.search(queries.values, pairs)
    figures = copy_figures(search)
    sheet = path.with_name(f"{path.stem}-examples.png") if config.examples else None
    details = {
        **_details(config, frozen, bank),
        "queries": len(queries.indices),
        "queries_with_an_original": figures.recall_at_1.images,
        **_plain(figures),
    }
    if is_main_process():
        write_results(path, details)
        if sheet:
            _draw_queries(bank, source, queries, search, sheet, config.examples)
    alone = len(queries.indices) - figures.recall_at_1.images
    text = f"{plural(figures.recall_at_1.images, 'copy', 'copies')} and {plural(alone, 'query', 'queries')} "
    title = f"{text}without an original, searched for among {len(bank):,} images"
    written = "\n".join(map(str, [path, *([sheet] if sheet else [])]))
    return CopiesResult(
        figures=figures,
        kinds={},
        measured=None,
        path=path,
        plot=None,
        sheet=sheet,
        details=details,
        text=f"{title}\n\n{_table([['queries', '', *_cells(figures)]])}\n\n{written}",
    )


def _of_photos(config: CopiesConfig, frozen: FrozenBackbone, path: Path) -> CopiesResult:
    """Make copies of some photos and search for them among all."""
    assert config.source
    if frozen.model.channels not in (1, 3):
        raise ValueError(f"copies are RGB images, but the weights take {frozen.model.channels} channels")
    bank = _Bank(config, frozen, config.source)
    photos, stored = bank.sources[0], bank.features[0]
    rows = spread(len(stored.indices), config.sample)
    sample = Subset(photos, stored.indices[rows])
    unchanged = copy_figures(bank.search(stored.values[rows], list(enumerate(rows))))
    found: dict[str, dict[float, NDArray[np.bool_]]] = {kind: {} for kind in config.kinds}
    kinds: dict[str, dict[float, CopyFigures]] = {kind: {} for kind in config.kinds}
    for disturbance in copies(config.kinds):
        copied = bank.of(DisturbedSource(sample, disturbance, seed=config.seed), f"copies: {disturbance}")
        pairs = [(row, rows[index]) for row, index in enumerate(copied.indices.tolist())]
        search = bank.search(copied.values, pairs)
        recognised = np.zeros(len(sample), np.bool_)
        recognised[copied.indices] = search.found.numpy()
        found[disturbance.kind][disturbance.strength] = recognised
        kinds[disturbance.kind][disturbance.strength] = copy_figures(search)
    shares = np.mean([one for of_kind in found.values() for one in of_kind.values()], axis=0)
    plot, sheet = (path.with_name(f"{path.stem}{end}.png") for end in ("", "-examples"))
    details = {
        **_details(config, frozen, bank),
        "sample": len(sample),
        "unchanged": _plain(unchanged),
        "copies": [
            {
                "kind": kind,
                "strength": strength,
                "described": COPY_KINDS[kind].describe(strength),
                **_plain(figures),
            }
            for kind, of_kind in kinds.items()
            for strength, figures in of_kind.items()
        ],
    }
    if is_main_process():
        write_results(path, details)
        draw_copies(unchanged, kinds, plot)
        if config.examples:
            _draw_photos(sample, found, config, sheet)
    written = [path, plot, *([sheet] if config.examples else [])]
    title = f"copies of {plural(len(sample), 'photo')}, searched for among {len(bank):,} images"
    text = [title, _table(_rows(unchanged, kinds)), _breaking(kinds), "\n".join(map(str, written))]
    return CopiesResult(
        figures=unchanged,
        kinds=kinds,
        measured=measured_share("copies found", stored.indices[rows], torch.from_numpy(shares)),
        path=path,
        plot=plot,
        sheet=sheet if config.examples else None,
        details=details,
        text="\n\n".join(text),
    )


def _details(config: CopiesConfig, frozen: FrozenBackbone, bank: _Bank) -> dict[str, Any]:
    return {
        "weights": frozen.describe_weights(),
        "settings": config.model_dump(mode="json"),
        "searched": len(bank),
        "distractors": sum(len(one.values) for one in bank.features[1:]),
    }


def _plain(figures: CopyFigures) -> dict[str, Any]:
    return {
        name: one._asdict() if isinstance(one, Accuracy | Interval) else one
        for name, one in figures._asdict().items()
    }


def _rows(unchanged: CopyFigures, kinds: Mapping[str, Mapping[float, CopyFigures]]) -> list[list[str]]:
    rows = [["unchanged", "", *_cells(unchanged)]]
    for kind, of_kind in kinds.items():
        for strength, figures in of_kind.items():
            rows.append([kind, COPY_KINDS[kind].describe(strength), *_cells(figures)])
    return rows


def _cells(figures: CopyFigures) -> list[str]:
    intervals = Interval(*figures.recall_at_1[:3]), figures.mean_ap, figures.micro_ap
    return [*map(str, intervals), f"{figures.recall_at_precision_90:.1f}"]


def _table(rows: Sequence[Sequence[str]]) -> str:
    header = ["", "", "recall@1 %", "mAP %", "micro-AP %", "recall at precision 90 %"]
    return format_table(header, rows)


def _breaking(kinds: Mapping[str, Mapping[float, CopyFigures]]) -> str:
    """Return from which strength on each kind of copy is found less than every other time."""
    broken = []
    for kind, of_kind in kinds.items():
        missed = [strength for strength, figures in of_kind.items() if figures.recall_at_1.percent < 50]
        if missed:
            broken.append(f"{kind} {COPY_KINDS[kind].describe(missed[0])}")
    return (
        f"recall@1 is below 50 % from: {', '.join(broken)}" if broken else "recall@1 is 50 % or more for all"
    )


def _draw_photos(
    sample: Source,
    found: Mapping[str, Mapping[float, NDArray[np.bool_]]],
    config: CopiesConfig,
    path: Path,
) -> None:
    """Draw photos beside their copies: of each kind the weakest that was missed, or else the strongest."""
    rows = []
    for index in spread(len(sample), config.examples):
        row: list[Panel | None] = [Panel(thumbnail(sample, index, RGB), sample.name(index))]
        for kind, of_kind in found.items():
            missed = [strength for strength, one in of_kind.items() if not one[index]]
            strength = (missed or list(of_kind)[-1:])[0]
            disturbance = Disturbance(kind, strength, COPY_KINDS[kind].apply)
            copied = DisturbedSource(sample, disturbance, seed=config.seed)
            caption = f"{'missed' if missed else 'found'}: {COPY_KINDS[kind].describe(strength)}"
            row.append(Panel(thumbnail(copied, index, RGB), caption))
        rows.append(row)
    write_sheet(rows, path, titles=["photo", *found])


def _draw_queries(
    bank: _Bank, source: Source, queries: StoredFeatures, search: Search, path: Path, count: int
) -> None:
    """Draw queries beside their originals and what was found, first those that were missed."""
    known, first = torch.unique(search.pairs[:, 0], return_inverse=True)
    found = search.found
    rows = []
    for place in found.long().argsort(stable=True)[:count].tolist():
        row, original = int(known[place]), int(search.pairs[(first == place).nonzero()[0, 0], 1])
        index, nearest = int(queries.indices[row]), int(search.nearest[row])
        caption = f"{{}}: {'found' if found[place] else 'missed'}"
        picture = Panel(thumbnail(source, index, RGB), source.name(index))
        rows.append([picture, bank.panel(original), bank.panel(nearest, caption)])
    write_sheet(rows, path, titles=["query", "its original", "nearest image"])
