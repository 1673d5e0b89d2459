"""Embedding files that `dino-vit embed` did not write, or that were changed since, end in a sentence."""

import json

import numpy as np
import pytest
import torch

from dino_vit.eval.embeddings import read_embeddings
from tests.support.embeddings import METADATA, write

DAMAGED = "damaged or not an embedding file of `dino-vit embed`"


@pytest.mark.parametrize("suffix", ["npy", "parquet"])
def test_files_of_a_later_format_and_of_others_are_named(tmp_path, suffix):
    path = tmp_path / f"e.{suffix}"
    write(path, metadata={**METADATA, "format": 2})
    with pytest.raises(ValueError, match=f"{DAMAGED}: its format is 2, but this version of dino-vit reads"):
        read_embeddings(path)
    path.write_bytes(b"something else")
    with pytest.raises(ValueError, match=DAMAGED):
        read_embeddings(path)


def test_a_table_that_was_changed_beside_its_array_is_noticed(tmp_path):
    write(tmp_path / "e.npy")
    (tmp_path / "e.csv").write_text("name,label,index\na,,0\n")
    with pytest.raises(ValueError, match=f"{DAMAGED}: it has 4 embeddings, but 1 names"):
        read_embeddings(tmp_path / "e.npy")
    (tmp_path / "e.csv").write_text("name,index\na,0\n")
    with pytest.raises(ValueError, match=f"{DAMAGED}$"):
        read_embeddings(tmp_path / "e.npy")


@pytest.mark.parametrize("lost", ["source", "transform"])
def test_metadata_that_lacks_what_commands_need_is_noticed(tmp_path, lost):
    write(tmp_path / "e.parquet", metadata={name: METADATA[name] for name in METADATA if name != lost})
    with pytest.raises(ValueError, match=f"{DAMAGED}$"):
        read_embeddings(tmp_path / "e.parquet")


def test_an_array_that_was_cut_off_is_noticed(tmp_path):
    write(tmp_path / "e.npy")
    (tmp_path / "e.npy").write_bytes((tmp_path / "e.npy").read_bytes()[:-20])
    with pytest.raises(ValueError, match=DAMAGED):
        read_embeddings(tmp_path / "e.npy")


def test_files_of_earlier_versions_are_read(tmp_path):
    write(tmp_path / "e.npy")
    metadata = json.loads((tmp_path / "e.json").read_text())
    metadata["preparation"] = metadata.pop("transform")
    (tmp_path / "e.json").write_text(json.dumps(metadata))
    embeddings = read_embeddings(tmp_path / "e.npy")
    assert (embeddings.transform.size, embeddings.transform.pixels.dtype) == ((16, 16), torch.uint8)
    assert np.array_equal(embeddings.indices, np.arange(4))
