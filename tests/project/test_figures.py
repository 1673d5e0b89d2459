"""Tables with measured figures: README and docs/ have what benchmarks/results/ has, rounded."""

import json
import re

import pytest

from tests.support.documents import README, ROOT

TERMS = "DINO of 2021, Sinkhorn-Knopp, KoLeo, patches, all"
TEACHER = "student without, student with the teacher, the teacher"
PEER = "untrained, raw pixels, trained, lightly-train"
SMALL = [
    reading
    for name in ("groceries", "flowers")
    for reading in (
        f"small | Small | {name}: k-NN ± | untrained, raw pixels, trained, ±",
        f"small | Small | {name}: k-NN of 4 | trained",
        f"small | Small | {name}: linear | untrained, trained",
        f"small | Small | {name}: effective rank | untrained, trained",
    )
]
# By page and heading of the table: benchmark, table, row, and the columns in the order of the page.
FIGURES = {
    ("README.md", "| measured |"): [
        "small | Small | flowers: k-NN ± | raw pixels, untrained, trained",
        "small | Small | groceries: k-NN ± | raw pixels, untrained, trained",
        "cifar10 | CIFAR-10 | 50,000 | raw pixels, untrained, trained",
        "end_to_end | The whole | ViT-S/16 | reference, dino_vit",
    ],
    ("docs/start/demo.md", "| untrained |"): [
        "demo | The quick | 2,000 | untrained, trained, raw pixels, chance",
    ],
    ("docs/small-sets.md", "| set | seeds |"): SMALL,
    ("docs/small-sets.md", "| set | untrained |"): [
        f"small_peer | Small | {name}: k-NN | {PEER}" for name in ("textures", "cifar10", "flowers")
    ],
    ("docs/recipe.md", "| images | figure |"): [
        f"terms | scenes | mIoU by k-NN | {TERMS}",
        f"terms | scenes | mIoU by a linear | {TERMS}",
        f"terms | scenes | k-NN | {TERMS}",
        f"terms | scenes | linear | {TERMS}",
        f"terms | scenes | effective rank | {TERMS}",
        f"terms | textures | k-NN | {TERMS}",
        f"terms | textures | linear | {TERMS}",
        f"terms | flowers | k-NN | untrained, {TERMS}",
        f"terms | flowers | linear | untrained, {TERMS}",
        f"terms | cifar10 | k-NN | untrained, {TERMS}",
        f"terms | cifar10 | linear | untrained, {TERMS}",
    ],
    ("docs/recipe.md", "| | student without |"): [
        f"distillation | Flowers | {name} | {TEACHER}" for name in ("k-NN", "linear")
    ],
}


def measured(reading):
    benchmark, title, name, columns = reading.split(" | ")
    result = json.loads((ROOT / f"benchmarks/results/cpu/{benchmark}.json").read_text())
    tables = [table for table in result["tables"] if table["title"].startswith(title)]
    row = next(row for table in tables for row in table["rows"] if row["name"].startswith(name))
    spread = re.findall(r"± ([\d.]+)", row["name"])
    return [float(spread[0]) if column == "±" else row["speed"][column] for column in columns.split(", ")]


@pytest.mark.parametrize(("page", "heading"), FIGURES)
def test_a_table_has_the_figures_that_were_measured(page, heading):
    table = (ROOT / page).read_text().split(f"\n{heading}")[1].split("\n\n")[0]
    shown = re.findall(r"\d+\.\d+", table)
    values = [value for reading in FIGURES[page, heading] for value in measured(reading)]
    decimals = [len(text.partition(".")[2]) for text in shown]
    assert shown == [f"{value:.{count}f}" for value, count in zip(values, decimals, strict=True)]


def test_the_readme_has_figures_in_its_table_only():
    before, _, rest = README.partition("\n| measured |")
    assert re.findall(r"\d ?[%×]", before + rest.partition("\n\n")[2]) == []
