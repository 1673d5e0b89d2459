"""Embedding files that `dino-vit embed` did not write, or that were changed since, end in a sentence."""

import io
import json

import numpy as np
import pytest

from dino_vit.cli import main
from dino_vit.eval.embeddings import read_image_embeddings
from tests.support.embeddings import METADATA, write


def changed(path, **changes):
    """The metadata with some keys changed, or without those that are None."""
    metadata = {**METADATA, **changes}
    write(path, metadata={key: value for key, value in metadata.items() if value is not None})


def prepared(**changes):
    return {"preparation": {**METADATA["preparation"], **changes}}


@pytest.mark.parametrize("suffix", ["npy", "parquet", "safetensors"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"preparation": None}, "its metadata cannot be used: preparation is missing"),
        ({"source": None}, "source is missing"),
        ({"source": {"spec": 5}}, "source.spec = 5, but input should be a valid string"),
        ({"weights": {}}, "weights.path is missing"),
        ({"tokens": {"kind": "none", "blocks": 1}}, "tokens.kind = 'none', but"),
        ({"tokens": {"kind": "cls", "blocks": 2**64}}, "tokens.blocks = 18446744073709551616, but"),
        ({"precision": "int8"}, "precision = 'int8', but"),
        ({"format": 2}, "its format is 2, but this version of dino-vit reads format 1"),
        ({"format": None}, "format is missing"),
        (prepared(pixels={"channels": 0}), "pixels need 1 channel or more"),
        (prepared(mean=[0.5]), "mean and std need one value per channel (3)"),
        (prepared(std=[1, 0, 1]), "mean and std need one value per channel (3)"),
        (prepared(size=[2**40] * 2), "must be from 1 to 65,536 pixels"),
    ],
)
def test_metadata_that_is_missing_or_wrong_is_named(tmp_path, capsys, suffix, changes, message):
    path = tmp_path / f"e.{suffix}"
    changed(path, **changes)
    before = sorted(tmp_path.iterdir())
    assert main(["duplicates", str(path), "threshold=-0.9", f"output={tmp_path / 'd.json'}"]) == 2
    said = capsys.readouterr().err
    assert f"{path} is damaged or not an embedding file of `dino-vit embed`: its " in said
    assert message in said
    assert sorted(tmp_path.iterdir()) == before


def npy(shape="(4, 3)", descr="<f4", size=48):
    header = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}}}".encode().ljust(117) + b"\n"
    return b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header + bytes(size)


def saved(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (saved(np.float32(1)), r"its embeddings are <f4 of shape \(\)"),
        (saved(np.zeros((4, 3), "S4")), r"its embeddings are \|S4 of shape \(4, 3\)"),
        (saved(np.zeros((4, 3), ">f4")), r"its embeddings are >f4 of shape"),
        (saved(np.zeros(4, np.float32)), r"its embeddings are <f4 of shape \(4,\)"),
        (npy("(4, 3"), "its header is damaged: "),
        (npy("(" * 3000), "its header .* longer|its header is damaged: "),
        (npy(f"({2**40}, {2**40})"), "it ends after 48 of"),
        (npy(size=20), "it ends after 20 of 48 bytes"),
        (b"no array", "the magic string"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_arrays_that_are_no_embeddings_are_refused(tmp_path, content, message):
    write(tmp_path / "e.npy")
    (tmp_path / "e.npy").write_bytes(content)
    with pytest.raises(ValueError, match=rf"e\.npy is damaged .*: {message}") as refused:
        read_image_embeddings(str(tmp_path / "e.npy"))
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize("table", [b"name,index\na,0\n", b"name,label,index\n\xff,,0\n"])
def test_a_table_beside_an_array_that_lacks_a_column_or_is_no_text_is_refused(tmp_path, table):
    write(tmp_path / "e.npy")
    (tmp_path / "e.csv").write_bytes(table)
    with pytest.raises(ValueError, match=r"is damaged or not an embedding file of `dino-vit embed`$"):
        read_image_embeddings(str(tmp_path / "e.npy"))


def test_an_index_of_no_image_shows_no_image(tmp_path, capsys):
    """Counted from the end, it would show another image."""
    write(tmp_path / "e.npy")
    (tmp_path / "e.csv").write_text(f"name,label,index\na,,{-(10**9)}\nb,,{10**9}\nc,,0\nd,,1\n")
    argv = ["duplicates", str(tmp_path / "e.npy"), "threshold=-0.9", f"output={tmp_path / 'd.json'}"]
    assert main(argv) == 0
    assert json.loads((tmp_path / "d.json").read_text())["pair_count"] == 6
    assert (tmp_path / "d.png").exists()
