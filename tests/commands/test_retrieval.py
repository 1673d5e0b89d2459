"""The whole command: figures equal to a walk down every query's list, in one process or two."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import normalize

import dino_vit
from dino_vit.cli import main
from dino_vit.data.sources.open import open_source
from dino_vit.eval.features.extraction import FeatureSpec, extract_features
from dino_vit.eval.retrieval.whitening import Whitening
from dino_vit.views.preparation import preparation_of
from dino_vit.weights import load_backbone
from tests.support.images import write_classes
from tests.support.processes import command_in_two


def arguments(weights, source, output, *more):
    return ["retrieval", str(source), f"weights={weights}", f"output={output}", "precision=no", *more]


def evaluate(weights, source, *more):
    output = weights.parent / "found.json"
    assert main(arguments(weights, source, output, *more)) == 0
    return json.loads(output.read_text())


def vectors(weights, source, *, tokens="cls", size=None):
    model, source = load_backbone(weights), open_source(str(source))
    preparation = preparation_of(model, size=size)
    spec = FeatureSpec(tokens=tokens)
    found = extract_features(
        model, source, range(len(source)), preparation=preparation, batch_size=128, spec=spec
    )
    return found.values, [source.classes[source.label(index)] for index in range(len(source))]


def walked(bank, bank_labels, queries, labels, *, own=False):
    """Return mAP, recall and precision at 3 and R-precision by sorting the list of each query."""
    rows = []
    for number, query in enumerate(normalize(queries.double())):
        cosines = (normalize(bank.double()) @ query).tolist()
        order = sorted((i for i in range(len(bank)) if not (own and i == number)), key=lambda i: -cosines[i])
        hits = [bank_labels[i] == labels[number] for i in order]
        if total := sum(hits):
            precisions = [sum(hits[: i + 1]) / (i + 1) for i, hit in enumerate(hits) if hit]
            first = hits[:3]
            rows.append([sum(precisions) / total, any(first), sum(first) / 3, sum(hits[:total]) / total])
    means = 100 * np.mean(np.array(rows, float), axis=0)
    return dict(zip(("mAP", "recall@3", "precision@3", "R-precision"), means.tolist(), strict=True))


def percents(found):
    return {title: one["percent"] for title, one in found["results"].items()}


def test_each_image_is_searched_for_among_the_others(tmp_path, weights, capsys):
    images = write_classes(tmp_path / "images", ["a", "b", "c 1"], 7)
    write_classes(tmp_path / "images", ["d"], 1, first=90)
    found = evaluate(weights, images, "k=[3]", "pictures=4")
    values, labels = vectors(weights, images)
    assert percents(found) == pytest.approx(walked(values, labels, values, labels, own=True))
    assert (found["queries"], found["queries_without_relevant_images"]) == (21, 1)
    assert found["r_precision_of_a_random_order"] == pytest.approx(100 * 6 / 21)
    assert sorted(found["per_class"]) == ["a", "b", "c 1"]
    assert np.mean(list(found["per_class"].values())) == pytest.approx(percents(found)["mAP"])
    out = capsys.readouterr().out
    assert "1 query without a relevant image left out" in out
    assert f"{percents(found)['mAP']:.2f} (" in out
    with Image.open(tmp_path / "found.png") as sheet:
        assert sheet.width > sheet.height > 200
        colours = {colour for _, colour in sheet.convert("RGB").getcolors(maxcolors=2**24)}
    assert {(40, 160, 60), (215, 40, 40)} <= colours


def test_queries_of_their_own_by_whitened_features_of_several_sizes(tmp_path, weights):
    """Classes meet by name; a class that the searched images lack is left out."""
    images = write_classes(tmp_path / "images", ["a", "b", "c", "d"], 6)
    asked = write_classes(tmp_path / "asked", ["b", "d", "e"], 4, first=50)
    more = ("tokens=cls+gem", "scales=[1,0.5]", f"whitening={images}", "dimensions=5")
    found = evaluate(weights, images, f"queries={asked}", "k=[3]", *more)

    def of(source):
        both = [vectors(weights, source, tokens="cls+gem", size=(side, side)) for side in (16, 8)]
        return (both[0][0] + both[1][0]) / 2, both[0][1]

    (bank, bank_labels), (queries, labels) = of(images), of(asked)
    white = Whitening.learn(bank, torch.device("cpu"), 5)
    assert percents(found) == pytest.approx(walked(white(bank), bank_labels, white(queries), labels))
    assert (found["images"], found["queries"], found["queries_without_relevant_images"]) == (24, 8, 4)


def test_two_processes_find_what_one_does(tmp_path, weights):
    more = ("queries=synthetic:31:16", "pictures=0")
    one = evaluate(weights, "synthetic:40:16", *more)
    argv = arguments(weights, "synthetic:40:16", tmp_path / "two.json", *more)
    first, second = command_in_two(tmp_path / "two", *argv)
    assert json.loads((tmp_path / "two.json").read_text())["results"] == one["results"]
    assert "R-precision" in first
    assert "R-precision" not in second


def test_the_function_returns_what_the_file_holds(tmp_path, weights):
    output = tmp_path / "found.json"
    found = dino_vit.retrieval("synthetic:40:16", weights=weights, output=output, pictures=0, verbose=False)
    written = json.loads(output.read_text())
    assert found.sheet is None
    assert found.mean_ap._asdict() == written["results"]["mAP"]
    assert found.recall[5]._asdict() == written["results"]["recall@5"]
    assert [one.title for one in found.measured] == list(written["results"])


def test_mistakes_are_said_and_nothing_is_written(tmp_path, weights, capsys):
    two = write_classes(tmp_path / "two", "ab", 1)
    for more, said in (
        ([], "no query has another image of its class"),
        (["queries=synthetic:5:16"], f"no query has an image of {two} of its class"),
        ([f"queries={two}"], "each image of queries would find itself"),
        (["query_labels=a.csv"], "query_labels are those of queries, which is not given"),
        (["dimensions=5"], "dimensions is for whitening, which is not given"),
        ([f"whitening={two}", "dimensions=99"], "whitening to 99 dimensions, but the features have 32"),
        (["scales=[]"], "scales"),
        (["scales=[0]"], "scales"),
    ):
        assert main(arguments(weights, two, tmp_path / "none.json", *more)) == 2
        assert said in capsys.readouterr().err
    assert not list(tmp_path.glob("none*"))
