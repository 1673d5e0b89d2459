"""The page itself: one HTML file that needs nothing but a browser, and in which every text is only text."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from dino_vit.report.curves import charts
from dino_vit.report.record import RunRecord, differences, facts, finite, state
from dino_vit.report.sheets import Row

ASSETS = files("dino_vit.report") / "assets"
SCRIPTS = ("charts.js", "explorer.js", "page.js")


@dataclass(kw_only=True)
class Pictures:
    """What a checkpoint and the images are needed for; what is not there has a reason."""

    views: list[Row] = field(default_factory=list)
    attention: list[Row] = field(default_factory=list)
    neighbours: list[Row] = field(default_factory=list)
    explorer: dict[str, Any] | None = None
    reasons: dict[str, str] = field(default_factory=dict)  # by section
    notes: list[str] = field(default_factory=list)


def live_data(record: RunRecord) -> dict[str, Any]:
    """Return what changes while a run goes on: texts by the place that they stand in, and the charts."""
    diagnosis, history = state(record)
    total = record.total_steps
    return {
        "state": diagnosis.state,
        "tone": "bad" if diagnosis.advice else "plain" if diagnosis.state == "starting" else "good",
        "texts": {
            "state": diagnosis.state,
            "history": history,
            "advice": diagnosis.advice,
            **{f"fact-{name}": text for name, text in facts(record)},
            **{f"figure-{name}": text for name, text in figures(record)},
        },
        "progress": record.step / total if total else 0,
        "charts": charts(record),
    }


def figures(record: RunRecord) -> list[tuple[str, str]]:
    """Return the few numbers to look at first."""
    found: list[tuple[str, str]] = []
    knn = [record_["knn"] for record_ in record.records if finite(record_.get("knn")) is not None]
    rank = [record_["rankme"] for record_ in record.records if finite(record_.get("rankme")) is not None]
    before = {name: finite(record.baseline.get(name)) for name in ("knn", "raw_pixels", "rankme")}
    if knn or before["knn"] is not None:
        found.append(("k-NN", f"{knn[-1]:.1f} %" if knn else "–"))
        if before["knn"] is not None:
            found.append(("k-NN, before the first step", f"{before['knn']:.1f} %"))
        if before["raw_pixels"] is not None:
            found.append(("k-NN, raw pixels", f"{before['raw_pixels']:.1f} %"))
    if rank:
        found.append(("effective rank", f"{rank[-1]:.0f}"))
    if record.records:
        last = record.readings[-1]
        found.append(("loss − ln(prototypes)", f"{last.excess:+.2f}".replace("-", "−")))
        found.append(("entropy gap", f"{last.entropy_gap:.2f}"))
    return found


def render(record: RunRecord, pictures: Pictures, *, live: bool = False, version: int | None = None) -> str:
    """Return the page of a run; a live one asks the server that it came from for news."""
    now = live_data(record)
    style = (ASSETS / "page.css").read_text(encoding="utf-8")
    script = "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in SCRIPTS)
    data = {**now, "live": live, "version": version, "explorer": pictures.explorer}
    return Template((ASSETS / "page.html").read_text(encoding="utf-8")).substitute(
        policy=_policy(style, script, live=live),
        style=style,
        script=script,
        title=escape(record.folder.resolve().name),
        folder=escape(str(record.folder)),
        tone=now["tone"],
        state=escape(now["texts"]["state"]),
        history=escape(now["texts"]["history"]),
        advice=escape(now["texts"]["advice"]),
        progress=f"{now['progress']:.4f}",
        figures=_figures(figures(record)),
        facts=_facts(facts(record)),
        settings=_settings(differences(record)),
        notes="".join(f'<p class="note">{escape(note)}</p>' for note in pictures.notes),
        no_charts="" if now["charts"] else _missing("There is no reading in metrics.jsonl yet."),
        attention=_rows(pictures.attention, "attention", pictures.reasons),
        neighbours=_rows(pictures.neighbours, "neighbours", pictures.reasons),
        views=_rows(pictures.views, "views", pictures.reasons),
        no_explorer=_missing(pictures.reasons.get("explorer", "")),
        data=_json(data),
    )


def _policy(style: str, script: str, *, live: bool) -> str:
    """Allow this style and this script alone, pictures from the page itself, and no connection elsewhere."""

    def allowed(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    rules = {
        "default-src": "'none'",
        "style-src": allowed(style),
        "script-src": allowed(script),
        "img-src": "data:",
        "connect-src": "'self'" if live else "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def _json(data: object) -> str:
    """Write JSON that no text in it can break out of."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _figures(found: Iterable[tuple[str, str]]) -> str:
    return "".join(
        f'<div><dt>{escape(name)}</dt><dd data-text="figure-{escape(name)}">{escape(value)}</dd></div>'
        for name, value in found
    )


def _facts(found: Iterable[tuple[str, str]]) -> str:
    return "".join(
        f'<div><dt>{escape(name)}</dt><dd data-text="fact-{escape(name)}">{escape(text)}</dd></div>'
        for name, text in found
    )


def _settings(rows: Sequence[tuple[str, str, str, str]]) -> str:
    if not rows:
        return "<p>Every setting is the default.</p>"
    reasons = any(reason for *_, reason in rows)
    names = ["setting", "value", "default", *(["why"] if reasons else [])]
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1 : len(names)])
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="Settings that differ from the defaults">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _rows(rows: Sequence[Row], section: str, reasons: dict[str, str]) -> str:
    if not rows:
        return _missing(reasons.get(section, ""))
    shown = (
        f'<div class="row"><h3>{escape(row.name)}</h3><div class="tiles">{_tiles(row)}</div></div>'
        for row in rows
    )
    return "".join(shown)


def _tiles(row: Row) -> str:
    return "".join(
        f'<figure><img src="{tile.uri}" alt="{escape(f"{row.name}: {tile.title}")}" loading="lazy">'
        f"<figcaption>{escape(tile.title)}</figcaption></figure>"
        for tile in row.tiles
    )


def _missing(reason: str) -> str:
    return f'<p class="missing">{escape(reason)}</p>' if reason else ""
