"""The page itself: one HTML file that loads nothing else, and in which names of files are only text."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from dino_vit.report.curves import charts
from dino_vit.report.record import RunRecord, changed_settings, facts, state
from dino_vit.report.sheets import Row

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
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    now = live_data(record)
    style, script = Markup(_asset("page.css")), Markup("\n".join(map(_asset, SCRIPTS)))
    return environment.from_string(_asset("page.html")).render(
        policy=_policy(style, script, live=live),
        style=style,
        script=script,
        title=record.folder.resolve().name,
        folder=record.folder,
        now=now,
        figures=figures(record),
        facts=facts(record),
        settings=changed_settings(record),
        pictures=pictures,
        data={**now, "live": live, "version": version, "explorer": pictures.explorer},
    )


def _asset(name: str) -> str:
    return (files("dino_vit.report") / "assets" / name).read_text(encoding="utf-8")


def _policy(style: str, script: str, *, live: bool) -> str:
    """Allow only this style, this script, pictures inside the page, and no connection but to its server."""
    style_hash, script_hash = (
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)
    )
    connect = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; style-src 'sha256-{style_hash}'; script-src 'sha256-{script_hash}'; "
        f"img-src data:; connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
