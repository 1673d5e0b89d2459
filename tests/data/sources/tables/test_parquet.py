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
