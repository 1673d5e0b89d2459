"""The page as a file: what it holds, what it loads, what damaged runs give."""

import json
import math
import re
import shutil
from dataclasses import replace

import pytest

from dino_vit.cli import main
from dino_vit.config.loading import load, to_yaml
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.data.open import open_source
from dino_vit.eval.results import evaluation
from dino_vit.eval.statistics import accuracy
from dino_vit.reports.metrics import Baseline, append_record
from dino_vit.reports.page import SHOWN, Pictures, Row, charts, figures, render, thin
from dino_vit.reports.record import read_run
from dino_vit.views.pictures import Tile
from tests.support.history import HEALTHY
from tests.support.reports import HOSTILE, IMAGES, ParsedPage, write_report


def change_config(folder, old, new):
    path = folder / "config.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_the_page_lists_the_results_of_a_run(folder):
    assert 'id="evaluations"' not in render(read_run(folder), Pictures())
    details = {"settings": {"source": HOSTILE, "k": [3]}, "given": {"source": HOSTILE, "k": [3]}}
    evaluation("knn", folder / "eval" / "knn.json", "top-1", accuracy(1, 4), details)
    del details["given"]
    evaluation("linear", folder / "eval" / "linear.json", "top-1", accuracy(1, 4), details)
    page = render(read_run(folder), Pictures())
    assert HOSTILE not in page
    rows = page[page.index('id="evaluations"') : page.index('id="run"')]
    assert rows.count("25.00 (4.56 to 69.94)") == 2
    assert rows.count("k=[3]") == 1, "where it was given"


def test_the_page_loads_nothing_and_describes_the_run(made, capsys):
    """A name like a script is only a name; only the page's own script and style may run."""
    page = write_report(made, images=IMAGES)
    size = (made / "report.html").stat().st_size
    assert size < 8e6
    assert f"report.html: {size / 1e6:.1f} MB" in capsys.readouterr().out
    loaded = [value for _, name, value in page.attributes if name in ("src", "href", "srcset", "action")]
    assert all(value.startswith(("data:", "#")) for value in loaded)
    assert not any(name.startswith("on") or name == "style" for _, name, _ in page.attributes)
    assert page.tags.count("script") == 2
    assert "without a network" in page.text
    assert "20 of 20 steps" in page.text
    assert "head.prototypes 256 65536" in page.text
    assert "The map and the attention are of step 20." in page.text
    assert len(page.data["map"]["names"]) == IMAGES
    assert "of the 72 images" not in page.text
    assert re.search(r"started \d{4}-\d\d-\d\d \d\d:\d\d UTC(?! ?resumed)", " ".join(page.text.split()))
    assert "<script>alert" not in (made / "report.html").read_text()
    assert HOSTILE in page.data["map"]["names"]
    hostile = Pictures(views=[Row(HOSTILE, [Tile("data:,", HOSTILE)])], notes=[HOSTILE])
    assert "<script>alert" not in render(read_run(made), hostile)
    titles = {chart["title"] for chart in page.data["charts"]}
    assert titles >= {"Loss", "Teacher entropies", "k-NN accuracy", "Effective rank", "Learning rate"}
    sections = [value for tag, name, value in page.attributes if (tag, name) == ("section", "id")]
    assert sections == ["map", "attention", "curves", "views", "run"]

    (policy,) = (value for _, name, value in page.attributes if name == "content" and "default-src" in value)
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == rules["connect-src"] == "'none'"
    nonces = {value for tag, name, value in page.attributes if name == "nonce"}
    assert {rules["script-src"], rules["style-src"]} == {f"'nonce-{nonce}'" for nonce in nonces}
    assert "The map shows 20 of the 72 images" in write_report(made, images=20).text


def test_images_that_moved_are_reported_and_can_be_given(folder, made):
    images = made.parent / "images"
    change_config(folder, str(images), "/no/such/place")
    page = folder / "report.html"
    page.write_text("an earlier page, with pictures")
    assert main(["report", str(folder)]) == 2
    assert page.read_text() == "an earlier page, with pictures"
    page.unlink()
    page = write_report(folder)
    assert "'/no/such/place' does not exist" in page.text
    assert "say where with source=..." in page.text
    assert page.data["map"] is None
    assert page.data["charts"]
    sections = [value for tag, name, value in page.attributes if (tag, name) == ("section", "id")]
    assert sections == ["curves", "run"], "none without content"
    assert len(write_report(folder, f"source={images}").data["map"]["names"]) == 12


def test_without_a_usable_checkpoint_the_rest_is_shown(folder):
    for path in (folder / "checkpoints").iterdir():
        path.write_bytes(path.read_bytes()[:-100])
    assert "none of the" in write_report(folder).text
    shutil.rmtree(folder / "checkpoints")
    page = write_report(folder)
    assert "The run has not written a checkpoint yet." in page.text
    assert "global 1" in page.text
    assert page.data["charts"]


def test_a_run_without_metrics_still_has_a_page(folder):
    for name in ("baseline.json", "starts.jsonl", "metrics.jsonl"):
        (folder / name).unlink()
    (folder / "metrics.jsonl").write_bytes(b'{"step": 1, "lo')
    page = write_report(folder)
    assert "metrics.jsonl has no lines yet." in page.text
    assert page.data["charts"] == []
    assert len(page.data["map"]["names"]) == 12


def test_labels_of_a_file_colour_the_map_and_missing_ones_are_reported(folder, tmp_path):
    source, labels = open_source(read_run(folder).config.data.source), tmp_path / "labels.csv"
    change_config(folder, "labels: null", f"labels: {labels}")
    assert str(labels) in write_report(folder).text
    lines = [f"{source.name(index)},{'even' if index % 2 == 0 else 'odd'}" for index in range(len(source))]
    labels.write_text("\n".join(["name,label", *lines]))
    classes = write_report(folder, images=IMAGES).data["map"]["classes"]
    assert classes == [["even", IMAGES // 2], ["odd", IMAGES // 2]]
    assert write_report(folder, "labels=none").data["map"]["classes"] == []


def test_a_long_curve_keeps_its_ends_and_its_peaks():
    points = [(step, math.sin(step / 900)) for step in range(20_000)]
    points[7_777] = (7_777, 50.0)
    points[12_345] = (12_345, -50.0)
    kept = thin(points)
    assert len(kept) <= 602
    assert {points[0], points[-1], points[7_777], points[12_345]} <= set(kept)
    assert kept == sorted(kept)
    assert thin(points[:100]) == points[:100]


def record_of(folder, history, baseline):
    """A run folder with this history alone, and what is read from it."""
    for metrics, name in history:
        append_record(folder / "metrics.jsonl", replace(metrics, diagnosis=name).to_record())
    (folder / "config.yaml").write_text(to_yaml(load(PretrainConfig)))
    (folder / "baseline.json").write_text(json.dumps(baseline))
    return read_run(folder)


def by_title(record):
    return {chart["title"]: chart for chart in charts(record)}


def test_figures_start_before_training_and_are_compared_with_their_levels(tmp_path):
    last = replace(HEALTHY, step=100, knn=40.0, rankme=55.0)
    baseline = {"knn": 20.0, "pixels": 10.0, "rankme": 12.0, "queries": 500}
    history = [(replace(HEALTHY, step=50), "too early to tell"), (last, "learning")]
    record = record_of(tmp_path, history, baseline)
    drawn = by_title(record)
    assert drawn["k-NN accuracy"]["series"] == {"CLS token": [(0, 20.0), (100, 40.0)]}
    assert drawn["k-NN accuracy"]["levels"] == {"untrained": 20.0, "pixels": 10.0}
    assert drawn["Effective rank"]["series"] == {"effective rank": [(0, 12.0), (100, 55.0)]}
    assert drawn["Loss"]["levels"] == {"all alike": pytest.approx(math.log(last.prototypes))}
    knn = "k-NN accuracy on 500 images, each labelled by those most similar to it, by the CLS token"
    assert figures(record) == {
        knn: "40.0 ± 4.3 %",
        "before training": "20.0 %",
        "pixels without a network": "10.0 %",
    }
    behind = replace(record, baseline=replace(record.baseline, edges=52.0))
    assert figures(behind)["edges without a network"] == "52.0 %"
    unlabelled = replace(record, history=[replace(last, knn=None)])
    ways = "ways to tell images apart"
    assert figures(unlabelled) == {ways: "55", f"{ways}, before training": "12"}
    page = render(record, Pictures())
    assert "dino-vit label" not in page
    without = replace(
        unlabelled, config=load(PretrainConfig, None, {"data.source": "photos"}), baseline=Baseline()
    )
    assert f"dino-vit label photos {record.folder}" in render(without, Pictures())
    assert page.index('class="learned"') < page.index('class="figures"') < page.index('class="outcome"')


def test_the_charts_that_matter_come_first_and_the_others_are_behind_a_line(tmp_path):
    measured = {"knn": 40.0, "rankme": 55.0, "probe": 50.0}
    for name, history, first in (
        ("new", [], []),
        ("unlabelled", [replace(HEALTHY, rankme=55.0)], ["Effective rank", "Entropy gap"]),
        ("labelled", [replace(HEALTHY, **measured)], ["k-NN accuracy", "Effective rank"]),
    ):
        (tmp_path / name).mkdir()
        record = record_of(tmp_path / name, [(metrics, "learning") for metrics in history], {})
        first = ["Loss", "Teacher entropies", *first] if history else []
        assert [chart["title"] for chart in charts(record)][:SHOWN] == first
        page = ParsedPage(render(record, Pictures()))
        assert page.tags.count("details") == (1 if history else 0)
        assert ("Learning rate" in page.text) == bool(history), "named on the line"


def test_a_loss_that_is_not_finite_is_named_and_left_out(tmp_path):
    flat = replace(HEALTHY, loss=math.nan, embedding_std=math.nan, nonfinite_steps=1)
    record = record_of(tmp_path, [(flat, "diverged")], {})
    assert '<span class="pill bad">diverged</span>' in render(record, Pictures())
    assert "Teacher entropies" in by_title(record)
    assert "Loss" not in by_title(record)
