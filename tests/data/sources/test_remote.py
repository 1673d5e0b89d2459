"""Servers that answer without end."""

from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from dino_vit.data import limits
from dino_vit.data.sources import files
from dino_vit.data.sources.files import Refused, read_file, request, retry
from tests.support.remote import serving


class Endless(BaseHTTPRequestHandler):
    """A file without a type or an end, whatever range is asked for."""

    sent = 0

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        name = self.path.rstrip("/")
        if name.endswith(".elsewhere"):
            self.send_response(302)
            self.send_header("Location", "file:///etc/hostname")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        if not name.endswith(".unknown"):
            self.send_header("Content-Length", str(10**12))
        self.end_headers()
        with suppress(OSError):
            while self.command == "GET" and Endless.sent < 2**28:
                Endless.sent += self.wfile.write(bytes(2**20))
        self.close_connection = True

    def log_message(self, *_):
        pass


@pytest.fixture
def endless():
    Endless.sent = 0
    with ThreadingHTTPServer(("127.0.0.1", 0), Endless) as server:
        server.daemon_threads = True
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    ("name", "told"),
    [("tar", "1,000,000,000,000 bytes"), ("unknown", "any length")],
)
def test_a_server_that_answers_with_more_than_was_asked_for_is_cut_off(endless, name, told):
    with pytest.raises(OSError, match=f"the server answers with {told}, where 100 bytes were asked for"):
        request(f"{endless}/a.{name}", 0, 100)
    assert Endless.sent < 2**25


def test_asking_such_a_server_again_would_not_help(endless):
    with pytest.raises(Refused, match="the server answers with 1,000,000,000,000 bytes"):
        retry(lambda: request(f"{endless}/a.tar", 0, 100), f"{endless}/a.tar")


def test_a_redirect_to_a_local_file_is_refused_at_once(endless):
    with pytest.raises(Refused, match=r"may not be read \(no address of the web: file:///etc/hostname\)"):
        read_file(f"{endless}/a.elsewhere")


@pytest.mark.parametrize("name", ["png", "unknown"])
def test_a_whole_file_is_read_as_far_as_it_may_be_long(endless, name, monkeypatch):
    monkeypatch.setattr(files, "AT_ONCE", 2**20)
    monkeypatch.setattr(limits, "MAX_BYTES", 2**22)
    with pytest.raises(
        ValueError, match=rf"a\.{name} has more than the 4,194,304 bytes that a file may have"
    ):
        read_file(f"{endless}/a.{name}?signature=secret")
    assert Endless.sent < 2**26


def test_a_large_file_is_read_by_a_second_request(tmp_path, monkeypatch):
    (tmp_path / "a.png").write_bytes(bytes(range(256)) * 100)
    monkeypatch.setattr(files, "AT_ONCE", 1000)
    with serving(tmp_path) as server:
        assert read_file(f"{server.url}/a.png") == bytes(range(256)) * 100
        assert [one.method for one in server.requests] == ["GET", "GET"]
        with pytest.raises(Refused, match="not there"):
            read_file(f"{server.url}/b.png")
