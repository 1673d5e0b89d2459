import json

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
    source = open_source(written(tmp_path / "a.parquet", columns, features))
    assert (source.read(0), source.classes) == (IMAGE, ["cat"])


def test_tables_without_images_say_what_they_have_on_one_line(tmp_path):
    names = {f"a\n{number}": pa.array([[1]]) for number in range(1000)}
    with pytest.raises(ValueError, match=r"has no column of images: none of a\\n0 \(list") as caught:
        open_source(written(tmp_path / "a.parquet", names))
    assert len(str(caught.value)) < 1000


def test_one_image_a_thousand_times_does_not_fill_the_disk(tmp_path):
    path = written(tmp_path / "a.parquet", {"image": pa.array([bytes(2**20)] * 1000)})
    with pytest.raises(ValueError, match=r"a\.parquet cannot be read: it would unpack to .* MiB, over 200"):
        open_source(path)
