"""The table that `predict` writes, as what the next call reads."""

import csv

import pyarrow.parquet as pq
import pytest

import dino_vit
from tests.support.coloured_photos import COLOURS, IMAGES, colour_of

SETTINGS = {"precision": "no", "verbose": False}
pytestmark = pytest.mark.usefixtures("few_penalties")


def rows_of(path):
    with path.open(encoding="utf-8-sig") as file:
        return list(csv.DictReader(file))


def test_corrections_in_a_spreadsheet_are_labels_and_what_is_unsure_stays_so(photos, weights):
    labelled = [*(photos / "labels.csv").read_text().splitlines()[1:], "001.png,"]
    origins = ["random"] * (IMAGES // 2) + ["unsure"]
    lines = [f"{row},{origin}" for row, origin in zip(labelled, origins, strict=True)]
    folder, table, few, again = (photos / name for name in ("photos", "rest.csv", "few.csv", "again.csv"))
    few.write_text("\n".join(["name,label,origin", *lines]))
    said = str(dino_vit.predict(folder, weights, labels=few, output=table, confident=1, **SETTINGS))
    assert f"{IMAGES // 2} of {IMAGES} labels guessed" in said
    rows = rows_of(table)
    assert [row["origin"] for row in rows[:4]] == ["random", "unsure", "random", "guessed"]
    assert all(row["guess"] == row["label"] * (row["origin"] != "random") for row in rows)
    assert {row["origin"] for row in rows_of(photos / "rest-sure.csv")} == {"random"}
    for row in rows[3:13:2]:
        row["label"] = next(colour for colour in COLOURS if colour != row["guess"])
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0]])
        writer.writeheader()
        writer.writerows(rows)
    found = dino_vit.predict(folder, weights, labels=table, output=again, **SETTINGS)
    assert found.names == [row["name"] for row in [rows[1], *rows[13::2]]]
    again = rows_of(again)
    assert [row["label"] for row in again[3:13:2]] == [row["label"] for row in rows[3:13:2]]
    assert {(row["origin"], row["guess"]) for row in again[3:13:2]} == {("corrected", "")}
    assert [row["origin"] for row in again[:2]] == ["random", "unsure"]
    assert found.details["cross_validated"]["images"] == IMAGES // 2, "corrected ones are only learned from"


@pytest.mark.parametrize(("labels", "suffix"), [("labels.csv", "csv"), ("tags.csv", "parquet")])
def test_where_all_have_labels_the_table_holds_them_and_nothing_is_learned(photos, weights, labels, suffix):
    """Also where the only image without a label cannot be read."""
    (photos / "photos" / "torn.png").write_bytes(b"no image")
    titles, *rows = (photos / labels).read_text().splitlines()
    rows += [f"{row:03}.png,{colour_of(f'{row:03}')}" for row in range(1, IMAGES, 2)]
    whole = {"labels": photos / "whole.csv", "several": labels == "tags.csv", **SETTINGS}
    whole["labels"].write_text("\n".join([f"{titles},origin", *(f"{row},random" for row in rows)]))
    output, kept = photos / f"rest.{suffix}", photos / "classifier.safetensors"
    settings = whole | {"output": output, "overwrite": True}
    dino_vit.predict(photos / "photos", weights, **settings | {"labels": photos / labels})
    found = dino_vit.predict(photos / "photos", weights, **settings, confident=0.5)
    assert str(found) == f"All {IMAGES} images have labels: {output} holds them, nothing was guessed"
    written = rows_of(output) if suffix == "csv" else pq.read_table(output).to_pylist()
    assert [row["name"] for row in written] == [f"{row:03}.png" for row in range(IMAGES)]
    assert {row["origin"] for row in written} == {"random"}
    texts = [row["label"] if isinstance(row["label"], str) else ";".join(row["label"]) for row in written]
    given = [row.partition(",")[2] for row in sorted(rows)]
    assert [{*text.split(";")} for text in texts] == [{*text.split(";")} for text in given]
    assert (photos / f"rest-sure.{suffix}").read_bytes() == output.read_bytes()
    assert (found.names, found.labels, found.confidence, found.classifier) == ([], [], None, None)
    assert found.outputs.shape == (0, len(found.classes))
    again = dino_vit.predict(photos / "photos", weights, **whole, classifier=kept)
    assert again.columns["label"] == found.columns["label"]
    assert again.outputs.shape == found.outputs.shape
    assert f"\nAll {IMAGES} images have labels: the table holds them, nothing was guessed\n" in str(again)
    assert dino_vit.load_classifier(kept, verbose=False).classes == found.classes


@pytest.mark.parametrize("label", ["Äpfel", "apples"])
def test_a_spreadsheet_is_told_that_letters_are_those_of_utf_8(label, photos, weights):
    few, table = photos / "few.csv", photos / "rest.csv"
    few.write_text((photos / "labels.csv").read_text().replace("red", label))
    dino_vit.predict(photos / "photos", weights, labels=few, output=table, **SETTINGS)
    assert table.read_bytes().startswith(b"\xef\xbb\xbf") == (label == "Äpfel")
    assert label in {row["label"] for row in rows_of(table)}
    again = dino_vit.predict(photos / "photos", weights, labels=table, **SETTINGS)
    assert label in again.classes
