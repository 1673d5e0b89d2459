"""The page of a run while it goes on: served from memory, read-only, to this machine unless told else."""

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

from dino_vit.core.checkpoint import Checkpoint, Checkpoints
from dino_vit.report.page import Pictures, live_data, render
from dino_vit.report.record import RunRecord, newest_checkpoint, read_run

log = logging.getLogger("dino_vit")

LOOK_EVERY = 5.0  # seconds between two looks for a new checkpoint
# Pictures cost what the run could compute with: they take at most this share of the time.
SHARE = 0.1

Draw = Callable[[RunRecord, Checkpoint | str], Pictures]


class Page:
    """The page of a run as it stands: curves read anew for each request, pictures drawn in the background."""

    def __init__(self, folder: Path, draw: Draw) -> None:
        self.folder, self.draw = folder, draw
        waiting = "being drawn; this page says when it is there"
        sections = ("views", "attention", "neighbours", "explorer")
        self.pictures = Pictures(reasons=dict.fromkeys(sections, waiting.capitalize() + "."))
        self.drawn: int | None = None  # step of the newest checkpoint that was drawn; -1: that there is none
        self.stopped = threading.Event()

    def html(self) -> bytes:
        return render(read_run(self.folder), self.pictures, live=True, version=self.drawn).encode()

    def news(self) -> bytes:
        """Return what changes while a run goes on."""
        return json.dumps({**live_data(read_run(self.folder)), "version": self.drawn}).encode()

    def keep_drawing(self) -> None:
        """Draw the pictures of each new checkpoint, with long rests, until `stopped` is set."""
        while True:
            spent = self.draw_if_new()
            if self.stopped.wait(max(LOOK_EVERY, spent / SHARE)):
                return

    def draw_if_new(self) -> float:
        steps = [int(path.stem[5:]) for path in Checkpoints(self.folder).paths()]
        newest = max(steps, default=-1)
        if newest == self.drawn:
            return 0.0
        began = time.monotonic()
        try:
            self.pictures = self.draw(read_run(self.folder), newest_checkpoint(self.folder))
            self.drawn = newest
        except (ValueError, OSError) as error:  # such as a file that the run replaces at this moment
            log.warning("the pictures could not be drawn: %s", error)
        return time.monotonic() - began


def serve(page: Page, address: str, port: int) -> None:
    """Serve a page until ctrl-C."""
    server = PageServer(page, address, port)
    drawing = threading.Thread(target=page.keep_drawing, daemon=True)
    drawing.start()
    host = f"[{server.address}]" if ":" in server.address else server.address
    print(f"http://{host}:{server.server_port}/ shows the run; ctrl-C ends it", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print()
    finally:
        page.stopped.set()
        server.server_close()


class PageServer(ThreadingHTTPServer):
    """A server of two documents made in memory; it opens no file that a request names."""

    daemon_threads = True

    def __init__(self, page: Page, address: str, port: int) -> None:
        self.page, self.address = page, address
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            super().__init__((address, port), _Handler)
        except OSError as error:
            said = f"cannot serve on {address} port {port}: {error.strerror}"
            raise ValueError(f"{said}; give another port, or port=0 for any that is free") from error
        local = {"localhost", socket.gethostname().lower(), socket.getfqdn().lower()}
        self.names = local if address != "127.0.0.1" else {"localhost"}

    def knows(self, host: str) -> bool:
        """Tell whether a Host header names this server, and is no name that someone else pointed here."""
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
        name = name.strip("[]").lower()
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self.names
        return True  # an address is no name: nobody can point it elsewhere


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version, sys_version = "dino-vit", ""

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _answer(self, *, body: bool) -> None:
        documents: dict[str, tuple[Callable[[], bytes], str]] = {
            "/": (self.server.page.html, "text/html; charset=utf-8"),
            "/news.json": (self.server.page.news, "application/json"),
        }
        if not self.server.knows(self.headers.get("Host", "")):
            self._send(
                HTTPStatus.MISDIRECTED_REQUEST, b"This name is not this server's.\n", "text/plain", body
            )
        elif self.path not in documents:
            self._send(HTTPStatus.NOT_FOUND, b"There is / and nothing else.\n", "text/plain", body)
        else:
            make, kind = documents[self.path]
            try:
                self._send(HTTPStatus.OK, make(), kind, body)
            except (ValueError, OSError) as error:
                log.warning("%s", error)
                said = b"The run cannot be read at the moment.\n"
                self._send(HTTPStatus.SERVICE_UNAVAILABLE, said, "text/plain", body)

    def _send(self, status: HTTPStatus, content: bytes, kind: str, body: bool) -> None:
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
        if body:
            self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing of requests: they come every few seconds."""
