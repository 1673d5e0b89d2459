"""The page itself: one HTML file that loads nothing else, and in which names of files are only text."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from dino_vit.report.curves import charts
from dino_vit.report.record import RunRecord, changed_settings, facts, state
from dino_vit.report.sheets import Row

ASSETS = files("dino_vit.report") / "assets"
SCRIPTS = ("charts.js", "explorer.js", "page.js")


@dataclass(kw_only=True)
class Pictures:
    """The sections of a page that need the images or a checkpoint."""

    views: list[Row] = field(default_factory=list)
    attention: list[Row] = field(default_factory=list)
    neighbours: list[Row] = field(default_factory=list)
    explorer: dict[str, Any] | None = None
    missing: dict[str, str] = field(default_factory=dict)  # why a section is empty, by its name
    notes: list[str] = field(default_factory=list)


def live_data(record: RunRecord) -> dict[str, Any]:
    """Return what changes while a run goes on: texts by their `data-text` on the page, and the charts."""
    diagnosis, history = state(record)
    tone = "plain" if diagnosis.state == "starting" else "good"
    return {
        "tone": "bad" if diagnosis.advice else tone,
        "texts": {
            "state": diagnosis.state,
            "history": history,
            "advice": diagnosis.advice,
            **{f"fact-{name}": text for name, text in facts(record).items()},
            **{f"figure-{name}": text for name, text in figures(record).items()},
        },
        "progress": record.step / record.total_steps if record.total_steps else 0,
        "charts": [asdict(chart) for chart in charts(record)],
    }


def figures(record: RunRecord) -> dict[str, str]:
    """Return the few numbers to look at first."""
    found = {}
    knn, rank = record.latest("knn"), record.latest("rankme")
    levels = record.baseline_levels("knn", "raw_pixels")
    if knn is not None or levels:
        found["k-NN"] = "–" if knn is None else f"{knn:.1f} %"
        found |= {f"k-NN, {name}": f"{level:.1f} %" for name, level in levels.items()}
    if rank is not None:
        found["effective rank"] = f"{rank:.0f}"
    if record.records:
        last = record.readings[-1]
        found["loss − ln(prototypes)"] = f"{last.excess:+.2f}".replace("-", "−")
        found["entropy gap"] = f"{last.entropy_gap:.2f}"
    return found


def render(record: RunRecord, pictures: Pictures, *, live: bool = False, version: int | None = None) -> str:
    """Return the page of a run; a live one asks its server for news."""
    now = live_data(record)
    style = (ASSETS / "page.css").read_text(encoding="utf-8")
    script = "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in SCRIPTS)
    data = {**now, "live": live, "version": version, "explorer": pictures.explorer}
    missing = {section: _missing(reason) for section, reason in pictures.missing.items()}
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
        figures=_terms("figure", figures(record)),
        facts=_terms("fact", facts(record)),
        settings=_settings(changed_settings(record)),
        notes="".join(f'<p class="note">{escape(note)}</p>' for note in pictures.notes),
        no_charts="" if now["charts"] else _missing("metrics.jsonl has no lines yet."),
        views=_rows(pictures.views) or missing.get("views", ""),
        attention=_rows(pictures.attention) or missing.get("attention", ""),
        neighbours=_rows(pictures.neighbours) or missing.get("neighbours", ""),
        no_explorer=missing.get("explorer", ""),
        data=_json(data),
    )


def _policy(style: str, script: str, *, live: bool) -> str:
    """Allow only this style, this script, pictures inside the page, and no connection but to its server."""

    def allowed(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    connect = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; style-src {allowed(style)}; script-src {allowed(script)}; img-src data:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


def _json(data: object) -> str:
    """Return JSON for a script element, which no text in it can close."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _terms(kind: str, found: Mapping[str, str]) -> str:
    return "".join(
        f'<div><dt>{escape(name)}</dt><dd data-text="{kind}-{escape(name)}">{escape(text)}</dd></div>'
        for name, text in found.items()
    )


def _settings(changed: Sequence[tuple[str, str, str, str]]) -> str:
    if not changed:
        return "<p>All settings have their default values.</p>"
    head = "".join(f'<th scope="col">{name}</th>' for name in ("setting", "value", "default", "reason"))
    body = ""
    for key, *cells in changed:
        body += f'<tr><th scope="row">{escape(key)}</th>'
        body += "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
    return (
        '<div class="wide" tabindex="0" role="region" aria-label="Settings that differ from the defaults">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _rows(rows: Sequence[Row]) -> str:
    html = ""
    for row in rows:
        html += f'<div class="row"><h3>{escape(row.name)}</h3><div class="tiles">'
        for tile in row.tiles:
            caption = escape(tile.caption)
            html += f'<figure><img src="{tile.uri}" alt="{escape(row.name)}: {caption}" loading="lazy">'
            html += f"<figcaption>{caption}</figcaption></figure>"
        html += "</div></div>"
    return html


def _missing(reason: str) -> str:
    return f'<p class="missing">{escape(reason)}</p>'
