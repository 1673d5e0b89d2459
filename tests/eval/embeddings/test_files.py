"""Embedding files that `dino-vit embed` did not write, or that were changed since, end in a sentence."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dino_vit.eval.embeddings.embed import read_embeddings
from tests.support.embeddings import METADATA, write

DAMAGED = "damaged or not an embedding file of `dino-vit embed`"


def test_files_of_others_and_files_that_were_cut_off_are_named(tmp_path):
    path = tmp_path / "e.parquet"
    write(path)
    whole = path.read_bytes()
    pq.write_table(pa.table({"name": ["a"], "embedding": [[1.0]]}), path)
    for content in (b"something else", whole[:-20], path.read_bytes()):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=DAMAGED):
            read_embeddings(path)


@pytest.mark.parametrize("lost", ["source", "transform"])
def test_metadata_that_lacks_what_commands_need_is_noticed(tmp_path, lost):
    write(tmp_path / "e.parquet", metadata={name: METADATA[name] for name in METADATA if name != lost})
    with pytest.raises(ValueError, match=f"{DAMAGED}$"):
        read_embeddings(tmp_path / "e.parquet")
