import json
import os
import subprocess
import sys
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dino_vit.data.sources.open import open_source
from tests.support.image_sets import FILES

IMAGE = FILES["cat/a.b.png"]


def written(path, columns, features=None):
    metadata = None if features is None else {"huggingface": json.dumps({"info": {"features": features}})}
    pq.write_table(pa.table(columns).replace_schema_metadata(metadata), path)
    return str(path)


@pytest.mark.parametrize(
    "other",
    [
        pa.array([[1], [2]]),
        pa.array([[b"x"], None]),
        pa.array([{"bytes": [b"x"]}, None]),
        pa.array([{"bytes": "text"}, None]),
        pa.array([None, None]),
        pa.array([1, 2**63], pa.uint64()),
        pa.array(["a", "b"]).dictionary_encode(),
        pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int64())),
    ],
)
@pytest.mark.parametrize("name", ["image", "img", "label", "path", "x"])
def test_columns_of_any_type_are_no_traceback(tmp_path, name, other):
    columns = {"image": pa.array([IMAGE, IMAGE]), "bytes": pa.array([IMAGE, IMAGE])} | {name: other}
    source = open_source(written(tmp_path / "a.parquet", columns))
    assert source.read(1) == IMAGE


@pytest.mark.parametrize("noted", [[], None, "Image", {"_type": 3}, {"_type": "ClassLabel", "names": 3}])
def test_notes_on_columns_may_be_anything(tmp_path, noted):
    columns = {"image": pa.array([{"bytes": IMAGE, "path": 7}]), "label": pa.array(["cat"])}
    features = {"image": {"_type": "Image"}, "label": noted}
    features[""] = {"_type": "ClassLabel", "names": ["a"]}
    source = open_source(written(tmp_path / "a.parquet", columns, features))
    assert (source.read(0), source.classes) == (IMAGE, ["cat"])
    source = open_source(written(tmp_path / "b.parquet", {"image": [IMAGE]}, features))
    assert (source.read(0), source.label(0)) == (IMAGE, None)


def test_columns_of_one_name_are_no_traceback(tmp_path):
    image, path = pa.array([IMAGE]), tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_arrays([image, image], ["image", "image"]), path)
    with pytest.raises(ValueError, match=r"a\.parquet has several columns called image; rename them"):
        open_source(str(path))
    fields = pa.StructArray.from_arrays([image, pa.array(["a"]), pa.array(["b"])], ["bytes", "path", "path"])
    assert open_source(written(path, {"image": fields})).read(0) == IMAGE


def test_tables_without_images_say_what_they_have_on_one_line(tmp_path):
    names = {f"a\n{number}": pa.array([[1]]) for number in range(1000)}
    with pytest.raises(ValueError, match=r"has no column of images: none of a\\n0 \(list") as caught:
        open_source(written(tmp_path / "a.parquet", names))
    assert len(str(caught.value)) < 1000


def test_one_image_a_thousand_times_does_not_fill_the_disk(tmp_path):
    path = written(tmp_path / "a.parquet", {"image": pa.array([bytes(2**20)] * 300)})
    with pytest.raises(ValueError, match=r"a\.parquet cannot be read: it would unpack to .* MiB, over 200"):
        open_source(path)


DEFAULT = pa.default_memory_pool()
WATCHED = pa.proxy_memory_pool(DEFAULT)  # for ever, as what it gave may be returned to it late


@contextmanager
def little_memory():
    """Let Arrow take 200 MB at once, and not more."""
    pa.set_memory_pool(WATCHED)
    try:
        yield
    finally:
        pa.set_memory_pool(DEFAULT)
    assert WATCHED.max_memory() < 200e6


@pytest.mark.parametrize("kind", ["value", "dictionary"])
def test_tables_that_would_fill_the_memory_are_refused_before(tmp_path, kind):
    column = pa.array([bytes(2**28 + 1)])
    if kind == "dictionary":
        column = pa.DictionaryArray.from_arrays([0] * 300, [bytes(2**25)])
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"image": column}), path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 100_000
    with (
        little_memory(),
        pytest.raises(ValueError, match=r"a\.parquet .*: it would unpack to .* MiB, over 200"),
    ):
        open_source(str(path))


def test_one_large_image_in_many_rows_is_not_many_times_in_memory(tmp_path):
    column = pa.DictionaryArray.from_arrays([0] * 20, [os.urandom(2**24)])
    pq.write_table(pa.table({"image": column}), tmp_path / "a.parquet", store_schema=False)
    with little_memory():
        assert len(open_source(str(tmp_path / "a.parquet")).read(19)) == 2**24


def test_what_is_not_read_may_compress_as_it_likes(tmp_path):
    masks = pa.array([bytes(2**20)] * 300)
    table = pa.table({"image": pa.array([IMAGE] * 300), "mask": masks})
    pq.write_table(table, tmp_path / "a.parquet", compression="zstd", use_dictionary=False)
    assert open_source(str(tmp_path / "a.parquet")).read(299) == IMAGE


def test_memory_that_runs_out_is_not_called_damage(tmp_path):
    path = written(tmp_path / "a.parquet", {"image": pa.array([os.urandom(50_000_000)])})
    program = f"""
import re, resource
from pathlib import Path
import dino_vit.data.sources.tables.parquet
from dino_vit.data.sources.open import open_source
taken = int(re.search(r"VmData:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (taken + 40_000_000,) * 2)
try:
    open_source({path!r})
except MemoryError:
    print("none left")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.stdout == "none left\n", ended.stderr
