"""From photos without a label to a table that somebody has checked, in a real browser."""

import csv
from random import Random

import numpy as np
import pytest
from PIL import Image

import dino_vit
from dino_vit.core.text import printable
from dino_vit.data.open import open_source
from dino_vit.eval.statistics import wilson_interval
from tests.support.browser import text_of
from tests.support.labelling import LabelPage

VISIBLE = ['"', "'", ",", ";", "<script>alert(1)", "<!--", "&quot;", "שלום", "مرحبا", "é", "日本", "🍏"]
VISIBLE += ["\\", "=1+1", "#", "?", "%20"]
PIECES = [*VISIBLE, "\n", "\r\n", "\t", " ", "\u202e", "\ufeff"]
THINGS = ["Apple", "Pear", "Red Cabbage", "Lemon", "Fig", "Date", "Kiwi", "Plum", "Rice", "Tea"]


def write_photos(folder, count, noise):
    """Write images of things that differ in their colours, but not much; return what is on each."""
    random = np.random.default_rng(0)
    colours = random.integers(256, size=(len(THINGS), 2, 1, 3))
    folder.mkdir()
    truth = {}
    for number in range(count):
        thing = int(random.integers(len(THINGS)))
        pixels = np.repeat(np.repeat(colours[thing], 8, 0), 16, 1) + random.normal(0, noise, 3)
        pixels += random.normal(0, 20, pixels.shape)
        name = f"IMG_{number:04}.png"
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / name)
        truth[name] = THINGS[thing]
    return truth


def read(path):
    with path.open(encoding="utf-8-sig", newline="") as file:
        return {row["name"]: row for row in csv.DictReader(file)}


def walk(page, labels, corrections, weights="pixels"):
    """Label some, guess the others, correct guesses, label random ones, and guess again."""
    output, settings = page.folder / "rest.csv", {"precision": "no", "overwrite": True, "verbose": False}
    few = page.folder / "few.csv"
    page.open(weights)
    page.show("Label")
    page.label(labels)
    given = page.save("few.csv")
    dino_vit.predict(page.photos, weights, labels=few, output=output, **settings)
    first = read(output)
    page.open(weights, labels=few, guesses=output)
    page.show("Check guesses")
    corrected = page.correct(corrections)
    page.show("Check by chance")
    random = page.label(page.ask("data.sample.length"))
    said = text_of(page.browser, ".learned")
    few = page.save("few-1.csv")
    found = dino_vit.predict(
        page.photos, weights, labels=page.folder / "few-1.csv", output=output, **settings
    )
    check(page, first, given, few, corrected, random, said)
    return found, read(output)


def check(page, first, given, few, corrected, random, said):
    """The rows that were saved are those of the images, and right; so is what was said of the guesses."""
    assert {name: (row["label"], row["origin"]) for name, row in first.items() if name in given} == given
    assert few.items() >= given.items()
    assert {name: label for name, (label, _) in few.items()}.items() <= page.truth.items()
    assert {few[name][1] for name in corrected} == {"corrected"}
    assert {few[name][1] for name in random} == {"random"}
    right = sum(first[name]["label"] == page.truth[name] for name in random)
    low, high = (round(100 * bound) for bound in wilson_interval(right / len(random), len(random)))
    assert said == f"{right} of {len(random)} random images are guessed right ({low} to {high} %)"
    left = [name for name in page.truth if name not in given]
    assert low <= 100 * np.mean([first[name]["label"] == page.truth[name] for name in left]) <= high


@pytest.mark.parametrize(
    ("count", "labels", "corrections"), [(300, 40, 10), pytest.param(2000, 150, 50, marks=pytest.mark.slow)]
)
def test_photos_without_a_label_become_a_table_that_is_checked(browser, tmp_path, count, labels, corrections):
    truth = write_photos(tmp_path / "photos", count, 50)
    with LabelPage.opened(browser, tmp_path / "photos", truth, tmp_path) as page:
        found, table = walk(page, labels, corrections)
    assert [*table] == [*truth], "every image, in order"
    guessed = {name: row["label"] for name, row in table.items() if row["origin"] == "guessed"}
    assert all(row["label"] == truth[name] for name, row in table.items() if name not in guessed)
    figure = found.details["cross_validated"]
    assert figure["images"] == min(100, (count - labels) // 5), "the random ones alone judge"
    right = 100 * np.mean([label == truth[name] for name, label in guessed.items()])
    assert figure["low"] <= right <= figure["high"]
    assert 50 < right < 97, "neither easy nor hopeless"


def test_two_thousand_awkward_names_come_back(browser, tmp_path):
    draw, truth, folder = Random(0), {}, tmp_path / "photos"
    folder.mkdir()
    labels = [" ".join(draw.sample(VISIBLE, 3)) + str(number) for number in range(20)]
    for number in range(2000):
        name = "".join([*draw.choices(PIECES, k=3), str(number), draw.choice(PIECES), ".png"])
        Image.new("RGB", (4, 4), (number % 256, number // 256, 0)).save(folder / name)
        truth[printable(name)] = labels[number % 20]
    with LabelPage.opened(browser, folder, truth, tmp_path) as page:
        page.open()
        script = "const [label, truth] = arguments, all = [...data.names.keys()];"
        script += "page.answers.act('label', all.filter((n) => truth[data.names[n]] === label), label)"
        for label in labels:
            browser.execute_script(script, label, truth)
        assert {name: label for name, (label, _) in page.save("few.csv").items()} == truth
    source = open_source(str(folder), tmp_path / "few.csv")
    codes = source.codes().tolist()
    assert {source.name(n): source.labels.names[code] for n, code in enumerate(codes)} == truth
