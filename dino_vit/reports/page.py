"""The page of a run: one HTML file that loads nothing else, and in which names of files are only text."""

import secrets
from dataclasses import dataclass, field
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from dino_vit.core.text import printable
from dino_vit.reports.curves import charts, figures
from dino_vit.reports.record import RunRecord, changed_settings, facts, outcome, state
from dino_vit.reports.sheets import Row
from dino_vit.training.verdict import LEARNING

SECTIONS = ("views", "attention", "neighbours", "map")  # need the images; all but views, a network


@dataclass(kw_only=True)
class Pictures:
    """The sections of a page that need the images or a checkpoint."""

    views: list[Row] = field(default_factory=list)
    attention: list[Row] = field(default_factory=list)
    neighbours: list[Row] = field(default_factory=list)
    map: dict[str, Any] | None = None
    missing: dict[str, str] = field(default_factory=dict)  # why a section is empty, by its name
    notes: list[str] = field(default_factory=list)


def render(record: RunRecord, pictures: Pictures) -> str:
    """Return the page of a run."""
    diagnosis, history = state(record)
    return fill(
        "page.html",
        title=record.folder.resolve().name,
        record=record,
        state=diagnosis.state,
        tone="bad" if diagnosis.advice else "good" if diagnosis == LEARNING else "plain",
        history=history,
        outcome=outcome(record),
        figures=figures(record),
        facts=facts(record),
        settings=changed_settings(record),
        pictures=pictures,
        data={"charts": charts(record), "map": pictures.map},
    )


def fill(template: str, **values: Any) -> str:
    """Return a template of a page, filled with values."""
    environment = Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        # Markup is our own; all other text may come from names of files.
        finalize=lambda value: value if isinstance(value, Markup) else printable(value),
        loader=PackageLoader("dino_vit.reports", "assets"),
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}  # in the order given
    return environment.get_template(template).render(nonce=secrets.token_urlsafe(), **values)
