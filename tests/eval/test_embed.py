import json
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from pydantic import TypeAdapter

from dino_vit import VisionTransformer, load_backbone, save_backbone
from dino_vit.cli import main
from dino_vit.data.stores.files import open_folder
from dino_vit.views.eval_transform import EvalTransform, eval_transform_of
from tests.support.backbones import extracted
from tests.support.images import write_synthetic


@pytest.fixture
def folder(tmp_path):
    """Thirty images in three folders and one outside; two are there twice, one is broken."""
    root = tmp_path / "images"
    for number in range(31):
        label = "abc"[number % 3] if number < 30 else ""
        write_synthetic(root / label / f"{number:02}.png", number, size=40)
    shutil.copy(root / "a" / "00.png", root / "b" / "again, 00.png")
    shutil.copy(root / "c" / "05.png", root / "c" / "05 $x$ ünï.png")
    (root / "a" / "broken.png").write_bytes(b"no image")
    return root


def embed(tmp_path, weights, source, *more):
    settings = [f"weights={weights}", f"cache={tmp_path / 'cache'}", "precision=no", "overwrite=true"]
    assert main(["embed", str(source), *settings, *more]) == 0


def read(path):
    """Return the columns of an embedding file, its features as an array, and its metadata."""
    table = pq.read_table(path)
    metadata = json.loads(table.schema.metadata[b"dino_vit"])
    values = np.array(table["embedding"].to_pylist(), np.float32)
    return table.to_pydict(), values.reshape(-1, *metadata["shape"]), metadata


def test_files_hold_the_features_of_the_backbone(tmp_path, weights, folder):
    embed(tmp_path, weights, folder, f"output={tmp_path / 'e.parquet'}")
    (columns, values, metadata), source, model = (
        read(tmp_path / "e.parquet"),
        open_folder(folder),
        load_backbone(weights),
    )
    np.testing.assert_allclose(values, extracted(model, source).numpy(), rtol=1e-6, atol=1e-6)
    assert list(columns) == ["name", "label", "index", "embedding"]
    assert columns["index"] == [i for i in range(34) if source.name(i) != "a/broken.png"]
    assert columns["name"] == [source.name(index) for index in columns["index"]]
    assert columns["label"] == [name[0] if "/" in name else None for name in columns["name"]]
    assert metadata["weights"]["path"] == str(weights)
    assert metadata["weights"]["file_sha256"] == model.provenance.sha256
    assert metadata["source"] == {
        "spec": str(folder),
        "root": str(folder),
        "fingerprint": source.fingerprint,
        "images": 34,
        "unreadable": 1,
    }
    assert TypeAdapter(EvalTransform).validate_python(metadata["transform"]) == eval_transform_of(model)
    assert (metadata["format"], metadata["precision"]) == (1, "float32")


def test_levelled_embeddings_of_two_backbones_are_fitted_on_the_images_themselves(tmp_path, weights):
    settings = f"output={tmp_path / 'e.parquet'}", "tokens=cls+cells", "whiten=1"
    embed(tmp_path, f"{weights}+pixels", "synthetic:9:32", *settings)
    _, values, metadata = read(tmp_path / "e.parquet")
    parts = values[:, :32], values[:, 32 : 10 * 32], values[:, 10 * 32 :]
    for part in parts:
        assert np.linalg.norm(part, axis=1) == pytest.approx(1, rel=1e-5)
        assert (np.abs(np.corrcoef(part) + 1 / 8)[~np.eye(9, dtype=bool)] < 0.1).all(), "whitened"
    assert (metadata["whiten"], len(metadata["beside"])) == (1, 1)


def test_mistakes_are_explained_and_leave_nothing(tmp_path, weights, folder, capsys):
    (tmp_path / "empty").mkdir()
    before = sorted(tmp_path.iterdir())
    common = [f"weights={weights}", f"cache={tmp_path / 'cache'}", "output=e.parquet"]
    for argv, message in (
        (["embed", folder, *common, "weights=none.pth"], "none.pth does not exist"),
        (["embed", folder, *common, "output=e.txt"], "must be FILE.parquet"),
        (["embed", tmp_path / "empty", *common], "empty"),
        (["embed", folder, *common, "size=18"], "18"),
        (["embed", folder, *common, "tokens=patches", "whiten=1"], "one vector an image"),
        (["embed", folder, *common, f"weights={weights}+none.pth"], "none.pth does not exist"),
    ):
        assert main(list(map(str, argv))) == 2, argv
        assert message in capsys.readouterr().err, argv
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("command", ["embed synthetic:40:16", "attention synthetic:2:16"])
def test_features_that_are_not_finite_are_refused(tmp_path, capsys, command, monkeypatch):
    """Though the weights are."""
    monkeypatch.chdir(tmp_path)
    model = VisionTransformer(image_size=16, patch_size=4, width=32, depth=1, heads=2)
    with torch.no_grad():
        model.blocks[0].attn.qkv.weight.fill_(1e30)
    save_backbone(model, tmp_path / "overflows.safetensors", mean=(0.5,) * 3, std=(0.5,) * 3)
    assert main([*command.split(), "weights=overflows.safetensors"]) == 2
    assert "overflows.safetensors gives features that are NaN or infinite" in capsys.readouterr().err
