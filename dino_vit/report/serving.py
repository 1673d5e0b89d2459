"""The page of a run while it goes on: served from memory, read-only, by default to this machine only."""

from __future__ import annotations

import ipaddress
import json
import logging
import socket
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from dino_vit.core.checkpoint import Checkpoints
from dino_vit.report.page import Pictures, live_data, render
from dino_vit.report.record import RunRecord, read_run

log = logging.getLogger("dino_vit")

CHECK_EVERY = 5.0  # seconds between two checks for a new checkpoint
MAX_SHARE = 0.1  # of the time spent on drawing, which slows down a run on the same device


class Page:
    """The page of a run: curves are read for each request, pictures are drawn in the background."""

    def __init__(self, folder: Path, draw: Callable[[RunRecord], Pictures]) -> None:
        self.folder, self.draw = folder, draw
        sections = ("views", "attention", "neighbours", "explorer")
        waiting = "The pictures are being drawn. This page will tell you when they are ready."
        self.pictures = Pictures(missing=dict.fromkeys(sections, waiting))
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
            except (ValueError, OSError) as error:  # such as a file that the run is replacing
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

    daemon_threads = True

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


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version, sys_version = "dino-vit", ""

    def do_GET(self) -> None:
        page = self.server.page
        documents: dict[str, tuple[Callable[[], bytes], str]] = {
            "/": (page.html, "text/html; charset=utf-8"),
            "/news.json": (page.news, "application/json"),
        }
        if not self.server.accepts(self.headers.get("Host", "")):
            self._send(HTTPStatus.MISDIRECTED_REQUEST, b"Unknown host name.\n")
        elif self.path not in documents:
            self._send(HTTPStatus.NOT_FOUND, b"The report is at /.\n")
        else:
            make, kind = documents[self.path]
            try:
                self._send(HTTPStatus.OK, make(), kind)
            except (ValueError, OSError) as error:
                log.warning("%s", error)
                self._send(HTTPStatus.SERVICE_UNAVAILABLE, b"The run cannot be read at the moment.\n")

    do_HEAD = do_GET

    def _send(self, status: HTTPStatus, content: bytes, kind: str = "text/plain") -> None:
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
