import base64
import hashlib
import json
import re
import shutil
import socket
import struct
import threading
from http.client import HTTPConnection

import pytest
import torch

from dino_vit.cli import main
from dino_vit.data.sources.open import open_source
from dino_vit.reports.page import Page, PageServer, Pictures, _Handler
from dino_vit.reports.record import read_run
from dino_vit.training.readings import Baseline
from tests.support.reports import HOSTILE, IMAGES, ParsedPage, serving, write_report


def test_the_page_loads_nothing_and_describes_the_run(made, capsys):
    """A name like a script is only a name; only the page's own script and style may run."""
    page = write_report(made)
    size = (made / "report.html").stat().st_size
    assert size < 5e6
    assert f"report.html: {size / 1e6:.1f} MB" in capsys.readouterr().out
    loaded = [value for _, name, value in page.attributes if name in ("src", "href", "srcset", "action")]
    assert all(value.startswith(("data:", "#")) for value in loaded)
    assert not any(name.startswith("on") or name == "style" for _, name, _ in page.attributes)
    assert page.tags.count("script") == 2
    assert "k-NN, raw pixels" in page.text
    assert "20 of 20 steps" in page.text
    assert "head.prototypes 256 65536" in page.text
    assert "Map, attention and neighbours: teacher at step 20." in page.text
    assert page.data["explorer"]["count"] == IMAGES
    assert "<script>alert" not in (made / "report.html").read_text()
    assert HOSTILE in page.data["explorer"]["names"]
    assert any(HOSTILE in value for tag, name, value in page.attributes if (tag, name) == ("img", "alt"))
    assert {chart["id"] for chart in page.data["charts"]} >= {"loss", "entropies", "knn", "rank", "lr"}

    (policy,) = (value for _, name, value in page.attributes if name == "content" and "default-src" in value)
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == rules["connect-src"] == "'none'"
    for rule, text in (("script-src", page.raw["script"][1]), ("style-src", "".join(page.raw["style"]))):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[rule] == f"'sha256-{digest}'"


def test_images_that_moved_are_reported_and_can_be_given(folder, made):
    images = made.parent / "images"
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace(str(images), "/no/such/place"))
    page = write_report(folder)
    assert page.text.count("'/no/such/place' does not exist") >= 3
    assert "say where with source=..." in page.text
    assert page.data["explorer"] is None
    assert page.data["charts"]
    assert write_report(folder, f"source={images}", "images=20").data["explorer"]["count"] == 20


def test_a_run_without_a_checkpoint_shows_its_curves_and_views(folder):
    shutil.rmtree(folder / "checkpoints")
    page = write_report(folder)
    assert "the run has not written a checkpoint yet" in page.text
    assert "global 1" in page.text
    assert page.data["charts"]


def test_the_network_is_the_one_of_the_checkpoint_whatever_the_config_says_now(folder):
    path = folder / "config.yaml"
    path.write_text(re.sub(r"hidden_dim: \d+", "hidden_dim: 8", path.read_text()))
    assert write_report(folder, "images=20").data["explorer"]["count"] == 20


def test_damaged_checkpoints_are_reported(folder):
    for path in (folder / "checkpoints").iterdir():
        path.write_bytes(path.read_bytes()[:-100])
    assert "none of the" in write_report(folder).text


@pytest.mark.parametrize("content", [None, b"", b'{"step": 1, "lo'])
def test_a_run_without_readings_still_has_a_page(folder, content):
    (folder / "baseline.json").unlink()
    (folder / "starts.jsonl").unlink()
    (folder / "metrics.jsonl").unlink()
    if content is not None:
        (folder / "metrics.jsonl").write_bytes(content)
    page = write_report(folder, "images=20")
    assert "metrics.jsonl has no lines yet." in page.text
    assert page.data["charts"] == []
    assert page.data["explorer"]["count"] == 20


def test_a_torn_last_line_is_left_alone(folder):
    path = folder / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"step": 21, "lo')
    assert read_run(folder).step == 20
    assert path.read_bytes() == whole + b'{"step": 21, "lo'


NO_READINGS = [
    ("metrics.jsonl", '{"step": 21}\n'),
    ("metrics.jsonl", '{"step": 21, "lo{"step": 22}\n'),
    ("metrics.jsonl", "[" * 10**4 + "\n"),
    ("starts.jsonl", '{"step": 5}\n'),
    ("starts.jsonl", '{"step": 5, "began": "2026\n'),
]


def test_lines_that_are_no_readings_are_left_out_of_the_page(folder, made, caplog):
    for name, line in NO_READINGS:
        with (folder / name).open("a") as file:
            file.write(line * 500)
    whole = read_run(made)
    for baseline in ("[]", '{"knn": [1', '{"knn": "high"}', "7", ""):
        (folder / "baseline.json").write_text(baseline)
        found = read_run(folder)
        assert (found.readings, found.starts, found.baseline) == (whole.readings, whole.starts, Baseline())
    assert caplog.text.count("left out") == 2 + 4  # once for each file, as a page reads them every time
    assert "20 of 20 steps" in write_report(folder, "images=3").text


def test_images_without_their_labels_are_still_shown(folder):
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(config.replace("labels: null", "labels: /no/such/labels.csv"))
    page = write_report(folder, "images=20")
    assert page.data["explorer"]["count"] == 20
    assert "The labels could not be read: " in page.text
    assert "/no/such/labels.csv" in page.text


def test_unlabelled_images_are_coloured_by_cluster(folder, made, tmp_path):
    for index, path in enumerate(sorted((made.parent / "images").rglob("*.png"))[:24]):
        (tmp_path / "flat").mkdir(exist_ok=True)
        shutil.copy(path, tmp_path / "flat" / f"{index}.png")
    page = write_report(folder, f"source={tmp_path / 'flat'}")
    assert page.data["explorer"]["classes"] == []
    assert set(page.data["explorer"]["labels"]) == {-1}
    assert "The images differ from those that the run started with" in page.text


def test_the_map_uses_the_labels_of_a_file(folder, tmp_path):
    source = open_source(read_run(folder).config.data.source)
    lines = [f"{source.name(index)},{'even' if index % 2 == 0 else 'odd'}" for index in range(len(source))]
    (tmp_path / "labels.csv").write_text("\n".join(["name,label", *lines]))
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(config.replace("labels: null", f"labels: {tmp_path / 'labels.csv'}"))
    assert write_report(folder).data["explorer"]["classes"] == ["even", "odd"]


def test_a_folder_without_a_run_is_an_error(tmp_path, capsys):
    for arguments, said in (
        (["report", str(tmp_path / "none")], "is not the folder of a run: there is no such folder"),
        (["report", str(tmp_path)], "is not the folder of a run: it has no config.yaml"),
        (["report"], "run is needed"),
    ):
        assert main(arguments) == 2
        assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.fixture
def served(made):
    """A server of the run's page, with pictures that cost nothing."""
    with serving(Page(made, lambda record: Pictures(notes=["drawn"]))) as server:
        yield server


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


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, FileNotFoundError, ValueError])
def test_pictures_that_could_not_be_drawn_are_drawn_later(made, caplog, error):
    def draw(record):
        if not caplog.records:
            raise error("no memory")
        return Pictures(notes=["drawn"])

    page = Page(made, draw)
    page.draw_if_new()
    assert "the pictures could not be drawn: no memory" in caplog.text
    assert page.drawn is None
    page.draw_if_new()
    assert page.pictures.notes == ["drawn"]


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


def test_many_browsers_at_once_are_served_and_idle_connections_end(made, monkeypatch, capfd):
    """All of them connect before the first is served; some send nothing, half a line, or a reset."""
    monkeypatch.setattr(_Handler, "timeout", 0.5)
    server = PageServer(Page(made, lambda record: Pictures()), "127.0.0.1", 0)
    asking, idle = (
        [socket.create_connection(server.server_address, timeout=60) for _ in range(number)]
        for number in (200, 40)
    )
    for connection in asking:
        connection.sendall(b"GET /news.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
    for connection in idle[:20]:
        connection.sendall(b"GET / HT")
    for connection in idle[20:30]:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()  # with a reset
    threading.Thread(target=server.serve_forever, args=(0.01,)).start()
    try:
        for connection in asking:
            with connection, connection.makefile("rb") as answer:
                assert answer.read().startswith(b"HTTP/1.0 200")
        for connection in idle[:20] + idle[30:]:
            with connection:
                assert connection.recv(1) == b""
    finally:
        server.shutdown()
        server.server_close()
    assert "Traceback" not in capfd.readouterr().err


def test_a_deleted_run_is_an_error_503(served, folder):
    served.page.folder = folder
    shutil.rmtree(folder)
    assert ask(served, "/news.json")[0] == 503
    assert re.search("cannot be read", ask(served, "/")[1])
