"""A server that sends whole files, whatever range is asked for."""

from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from dino_vit.data.remote import Refused, read_file, request, retry
from tests.support.remote import serving


class Whole(BaseHTTPRequestHandler):
    """Sends files of 256 MiB, as `python -m http.server` would."""

    sent = 0

    def do_GET(self):
        self.send_response(200)
        if not self.path.endswith(".unknown"):
            self.send_header("Content-Length", str(2**28))
        self.end_headers()
        with suppress(OSError):
            while Whole.sent < 2**28:
                Whole.sent += self.wfile.write(bytes(2**20))
        self.close_connection = True

    def log_message(self, *_):
        pass


@pytest.mark.parametrize("name", ["a.tar", "a.unknown"])
def test_a_server_that_sends_no_parts_of_a_file_is_refused_at_once(name):
    Whole.sent = 0
    with ThreadingHTTPServer(("127.0.0.1", 0), Whole) as server:
        server.daemon_threads = True
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/{name}"
        with pytest.raises(Refused, match="the server sends whole files only"):
            retry(lambda: request(url, 0, 100), url)
        server.shutdown()
    assert Whole.sent < 2**25


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with serving(tmp_path) as server, pytest.raises(Refused, match="not there"):
        read_file(f"{server.url}/b.png")
