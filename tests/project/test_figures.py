"""Tables with measured figures: README and docs/ have what benchmarks/results/ has, rounded."""

import json
import re

import pytest

from tests.support.documents import README, ROOT

OTHERS = {"k-NN of 4": "trained", **dict.fromkeys(("linear", "effective rank"), "untrained, trained")}
SMALL = {"k-NN ±": "untrained, raw pixels, trained, ±", **OTHERS}
HOURS = {"k-NN": "untrained, raw pixels, trained", **OTHERS}
TERMS = "DINO of 2021, Sinkhorn-Knopp, KoLeo, patches, all"
CLS = ("k-NN", "linear")
GREY = ("groceries-grey", "flowers-grey")
# By page and heading of the table: benchmark, table, row, and the columns in the order of the page.
FIGURES = {
    ("README.md", "| k-NN accuracy"): [
        *(
            f"race | The race | {name}, 5 minutes | raw pixels, untrained, lightly-train, now"
            for name in ("flowers", "groceries", "hands")
        ),
        "small_peer | Small | cifar10: k-NN | raw pixels, untrained, lightly-train, trained",
        "hours | Small | groceries: k-NN | raw pixels, untrained, trained",
        "hours | Small | cifar10: k-NN | raw pixels, untrained, trained",
    ],
    ("README.md", "A ViT-S/16 trains on"): ["end_to_end | The whole | ViT-S/16 | dino_vit, reference"],
    ("docs/start/demo.md", "| untrained |"): ["demo | The | 2,000 | untrained, trained, raw pixels, chance"],
    ("docs/small-sets.md", "| set | seeds |"): [
        *(
            f"small | Small | {name}: {row} | {SMALL[row]}"
            for name in (*("groceries", "flowers", "cifar10", "textures", "hands"), *GREY)
            for row in SMALL
        ),
        *(f"small | Small | hands-grey: {row} | {HOURS[row]}" for row in HOURS),
    ],
    ("docs/small-sets.md", "| set, steps and epochs in an hour |"): [
        f"hours | Small | {name}: {row} | {HOURS[row]}"
        for name in ("groceries", "flowers", "cifar10")
        for row in HOURS
    ],
    ("docs/small-sets.md", "| set | untrained |"): [
        f"small_peer | Small | {name}: k-NN | untrained, raw pixels, trained, lightly-train"
        for name in ("textures", "cifar10", "flowers")
    ],
    ("docs/race.md", "| set and minutes |"): [
        f"race | The race | {name}, {minutes} | untrained, raw pixels, lightly-train, 0.3.0, now"
        for name in ("flowers", "groceries", "hands")
        for minutes in ("1 minute", "5 minutes")
    ],
    ("docs/recipe.md", "| images | figure |"): [
        *(
            f"terms | scenes | {row} | {TERMS}"
            for row in ("mIoU by k-NN", "mIoU by a linear", *CLS, "effective rank")
        ),
        *(f"terms | textures | {row} | {TERMS}" for row in CLS),
        *(f"terms | {name} | {row} | untrained, {TERMS}" for name in ("flowers", "cifar10") for row in CLS),
    ],
    ("docs/recipe.md", "| | student without |"): [
        f"distillation | Flowers | {row} | student without, student with the teacher, the teacher"
        for row in CLS
    ],
}


def measured(reading):
    benchmark, title, name, columns = reading.split(" | ")
    result = json.loads((ROOT / f"benchmarks/results/cpu/{benchmark}.json").read_text())
    tables = [table for table in result["tables"] if table["title"].startswith(title)]
    row = next(row for table in tables for row in table["rows"] if row["name"].startswith(name))
    values = {**row["speed"], "±": float((re.findall(r"± ([\d.]+)", row["name"]) or [0])[0])}
    return [values[column] for column in columns.split(", ")]


@pytest.mark.parametrize(("page", "heading"), FIGURES)
def test_a_table_has_the_figures_that_were_measured(page, heading):
    text = (ROOT / page).read_text().split(f"\n{heading}")[1]
    table = text.split("\n\n")[0] if heading.startswith("|") else text.split("\n")[0]
    shown = re.findall(r"\d+\.\d+", table)
    values = [value for reading in FIGURES[page, heading] for value in measured(reading)]
    decimals = [len(text.partition(".")[2]) for text in shown]
    assert shown == [f"{value:.{count}f}" for value, count in zip(values, decimals, strict=True)]


def test_the_readme_has_figures_in_its_table_only():
    table = README.split("\n| k-NN accuracy")[1].split("\n\n")[0]
    assert re.findall(r"\d ?[%×]", README.replace(table, "")) == []
