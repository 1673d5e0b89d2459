import base64
import hashlib
import io
import json
import math
import re
import shutil
import sys
import threading
from dataclasses import replace
from html.parser import HTMLParser
from http.client import HTTPConnection

import numpy as np
import pytest
import torch
from einops import rearrange
from PIL import Image

from dino_vit.cli import main
from dino_vit.config.display import to_yaml
from dino_vit.config.loading import load
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.data.sources.open import open_source
from dino_vit.eval.features.extraction import extract_features
from dino_vit.report import explorer, layout, sheets
from dino_vit.report.curves import charts, thin
from dino_vit.report.network import load_teacher
from dino_vit.report.page import Pictures, live_data
from dino_vit.report.pictures import atlas, data_uri
from dino_vit.report.record import newest_checkpoint, read_run, state
from dino_vit.report.serving import Page, PageServer
from dino_vit.training.diagnosis import UNIFORM
from dino_vit.training.feeding import build_views
from dino_vit.training.monitor import MetricsFile
from dino_vit.views.loader import Loader
from dino_vit.views.photometry import Augment
from dino_vit.views.sampler import Sampler
from tests.support.reports import HOSTILE, IMAGES, make_run
from tests.training.test_diagnosis import HEALTHY


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A finished run, which tests must not change."""
    return make_run(tmp_path_factory.mktemp("report"))


@pytest.fixture
def folder(made, tmp_path):
    """A copy of the run to change."""
    return shutil.copytree(made, tmp_path / "run")


class Found(HTMLParser):
    """What a browser makes of a page: its texts, its data, and whatever it would load or run."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self.texts, self.inside = [], [], [], ""
        self.raw = {"script": [], "style": []}
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attributes]
        self.inside = tag

    def handle_data(self, data):
        self.raw.get(self.inside, self.texts).append(data)

    def handle_endtag(self, tag):
        self.inside = ""

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())

    @property
    def data(self):
        return json.loads(self.raw["script"][0])


def report(folder, *settings):
    """Have the command write the page, and return what a browser makes of it."""
    assert main(["report", str(folder), *settings]) == 0
    return Found((folder / "report.html").read_text())


def test_the_page_of_a_run_stands_alone_and_says_what_ran(made, capsys):
    page = report(made)
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
    assert "The pictures are of the teacher at step 20." in page.text
    assert page.data["explorer"]["count"] == IMAGES
    assert {chart["id"] for chart in page.data["charts"]} >= {"loss", "entropies", "knn", "rank", "std", "lr"}


def test_names_are_only_names(made):
    page = report(made)
    html = (made / "report.html").read_text()
    assert "<script>alert" not in html
    assert HOSTILE in page.data["explorer"]["names"]
    assert any(HOSTILE in value for tag, name, value in page.attributes if (tag, name) == ("img", "alt"))


def test_only_this_script_and_this_style_may_run(made):
    page = report(made)
    (policy,) = (value for _, name, value in page.attributes if name == "content" and "default-src" in value)
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == rules["connect-src"] == "'none'"
    for rule, text in (("script-src", page.raw["script"][1]), ("style-src", "".join(page.raw["style"]))):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[rule] == f"'sha256-{digest}'"


def test_the_map_holds_the_features_clusters_and_neighbours_of_the_teacher(made):
    record, checkpoint = read_run(made), newest_checkpoint(made)
    teacher = load_teacher(checkpoint, record.config, torch.device("cpu"))
    source = open_source(record.config.data.source)
    found = explorer.explore(teacher, source, explorer.chosen(source, 40, seed=0))
    features = extract_features(
        teacher.backbone, source, found.indices, preparation=teacher.preparation, batch_size=7
    ).values
    unit = features / features.norm(dim=1, keepdim=True)
    assert torch.allclose(found.features, unit, atol=1e-5)
    for row in range(40):
        cosines = {other: float(unit[row] @ unit[other]) for other in range(40) if other != row}
        nearest = sorted(cosines, key=cosines.get, reverse=True)[: explorer.NEIGHBOURS]
        near = found.neighbours[row].tolist()
        assert [cosines[other] for other in near] == pytest.approx([cosines[n] for n in nearest], abs=1e-5)
        assert row not in near
    weights = {name[13:]: t for name, t in checkpoint.tensors.items() if name.startswith("teacher.head.")}
    head = checkpoint.tensors
    hidden = features
    for layer in (0, 2):
        w, b = head[f"teacher.head.mlp.{layer}.weight"], head[f"teacher.head.mlp.{layer}.bias"]
        hidden = torch.nn.functional.gelu(hidden @ w.T + b)
    bottleneck = hidden @ weights["mlp.4.weight"].T + weights["mlp.4.bias"]
    direction = torch.nn.functional.normalize(weights["last_layer.weight_v"], dim=1)
    cosines = (
        torch.nn.functional.normalize(bottleneck, dim=1) @ direction.T * weights["last_layer.weight_g"].T
    )
    assert torch.equal(found.clusters, (cosines - head["loss.center"]).argmax(dim=1))
    assert [source.label(index) for index in found.indices] == found.labels
    assert set(found.layouts) == {"t-SNE", "PCA"}
    assert found.attention.shape == (40, 4, 4)
    assert (found.attention.max(axis=(1, 2)) == 255).all()


def test_the_views_are_those_that_the_network_saw(made):
    config, epoch = read_run(made).config, 2
    source = open_source(config.data.source)
    rows = sheets.view_rows(config, source, epoch)
    sampler = Sampler(length=len(source), batch_size=8, seed=config.seed)
    loader = Loader(source=source, views=build_views(config), sampler=sampler)
    batch = next(loader.batches(epoch * sampler.steps_per_epoch))
    augment = Augment(mean=(0.0,) * 3, std=(1.0,) * 3)
    for place, row in enumerate(rows):
        assert row.name == source.name(int(batch.samples[place]))
        uris = []
        for size, cut in batch.views.items():
            seen = rearrange(augment(cut, batch.photometry[size]), "(v b) c y x -> v b c y x", b=8)
            for view in seen[:, place]:
                uris.append(data_uri((view * 255).round().clamp(0, 255).to(torch.uint8)))
        assert [tile.uri for tile in row.tiles[1:]] == uris
        assert [tile.title for tile in row.tiles] == [
            *("image", "global 1, 32 × 32 px", "global 2, 32 × 32 px"),
            *("local 1, 16 × 16 px", "local 2, 16 × 16 px"),
        ]


def test_an_image_that_cannot_be_read_is_said_beside_the_views_of_its_substitute(made, tmp_path):
    shutil.copytree(made.parent / "images", tmp_path / "images")
    source, config = open_source(str(tmp_path / "images")), read_run(made).config
    first = int(Sampler(length=len(source), batch_size=1, seed=config.seed).order(0)[0])
    (tmp_path / "images" / source.name(first)).write_bytes(b"no image")
    row = sheets.view_rows(config, source, 0)[0]
    assert row.name.startswith(f"{source.name(first)}: ")
    assert row.name.endswith("another image stood in for it")
    assert [tile.title[:8] for tile in row.tiles] == ["global 1", "global 2", "local 1,", "local 2,"]


def test_names_have_room_on_the_page():
    assert explorer.shortened("short.png") == "short.png"
    assert explorer.shortened("a" * 300 + ".png") == "…" + "a" * 115 + ".png"
    assert len(explorer.shortened("a" * 300, 58)) == 58


def pixels(uri):
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))).convert("RGB"))


def test_an_atlas_has_every_image_in_its_place_and_keeps_its_budget():
    colours = torch.randint(0, 256, (11, 3, 1, 1), dtype=torch.uint8)
    made = atlas(colours.expand(-1, -1, 20, 10).contiguous(), budget=10_000)
    sheet, (height, width) = pixels(made.uri), made.size
    assert (made.columns, height, width) == (4, 20, 10)
    for place in range(11):
        top, left = place // 4 * height, place % 4 * width
        middle = sheet[top + height // 2, left + width // 2].astype(int)
        assert abs(middle - colours[place, :, 0, 0].numpy().astype(int)).max() < 24
    noise = torch.randint(0, 256, (200, 3, 64, 64), dtype=torch.uint8)
    small = atlas(noise, budget=90_000)
    assert len(small.uri) <= 90_000
    assert max(small.size) < 64
    with pytest.raises(ValueError, match="take fewer"):
        atlas(noise, budget=2_000)


def test_pca_has_the_widest_directions():
    features = torch.randn(50, 6) * torch.tensor([1.0, 5.0, 0.5, 3.0, 0.1, 0.2])
    centred = features - features.mean(dim=0)
    left, singular, _ = torch.linalg.svd(centred, full_matrices=False)
    wanted = left[:, :2] * singular[:2]
    found = torch.from_numpy(layout.pca(features))
    for column in range(2):
        same, turned = (found[:, column] - sign * wanted[:, column] for sign in (1, -1))
        assert min(same.abs().max(), turned.abs().max()) < 1e-3


def test_tsne_keeps_groups_together():
    middles = torch.nn.functional.normalize(torch.randn(4, 16), dim=1)
    group = torch.arange(80) % 4
    features = torch.nn.functional.normalize(middles[group] + 0.05 * torch.randn(80, 16), dim=1)
    places = torch.from_numpy(layout.keeping_neighbours(features))
    nearest = torch.cdist(places, places).fill_diagonal_(math.inf).argmin(dim=1)
    assert (group[nearest] == group).float().mean() > 0.95
    assert "8 images" in layout.keeping_neighbours(features[:5])


def test_without_scikit_learn_there_is_a_map_and_a_word(made, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    page = report(made)
    assert [one["name"] for one in page.data["explorer"]["layouts"]] == ["PCA"]
    assert "run `pip install scikit-learn`" in page.text


def test_a_long_curve_keeps_its_ends_and_its_peaks():
    points = [(step, math.sin(step / 900)) for step in range(20_000)]
    points[7_777] = (7_777, 50.0)
    points[12_345] = (12_345, -50.0)
    kept = thin(points)
    assert len(kept) <= 602
    assert {points[0], points[-1], points[7_777], points[12_345]} <= set(kept)
    assert kept == sorted(kept)
    assert thin(points[:100]) == points[:100]


def record_of(tmp_path, readings, baseline):
    """A run folder with these readings alone, and what is read from it."""
    metrics = MetricsFile(tmp_path, step=0)
    for reading, name in readings:
        metrics.append(reading, name)
    (tmp_path / "config.yaml").write_text(to_yaml(load(PretrainConfig)))
    (tmp_path / "baseline.json").write_text(json.dumps(baseline))
    return read_run(tmp_path)


def test_the_words_say_what_the_numbers_do(tmp_path):
    last = replace(HEALTHY, step=100, knn=40.0, rankme=55.0, data_wait=0.3)
    baseline = {"knn": 20.0, "raw_pixels": 10.0, "rankme": 12.0}
    record = record_of(tmp_path, [(replace(HEALTHY, step=50), "starting"), (last, "learning")], baseline)
    words = {chart["id"]: chart["words"] for chart in charts(record)}
    assert words["loss"].startswith(
        f"{last.loss:.3f}, which is {-last.excess:.3f} below ln({last.prototypes})"
    )
    assert "40.0 % at step 100: 2.0 times the 20.0 % before the first step" in words["knn"]
    assert "4.0 times the 10.0 % of raw pixels" in words["knn"]
    assert "55 of 384 directions, before the first step 12" in words["rank"]
    assert "try more data.workers" in words["wait"]
    diagnosis, history = state(record)
    assert diagnosis.state == "learning"
    assert history == "Learning since the reading of step 100; before, starting from step 50."


def test_a_collapse_is_named_with_what_to_try(tmp_path):
    flat = replace(HEALTHY, loss=math.nan, embedding_std=math.nan)
    data = live_data(record_of(tmp_path, [(flat, UNIFORM.state)], {}))
    assert data["tone"] == "bad"
    assert data["texts"]["advice"] == UNIFORM.advice
    by_id = {chart["id"]: chart for chart in data["charts"]}
    assert "loss" not in by_id
    assert "entropies" in by_id
    json.dumps(data, allow_nan=False)


def test_images_that_moved_away_are_said_and_found_again(folder, made):
    images = made.parent / "images"
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace(str(images), "/no/such/place"))
    page = report(folder)
    assert page.text.count("'/no/such/place' does not exist") >= 3
    assert "say source=..." in page.text
    assert page.data["explorer"] is None
    assert page.data["charts"]
    assert report(folder, f"source={images}", "images=20").data["explorer"]["count"] == 20


def test_a_run_without_a_checkpoint_shows_its_curves_and_views(folder):
    shutil.rmtree(folder / "checkpoints")
    page = report(folder)
    assert "the run has written no checkpoint yet" in page.text
    assert "global 1" in page.text
    assert page.data["charts"]


def test_damaged_checkpoints_are_said(folder):
    for path in (folder / "checkpoints").iterdir():
        path.write_bytes(path.read_bytes()[:-100])
    assert "none of the" in report(folder).text


@pytest.mark.parametrize("content", [None, b"", b'{"step": 1, "lo'])
def test_a_run_without_readings_still_has_a_page(folder, content):
    (folder / "baseline.json").unlink()
    (folder / "starts.jsonl").unlink()
    (folder / "metrics.jsonl").unlink()
    if content is not None:
        (folder / "metrics.jsonl").write_bytes(content)
    page = report(folder, "images=20")
    assert "There is no reading in metrics.jsonl yet." in page.text
    assert page.data["charts"] == []
    assert page.data["explorer"]["count"] == 20


def test_a_torn_last_line_is_left_alone(folder):
    path = folder / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"step": 21, "lo')
    assert read_run(folder).step == 20
    assert path.read_bytes() == whole + b'{"step": 21, "lo'


def test_unlabelled_images_are_coloured_by_cluster(folder, made, tmp_path):
    for index, path in enumerate(sorted((made.parent / "images").rglob("*.png"))[:24]):
        (tmp_path / "flat").mkdir(exist_ok=True)
        shutil.copy(path, tmp_path / "flat" / f"{index}.png")
    page = report(folder, f"source={tmp_path / 'flat'}")
    assert page.data["explorer"]["classes"] == []
    assert set(page.data["explorer"]["labels"]) == {-1}
    assert "are not, or no longer, those that the run began with" in page.text


def test_what_is_no_run_is_a_sentence(tmp_path, capsys):
    for arguments, said in (
        (["report", str(tmp_path / "none")], "is no run: give a folder that exists"),
        (["report", str(tmp_path)], "is no run: give the folder of a run, which has a config.yaml"),
        (["report"], "run is needed"),
    ):
        assert main(arguments) == 2
        assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.fixture
def served(made):
    """A server of the run's page, with pictures that cost nothing."""
    page = Page(made, lambda record, found: Pictures(notes=["drawn"]))
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
    assert Found(html).data["live"] is True
    assert "connect-src &#x27;self&#x27;" in html or "connect-src 'self'" in html
    assert "Being drawn" in html
    assert json.loads(ask(served, "/news.json")[1])["version"] is None
    served.page.draw_if_new()
    assert "drawn" in Found(ask(served, "/")[1]).text
    news = json.loads(ask(served, "/news.json")[1])
    assert news["version"] == 20
    assert news["texts"]["state"]
    assert ask(served, "/", "HEAD") == (200, "")


def test_a_served_page_follows_the_run(folder):
    page = Page(folder, lambda record, found: Pictures())
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
def test_a_name_that_someone_pointed_here_gets_no_answer(served, host):
    assert ask(served, "/", host=host) == (421, "This name is not this server's.\n")


@pytest.mark.parametrize("host", ["localhost:1", "127.0.0.1", "[::1]:80", "LOCALHOST"])
def test_names_of_this_machine_are_known(served, host):
    assert ask(served, "/news.json", host=host)[0] == 200


def test_the_server_listens_on_loopback_alone_and_says_if_it_cannot(served):
    assert served.socket.getsockname()[0] == "127.0.0.1"
    with pytest.raises(ValueError, match="give another port"):
        PageServer(served.page, "127.0.0.1", served.server_port)


def test_a_run_that_vanished_is_no_crash(served, folder):
    served.page.folder = folder
    shutil.rmtree(folder)
    assert ask(served, "/news.json")[0] == 503
    assert re.search("cannot be read", ask(served, "/")[1])
