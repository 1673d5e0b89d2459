import json
import re
import shutil
import threading
from http.client import HTTPConnection

import pytest

from dino_vit.report.page import Pictures
from dino_vit.report.serving import Page, PageServer
from tests.support.reports import ParsedPage


@pytest.fixture
def served(made):
    """A server of the run's page, with pictures that cost nothing."""
    page = Page(made, lambda record: Pictures(notes=["drawn"]))
    server = PageServer(page, "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def ask(server, path, method="GET", host=None):
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request(method, path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, body


def test_the_live_page_and_its_news(served):
    status, html = ask(served, "/")
    assert status == 200
    page = ParsedPage(html)
    assert page.data["live"] is True
    assert any("connect-src 'self'" in value for _, name, value in page.attributes if name == "content")
    assert "are being drawn" in html
    assert json.loads(ask(served, "/news.json")[1])["version"] is None
    served.page.draw_if_new()
    assert "drawn" in ParsedPage(ask(served, "/")[1]).text
    news = json.loads(ask(served, "/news.json")[1])
    assert news["version"] == 20
    assert news["texts"]["state"]
    assert ask(served, "/", "HEAD") == (200, "")


def test_a_served_page_follows_the_run(folder):
    page = Page(folder, lambda record: Pictures())
    before = json.loads(page.news())
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_bytes(b"".join(lines[:5]))
    assert json.loads(page.news())["charts"] != before["charts"]
    page.draw_if_new()
    assert page.drawn == 20
    (folder / "checkpoints" / "step-00000020.safetensors").unlink()
    page.draw_if_new()
    assert page.drawn == 15


@pytest.mark.parametrize(
    "path",
    ["/config.yaml", "/../config.yaml", "/%2e%2e/etc/passwd", "//etc/passwd", "/?x", "/report.html", "*"],
)
def test_no_file_is_served(served, path):
    assert ask(served, path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_changed(served, method):
    assert ask(served, "/", method)[0] == 501


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil"]
)
def test_a_foreign_host_name_is_rejected(served, host):
    assert ask(served, "/", host=host) == (421, "Unknown host name.\n")


@pytest.mark.parametrize("host", ["localhost:1", "127.0.0.1", "[::1]:80", "LOCALHOST"])
def test_names_of_this_machine_are_accepted(served, host):
    assert ask(served, "/news.json", host=host)[0] == 200


def test_the_server_listens_on_loopback_only_and_reports_a_port_in_use(served):
    assert served.socket.getsockname()[0] == "127.0.0.1"
    with pytest.raises(ValueError, match="give another port"):
        PageServer(served.page, "127.0.0.1", served.server_port)


def test_a_deleted_run_is_an_error_503(served, folder):
    served.page.folder = folder
    shutil.rmtree(folder)
    assert ask(served, "/news.json")[0] == 503
    assert re.search("cannot be read", ask(served, "/")[1])
