"""Tables with measured figures: README and docs/ have what benchmarks/results/ has, rounded."""

import json
import re

import pytest

from dino_vit.training.networks import COMPILED_STEPS
from tests.support.documents import README, ROOT

BEFORE = "pixels, edges, untrained"
SETS = ("flowers", "groceries", "hands", "cifar10")
# By page and heading of the table: benchmark, table, row, and the columns in the order of the page. What was
# not measured is an empty cell.
FIGURES = {
    ("README.md", "| | pixels"): [
        f"race | Small | {name}, 5 minutes: {figure} | {column}"
        for name in SETS
        for column in (*BEFORE.split(", "), "lightly-train", "trained")
        for figure in ("k-NN", "predict, 200 labels")
    ],
    ("docs/small-sets.md", "| set | pixels |"): [
        f"small | Small | {name}: {row}"
        for name in SETS
        for row in (f"k-NN | {BEFORE}, trained, ±", "predict, 200 labels | trained")
    ],
    ("docs/race.md", "| set | pixels |"): [
        f"race | Small | {name}, {minutes}: k-NN | {columns}"
        for name in SETS
        for minutes, columns in (
            ("1 minute", f"{BEFORE}, lightly-train"),
            ("5 minutes", "lightly-train"),
            ("1 minute", "trained"),
            ("5 minutes", "trained"),
        )
    ],
}


def measured(reading):
    benchmark, title, name, columns = reading.split(" | ")
    result = json.loads((ROOT / f"benchmarks/results/cpu/{benchmark}.json").read_text())
    tables = [table for table in result["tables"] if table["title"].startswith(title)]
    row = next(row for table in tables for row in table["rows"] if row["name"].startswith(name))
    values = {**row["speed"], **dict(re.findall(r"(±) ([\d.]+)", row["name"]))}
    return [float(values[column]) for column in columns.split(", ") if column in values]


@pytest.mark.parametrize(("page", "heading"), FIGURES)
def test_a_table_has_the_figures_that_were_measured(page, heading):
    text = (ROOT / page).read_text().split(f"\n{heading}")[1]
    table = text.split("\n\n")[0] if heading.startswith("|") else text.split("\n")[0]
    shown = re.findall(r"\d+\.\d+", table)
    values = [value for reading in FIGURES[page, heading] for value in measured(reading)]
    decimals = [len(text.partition(".")[2]) for text in shown]
    assert shown == [f"{value:.{count}f}" for value, count in zip(values, decimals, strict=True)]


def test_the_readme_has_figures_in_its_table_only():
    """Beside what a command printed."""
    table = README.split("\n| | pixels")[1].split("\n\n")[0]
    text = re.sub(r"(?s)```.*?```", "", README.replace(table, ""))
    assert re.findall(r"[\d.]+ ?[%×]", text) == []


STEPS_OF_AN_H200 = [  # in the order of the table
    "ViT-S/16, DINO, 64 images, nothing compiled",
    "ViT-S/16, DINO, 64 images, blocks compiled",
    "ViT-S/16, DINO, 64 images, code of 2021, fp16",
    "ViT-S/16, DINO, 256 images",
    "ViT-B/16, DINO, 64 images",
    "ViT-B/16, DINO, 64 images, blocks compiled",
    "ViT-S/16, DINOv2, 64 images, blocks compiled",
]


def test_the_figures_of_a_gpu_are_those_that_were_measured():
    lines = map(json.loads, (ROOT / "benchmarks/results/h200/results.jsonl").read_text().splitlines())
    steps = {line["name"]: line for line in lines if line["kind"] in ("step", "compiled")}
    page = (ROOT / "docs/gpu.md").read_text()
    rows = page.split("\n| a step |")[1].split("\n\n")[0].splitlines()[2:]
    for row, name in zip(rows, STEPS_OF_AN_H200, strict=True):
        step = steps[name]
        share = f"{step['of_peak']:.0%}".replace("%", " %") if "of_peak" in step else ""
        times = f"{step['ms']:.0f}, {step['ms_host']:.0f}"
        shown = [cell.strip() for cell in row.strip("|").split("|")][1:]
        assert shown == [f"{step['images_s']:,.0f}", times, share]
    small, base, patches = (
        f"{steps[name]['peak_mib'] * 2**20 / 1e9:.1f}"
        for name in STEPS_OF_AN_H200
        if name.endswith("64 images, blocks compiled")
    )
    assert f"took {small} GB, with DINOv2's loss {patches}, a ViT-B {base} |" in page
    assert f"in runs of {COMPILED_STEPS:,} steps and more" in page
