"""The page of a run: one HTML file that loads nothing else, and in which names of files are only text.

While the run goes on it is served from memory, read-only, by default to this machine only.
"""

import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from dino_vit.core import log
from dino_vit.core.checkpoint import Checkpoints
from dino_vit.core.text import printable
from dino_vit.reports.curves import charts, figures
from dino_vit.reports.record import RunRecord, changed_settings, facts, outcome, read_run, state
from dino_vit.reports.sheets import Row
from dino_vit.training.verdict import LEARNING

SECTIONS = ("views", "attention", "neighbours", "map")  # need the images; all but views, a network
CHECK_EVERY = 5.0  # seconds between two checks for a new checkpoint
MAX_SHARE = 0.1  # of the time spent on drawing, which slows down a run on the same device


@dataclass(kw_only=True)
class Pictures:
    """The sections of a page that need the images or a checkpoint."""

    views: list[Row] = field(default_factory=list)
    attention: list[Row] = field(default_factory=list)
    neighbours: list[Row] = field(default_factory=list)
    map: dict[str, Any] | None = None
    missing: dict[str, str] = field(default_factory=dict)  # why a section is empty, by its name
    notes: list[str] = field(default_factory=list)


def render(record: RunRecord, pictures: Pictures, *, version: str | None = None) -> str:
    """Return the page of a run; one with a version asks its server now and then for a newer one."""
    diagnosis, history = state(record)
    return fill(
        "page.html",
        version=version,
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
        data={"charts": charts(record), "version": version, "map": pictures.map},
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


class Page:
    """The page of a run: curves are read for each request, pictures are drawn in the background."""

    def __init__(self, folder: Path, draw: Callable[[RunRecord], Pictures]) -> None:
        self.folder, self.draw = folder, draw
        waiting = "The pictures are being drawn. The page will show them when they are ready."
        self.pictures = Pictures(missing=dict.fromkeys(SECTIONS, waiting))
        self.drawn: Path | None = None  # the newest checkpoint that was drawn

    def html(self) -> str:
        version = self.version()  # first, as the run goes on meanwhile
        return render(read_run(self.folder), self.pictures, version=version)

    def version(self) -> str:
        """Return a text that changes with the metrics and the pictures."""
        metrics = self.folder / "metrics.jsonl"
        return f"{metrics.stat().st_mtime_ns if metrics.exists() else 0} {self.drawn}"

    def keep_drawing(self) -> None:
        """Draw the pictures of each new checkpoint, for as long as the process runs."""
        while True:
            start = time.monotonic()
            self.draw_if_new()
            time.sleep(max(CHECK_EVERY, (time.monotonic() - start) / MAX_SHARE))

    def draw_if_new(self) -> None:
        newest = max(Checkpoints(self.folder).paths(), default=self.folder)
        if newest != self.drawn:
            try:
                self.pictures = self.draw(read_run(self.folder))
                self.drawn = newest
            except (ValueError, OSError, RuntimeError) as error:  # a file that the run replaces, full memory
                log.warning("the pictures could not be drawn: %s", error)


class PageServer(ThreadingHTTPServer):
    """A server of a page that is made in memory; it opens no file that a request names."""

    def __init__(self, page: Page, address: str, port: int) -> None:
        self.page = page
        try:
            super().__init__((address, port), _Handler)
        except OSError as error:
            reason = f"cannot serve on {address} port {port}: {error.strerror}"
            raise ValueError(f"{reason}; give another port, or port=0 for any free port") from error
        self.names = {"localhost", socket.gethostname().lower(), socket.getfqdn().lower()}

    def run(self) -> None:
        """Serve the page until Ctrl-C."""
        threading.Thread(target=self.page.keep_drawing, daemon=True).start()
        address, port = self.server_address[:2]
        print(f"Serving the report at http://{address!s}:{port}/ (Ctrl-C to stop)", flush=True)
        with self, suppress(KeyboardInterrupt):
            self.serve_forever()

    def handle_error(self, request: object, client_address: object) -> None:
        """Pass over connections that ended in the middle of an answer."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = 10  # idle timeout of a connection, in seconds

    def do_GET(self) -> None:
        """Answer with the page or its version, and only under an address or a name of this machine.

        Otherwise any website could point a name of its own to this server and read the page (DNS rebinding).
        """
        name = self.headers.get("Host", "").partition(":")[0].lower()
        answers = {"/": self.server.page.html, "/version": self.server.page.version}
        if not (name in self.server.names or re.fullmatch(r"[\d.]+", name)):
            self.send_error(421)
        elif self.path not in answers:
            self.send_error(404, explain="The report is at /.")
        else:
            content = answers[self.path]().encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Frame-Options", "DENY")
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log no requests: they come every few seconds."""
