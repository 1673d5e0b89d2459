"""The page of a run: one HTML file that loads nothing else, and in which names of files are only text.

While the run goes on it is served from memory, read-only, by default to this machine only.
"""

import base64
import hashlib
import ipaddress
import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader
from markupsafe import Markup

from dino_vit.core import log
from dino_vit.core.checkpoint import Checkpoints
from dino_vit.core.text import printable
from dino_vit.reports.curves import figures, live_data
from dino_vit.reports.record import RunRecord, changed_settings, facts, read_run
from dino_vit.reports.sheets import Row

SCRIPTS = ("charts.js", "explorer.js", "page.js")
SECTIONS = ("views", "attention", "neighbours", "explorer")  # need the images; all but views, a network
CHECK_EVERY = 5.0  # seconds between two checks for a new checkpoint
MAX_SHARE = 0.1  # of the time spent on drawing, which slows down a run on the same device


@dataclass(kw_only=True)
class Pictures:
    """The sections of a page that need the images or a checkpoint."""

    views: list[Row] = field(default_factory=list)
    attention: list[Row] = field(default_factory=list)
    neighbours: list[Row] = field(default_factory=list)
    explorer: dict[str, Any] | None = None
    missing: dict[str, str] = field(default_factory=dict)  # why a section is empty, by its name
    notes: list[str] = field(default_factory=list)


def render(record: RunRecord, pictures: Pictures, *, live: bool = False, version: int | None = None) -> str:
    """Return the page of a run; a live one asks its server for news."""
    now = live_data(record)
    return fill(
        "page.html",
        live=live,
        kind="report",
        title=record.folder.resolve().name,
        folder=record.folder,
        now=now,
        figures=figures(record),
        facts=facts(record),
        settings=changed_settings(record),
        pictures=pictures,
        data={**now, "live": live, "version": version, "explorer": pictures.explorer},
    )


def fill(template: str, *, live: bool = False, **values: Any) -> str:
    """Return a template of a page with our style and scripts, filled with values."""
    loader = FunctionLoader(_asset)
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=_finalize, loader=loader
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    style, script = _asset("page.css"), "\n".join(map(_asset, SCRIPTS))
    # Allow only this style, this script, pictures inside the page, and no connection but to its server.
    style_hash, script_hash = (
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)
    )
    connect = "'self'" if live else "'none'"
    policy = (
        f"default-src 'none'; style-src 'sha256-{style_hash}'; script-src 'sha256-{script_hash}'; "
        f"img-src data:; connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
    page = environment.get_template(template)
    return page.render(policy=policy, style=Markup(style), script=Markup(script), **values)


def _finalize(value: object) -> str:
    """Make text printable; markup is our own."""
    return value if isinstance(value, Markup) else printable(value)


def _asset(name: str) -> str:
    return (files("dino_vit.reports") / "assets" / name).read_text(encoding="utf-8")


class Page:
    """The page of a run: curves are read for each request, pictures are drawn in the background."""

    def __init__(self, folder: Path, draw: Callable[[RunRecord], Pictures]) -> None:
        self.folder, self.draw = folder, draw
        waiting = "The pictures are being drawn. This page will tell you when they are ready."
        self.pictures = Pictures(missing=dict.fromkeys(SECTIONS, waiting))
        self.drawn: int | None = None  # step of the newest checkpoint that was drawn; -1: without checkpoint
        self.stopped = threading.Event()

    def html(self) -> bytes:
        return render(read_run(self.folder), self.pictures, live=True, version=self.drawn).encode()

    def news(self) -> bytes:
        """Return what changes while a run goes on."""
        return json.dumps({**live_data(read_run(self.folder)), "version": self.drawn}).encode()

    def keep_drawing(self) -> None:
        """Draw the pictures of each new checkpoint until `stopped` is set."""
        spent = self.draw_if_new()
        while not self.stopped.wait(max(CHECK_EVERY, spent / MAX_SHARE)):
            spent = self.draw_if_new()

    def draw_if_new(self) -> float:
        """Draw the pictures if there is a new checkpoint; return the seconds spent."""
        start = time.monotonic()
        newest = max((int(path.stem[5:]) for path in Checkpoints(self.folder).paths()), default=-1)
        if newest != self.drawn:
            try:
                self.pictures = self.draw(read_run(self.folder))
                self.drawn = newest
            except (ValueError, OSError, RuntimeError) as error:  # a file that the run replaces, full memory
                log.warning("the pictures could not be drawn: %s", error)
        return time.monotonic() - start


def serve(page: Page, address: str, port: int) -> None:
    """Serve a page until Ctrl-C."""
    server = PageServer(page, address, port)
    threading.Thread(target=page.keep_drawing, daemon=True).start()
    host = f"[{address}]" if ":" in address else address
    print(f"Serving the report at http://{host}:{server.server_port}/ (Ctrl-C to stop)", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print()
    finally:
        page.stopped.set()
        server.server_close()


class PageServer(ThreadingHTTPServer):
    """A server of two documents that are made in memory; it opens no file that a request names."""

    request_queue_size = 256  # listen backlog; clients beyond it retry after a second or more

    def __init__(self, page: Page, address: str, port: int) -> None:
        self.page = page
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            super().__init__((address, port), _Handler)
        except OSError as error:
            raise ValueError(
                f"cannot serve on {address} port {port}: {error.strerror}; give another port, or port=0 for "
                "any free port"
            ) from error
        self.names = {"localhost", socket.gethostname().lower(), socket.getfqdn().lower()}

    def accepts(self, host: str) -> bool:
        """Tell whether a Host header is an address or a name of this machine.

        Otherwise any website could point a name of its own to this server and read the page (DNS rebinding).
        """
        name, _, port = host.rpartition(":")
        name = (name if port.isdecimal() else host).strip("[]").lower()
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self.names
        return True

    def handle_error(self, request: object, client_address: object) -> None:
        """Pass over connections that ended in the middle of an answer."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = 10  # idle timeout of a connection, in seconds
    server_version, sys_version = "dino-vit", ""

    def do_GET(self) -> None:
        self._send(*self._answer())

    do_HEAD = do_GET

    def _answer(self) -> tuple[HTTPStatus, bytes, str]:
        """Return status, content and its type."""
        page = self.server.page
        if not self.server.accepts(self.headers.get("Host", "")):
            return HTTPStatus.MISDIRECTED_REQUEST, b"Unknown host name.\n", "text/plain"
        try:
            match self.path:
                case "/":
                    return HTTPStatus.OK, page.html(), "text/html; charset=utf-8"
                case "/news.json":
                    return HTTPStatus.OK, page.news(), "application/json"
        except (ValueError, OSError) as error:
            log.warning("%s", error)
            text = b"The run cannot be read at the moment.\n"
            return HTTPStatus.SERVICE_UNAVAILABLE, text, "text/plain"
        return HTTPStatus.NOT_FOUND, b"The report is at /.\n", "text/plain"

    def _send(self, status: HTTPStatus, content: bytes, kind: str) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(content)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log no requests: they come every few seconds."""
