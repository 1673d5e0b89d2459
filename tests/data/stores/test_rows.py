"""Images in Parquet files, which are unpacked: local ones, and behind a real HTTP server."""

import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dino_vit.data import remote
from dino_vit.data.open import open_source
from dino_vit.data.remote import SourceLost
from dino_vit.data.stores.rows import find_columns
from tests.support.remote import serving

PICTURES = [os.urandom(30) for _ in range(8)]
ONE_MISSING = [*PICTURES[:6], None, PICTURES[0]]
LAYOUTS = {
    "rows": ({"jpg": ONE_MISSING, "label": list("abcabcab")}, {"row_group_size": 3}),
    "plain": ({"image": ONE_MISSING}, {"use_dictionary": False}),
    "named": (
        {"x": [{"bytes": data, "path": 7} for data in PICTURES], "name": [*map(str, range(8, 0, -1))]},
        {"compression": "zstd"},
    ),
    "hub": (
        {"image": [{"bytes": data, "path": f"{7 - row}.png"} for row, data in enumerate(PICTURES)]},
        {"row_group_size": 2},
    ),
}


def items(source):
    return [(source.name(index), source.label(index), source.read(index)) for index in range(len(source))]


@pytest.fixture
def tables(tmp_path):
    (tmp_path / "tables").mkdir()
    for name, (columns, options) in LAYOUTS.items():
        pq.write_table(pa.table(columns), tmp_path / "tables" / f"{name}.parquet", **options)
    return tmp_path / "tables"


@pytest.mark.parametrize("name", LAYOUTS)
def test_remote_tables_of_all_layouts_are_as_local_ones(tables, name, monkeypatch):
    monkeypatch.setattr(remote, "MOST_REQUESTED", 100)  # so that a file takes several requests
    local = open_source(str(tables / f"{name}.parquet"))
    with serving(tables) as server:
        server.faults = ["500", "cut", "short", "long"]
        far = open_source(f"{server.url}/{name}.parquet")
    assert not server.faults
    assert items(far) == items(local)
    assert far.fingerprint == local.fingerprint
    assert list(far.labels.names) == list(local.labels.names)
    in_order = sorted(range(8), reverse=True) if name in ("named", "hub") else range(8)
    images = [ONE_MISSING, PICTURES][name in ("named", "hub")]
    assert [data for *_, data in items(local)] == [images[row] or b"" for row in in_order]


def test_a_table_that_is_damaged_or_out_of_reach_is_a_sentence(tables, monkeypatch):
    monkeypatch.setattr(remote, "timeout_s", 2)
    path = tables / "hub.parquet"
    data = bytearray(path.read_bytes())
    data[4:40] = bytes(36)  # the header of the first page
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"hub\.parquet is damaged or not a Parquet file: "):
        open_source(str(path))
    with serving(tables) as server:
        server.down = True
        with pytest.raises((SourceLost, OSError), match=r"rows\.parquet"):
            open_source(f"{server.url}/rows.parquet")


@pytest.mark.parametrize(("marked", "label"), [((), None), (("genus",), "genus"), (("genus", "place"), None)])
def test_a_column_of_classes_is_the_label_whatever_it_is_called_if_it_is_the_only_one(marked, label):
    features = {name: {"_type": "ClassLabel", "names": ["a", "b"]} for name in marked}
    types = {"image": pa.binary(), "genus": pa.int64(), "place": pa.int64()}
    noted = {"huggingface": json.dumps({"info": {"features": features}})}
    found = find_columns("a.parquet", pa.schema(types, noted))
    assert (found.label, found.classes) == (label, ("a", "b") if label else None)
