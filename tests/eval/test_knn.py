"""The command and its program: figures equal to a loop over features, in one process or two."""

import json

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from dino_vit.data.open import open_source
from dino_vit.eval.statistics import accuracy
from dino_vit.features.frozen import FrozenBackbone, build_baseline
from dino_vit.features.readings import fit_levelling
from dino_vit.models.backbone import CLS, FeatureSpec
from dino_vit.weights import load_backbone
from tests.support.backbones import extracted
from tests.support.images import write_classes
from tests.support.naive import ranked_classes, right_by_loop
from tests.support.processes import command_in_two
from tests.support.runs import command_here


def arguments(weights, source, output, *more):
    settings = [f"weights={weights}", f"output={output}", "precision=no", *more]
    return ["knn", str(source), *settings]


def evaluate(weights, source, *more):
    output = source.parent / "found.json"
    said = command_here(*arguments(weights, source, output, *more))
    return json.loads(output.read_text()), said


def features_of(weights, source, spec=CLS):
    """Features as lists, and the names of the classes."""
    source = open_source(str(source))
    unit = torch.nn.functional.normalize(extracted(load_backbone(weights), source, spec=spec).double())
    return unit, [source.labels.names[source.label(index)] for index in range(len(source))]


@pytest.mark.parametrize("spec", [CLS, FeatureSpec(tokens="cls+mean", blocks=2)])
def test_figures_are_those_of_a_loop_and_classes_meet_by_name(tmp_path, weights, spec):
    """The queries lack a class of the bank, so that equal numbers are not equal classes."""
    train = write_classes(tmp_path / "train", ["aa", "b", "c 1", "d", "e", "f", "g"], 7)
    val = write_classes(tmp_path / "val", ["b", "d", "e"], 4, first=50)
    Image.new("RGB", (16, 16)).save(val / "nobody.png")  # of no class
    found, said = evaluate(
        weights, val, f"train={train}", "k=[3,20,1000]", f"tokens={spec.tokens}", f"blocks={spec.blocks}"
    )
    bank, bank_labels = features_of(weights, train, spec)
    (val / "nobody.png").unlink()
    queries, labels = features_of(weights, val, spec)
    assert (found["images"], found["classes"]) == ({"train": 49, "val": 12}, 7)
    for figures, k in zip(found["results"], (3, 20, 49), strict=True):
        for top in (1, 5):
            found_by_loop = [ranked_classes((bank @ query).tolist(), bank_labels, k) for query in queries]
            right = [label in classes[:top] for label, classes in zip(labels, found_by_loop, strict=True)]
            assert figures[f"top-{top}"] == accuracy(sum(right), 12).as_json()
            if (top, k) == (1, 3):
                correct = {
                    name: sum(r for r, label in zip(right, labels, strict=True) if label == name)
                    for name in "bde"
                }
                rows = found["per_class"].items()
                assert {name: row["top-1"]["correct"] for name, row in rows} == correct
    assert "with k = 1000: the bank has only 49 images, and all of them vote" in said
    assert f"{found['results'][0]['top-1']['value']:.2f} (" in said
    assert "always guessing b scores 33.3 %, random guessing 14.3 %" in said
    assert f"class, k={found['results'][0]['k']}, the lowest of 3" in said


def test_one_set_is_classified_by_the_others(tmp_path, weights):
    images = write_classes(tmp_path / "images", "abc", 8)
    found, _ = evaluate(weights, images, "k=[5]")
    bank, labels = features_of(weights, images)
    right = right_by_loop(bank, labels, 5)
    assert found["results"][0]["top-1"]["correct"] == sum(right)
    assert found["images"] == {"train": 23, "val": 24}


def test_levelled_features_side_by_side_are_fitted_on_the_bank(tmp_path, weights):
    train = write_classes(tmp_path / "train", "abc", 12)
    val = write_classes(tmp_path / "val", "abc", 5, first=50)
    settings = f"train={train}", "k=[5]", "tokens=cls+cells", "whiten=0.5"
    found, _ = evaluate(f"{weights}+pixels", val, *settings)
    parts = {"model": load_backbone(weights), "pixels": build_baseline("pixels", open_source(str(train)))}
    spec, sides = FeatureSpec(tokens="cls+cells"), []
    for name, model in parts.items():
        frozen = FrozenBackbone(model=model, transform=model.transform)
        own = spec if name == "model" else CLS
        sources = [open_source(str(images)) for images in (train, val)]
        sides.append([frozen.extract(source, range(len(source)), own).values for source in sources])
    bank, queries = (torch.cat(pair, dim=1) for pair in zip(*sides, strict=True))
    level = fit_levelling(bank, [32, 9 * 32, 3 * 32 * 32])
    unit_bank, unit_queries = (F.normalize(level(each)) for each in (bank, queries))
    classes = ["abc"[row // 12] for row in range(36)]
    right = [
        ranked_classes((unit_bank @ query).tolist(), classes, 5)[0] == "abc"[row // 5]
        for row, query in enumerate(unit_queries)
    ]
    assert found["results"][0]["top-1"]["correct"] == sum(right)
    assert [each["source"] for each in found["weights"]["beside"]] == ["pixels"]


def test_labels_of_a_training_set_that_is_not_given_are_refused(tmp_path, weights):
    folder = write_classes(tmp_path / "set", ["cat", "dog"], 3)
    said = command_here("knn", folder, f"weights={weights}", "train_labels=labels.csv", code=2)
    assert "train_labels are those of train, which is not given" in said


def test_two_processes_of_the_program_find_what_the_command_does(tmp_path, weights):
    """Each image by the others, so a share of the queries must know which rows of the bank they are."""
    images, output = write_classes(tmp_path / "images", "ab", 26), tmp_path / "two.json"
    one, _ = evaluate(weights, images, "k=[5,10]")
    command, *settings = arguments(weights, images, output, "k=[5,10]")
    first, second = command_in_two(tmp_path / "two", f"eval/{command}.py", *settings)
    two = json.loads(output.read_text())
    for ours, theirs in zip(two["results"], one["results"], strict=True):
        assert ours.pop("AUROC") == pytest.approx(theirs.pop("AUROC"), abs=0.3)
    assert two["results"] == one["results"]
    assert "top-1" in first
    assert str(output) in first
    assert "top-1" not in second, "only the first process speaks"
