import json
import re
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

import dino_vit
from dino_vit import VisionTransformer, export_backbone, load_backbone, save_backbone
from dino_vit.cli import main
from dino_vit.data.sources.folders import open_folder
from dino_vit.data.sources.synthetic import make_textures
from dino_vit.eval.embeddings.duplicates import ClosestPairs, find_duplicates, splits_of_names, unite
from dino_vit.eval.embeddings.embed import Embeddings, embedded_panels, read_embeddings, write_embeddings
from dino_vit.models.backbone import FeatureSpec
from dino_vit.views.eval_transform import eval_transform_of
from tests.support.backbones import backbone, extracted
from tests.support.embeddings import METADATA
from tests.support.hub import offline, snapshot
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


@pytest.fixture
def embedded(tmp_path, weights, folder):
    """The file with the features of that folder."""
    embed(tmp_path, weights, folder, f"output={tmp_path / 'e.parquet'}")
    return tmp_path / "e.parquet"


def unit_rows(values):
    return values / np.linalg.norm(values, axis=1, keepdims=True)


def test_files_hold_the_features_of_the_backbone(weights, folder, embedded):
    found, source, model = read_embeddings(embedded), open_folder(folder), load_backbone(weights)
    expected = extracted(model, source).numpy()
    assert found.values.dtype == np.float32
    np.testing.assert_allclose(found.values, expected, rtol=1e-6, atol=1e-6)
    table = pq.read_table(embedded)
    assert table.column_names == ["name", "label", "index", "embedding"]
    assert np.array_equal(np.array(table["embedding"].to_pylist(), np.float32), found.values)
    assert found.indices.tolist() == [i for i in range(34) if source.name(i) != "a/broken.png"]
    assert found.names == [source.name(index) for index in found.indices.tolist()]
    assert found.labels == [name[0] if "/" in name else None for name in found.names]
    metadata = found.metadata
    assert metadata["weights"]["path"] == str(weights)
    assert metadata["weights"]["file_sha256"] == model.provenance.sha256
    assert metadata["source"] == {
        "spec": str(folder),
        "root": str(folder),
        "fingerprint": source.fingerprint,
        "images": 34,
        "unreadable": 1,
    }
    assert found.transform == eval_transform_of(model)
    assert (metadata["format"], metadata["precision"]) == (1, "float32")


def test_other_tokens(tmp_path, weights):
    model, source = load_backbone(weights), make_textures(length=9)
    for tokens, blocks in (("patches", 2), ("cls+mean", 2), ("mean", 1), ("all", 1)):
        output = tmp_path / "e.parquet"
        embed(tmp_path, weights, "synthetic:9:32", f"output={output}", f"tokens={tokens}", f"blocks={blocks}")
        expected = extracted(model, source, spec=FeatureSpec(tokens=tokens, blocks=blocks)).numpy()
        assert np.array_equal(read_embeddings(output).values, expected)


def test_search_finds_the_nearest_other_images(tmp_path, folder, embedded):
    queries = [str(folder / "c" / "05.png"), str(folder / "30.png")]
    settings = ["k=3", f"output={tmp_path / 'found.png'}"]
    assert main(["search", str(embedded), *queries, *settings]) == 0
    results = json.loads((tmp_path / "found.json").read_text())["results"]
    assert [result["image"] for result in results] == queries
    assert results[0]["nearest"][0]["name"] == "c/05 $x$ ünï.png"  # a copy
    embeddings = read_embeddings(embedded)
    unit = unit_rows(embeddings.values)
    for result, name in zip(results, ("c/05.png", "30.png"), strict=True):
        cosines = unit @ unit[embeddings.names.index(name)]
        others = np.delete(cosines, embeddings.names.index(name))
        expected = pytest.approx(np.sort(others)[::-1][:3].tolist(), abs=1e-5)
        assert [near["cosine"] for near in result["nearest"]] == expected
        assert [cosines[near["row"]] for near in result["nearest"]] == expected
    with Image.open(tmp_path / "found.png") as sheet:
        assert sheet.width > sheet.height > 200


def test_an_image_is_not_found_by_itself_however_it_was_embedded(tmp_path, weights, folder, monkeypatch):
    (tmp_path / "list.txt").write_text(f"{folder / '30.png'}\n{folder / 'c' / '05.png'}\n")
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    specs = tmp_path / "list.txt", "list.txt", folder / "**" / "*.png", tmp_path / "link"
    for number, spec in enumerate(specs):
        file = tmp_path / f"{number}.parquet"
        embed(tmp_path, weights, spec, f"output={file}")
        (nearest,) = dino_vit.search(file, [folder / "30.png"], k=1, verbose=False).nearest
        assert not nearest[0].name.endswith("30.png"), spec


def test_images_are_shown_where_others_came_since(folder, embedded):
    embeddings = read_embeddings(embedded)
    captions = [(row, "") for row in range(4)]
    before = embedded_panels(embeddings, captions)
    write_synthetic(folder / "a" / "0 first.png", 99)
    after = embedded_panels(embeddings, captions)
    assert all(
        torch.equal(shown, as_before) for (shown, _), (as_before, _) in zip(after, before, strict=True)
    )


def test_search_needs_the_weights_of_the_embeddings(tmp_path, weights, folder, embedded, capsys):
    queries = ["search", str(embedded), str(folder / "30.png"), f"output={tmp_path / 'found.png'}"]
    moved = weights.rename(tmp_path / "moved.safetensors")
    assert main(queries) == 2
    assert "give their new path with weights=" in capsys.readouterr().err
    other = VisionTransformer(image_size=16, patch_size=4, width=32, depth=2, heads=2)
    save_backbone(other, weights)
    assert main(queries) == 2
    assert "are not the weights that computed the embeddings" in capsys.readouterr().err
    assert not (tmp_path / "found.png").exists()
    assert main([*queries, f"weights={moved}"]) == 0


def test_search_works_without_the_images(tmp_path, folder, embedded, caplog):
    shutil.move(folder / "30.png", tmp_path / "30.png")
    shutil.rmtree(folder)
    queries = [str(embedded), str(tmp_path / "30.png"), "k=100", f"output={tmp_path / 'found.png'}"]
    assert main(["search", *queries]) == 0
    assert "the sheet does not show" in caplog.text
    assert len(json.loads((tmp_path / "found.json").read_text())["results"][0]["nearest"]) == 33


@pytest.mark.parametrize("threshold", [0.5, 0.9, 1.0])
@pytest.mark.parametrize("block", [16, 1000])
def test_duplicates_are_those_of_two_loops(monkeypatch, threshold, block):
    monkeypatch.setattr("dino_vit.eval.embeddings.duplicates._BLOCK", block)
    generator = np.random.default_rng(0)
    values = generator.standard_normal((60, 6)).astype(np.float32)
    values[[7, 40, 41]] = 3 * values[2]
    values[55] = values[20] + 0.05 * generator.standard_normal(6)
    labels = [None if i == 40 else "ab"[i % 2] for i in range(60)]
    kinds = every, few, conflicts = ClosestPairs(1000), ClosestPairs(3), ClosestPairs(1000, labels)
    groups = find_duplicates(values, threshold, kinds, device=torch.device("cpu"))
    closest = every.closest()
    unit = values / np.linalg.norm(values, axis=1, keepdims=True)
    linked = {i: {i} for i in range(60)}
    pairs = {}
    for i in range(60):
        for j in range(i + 1, 60):
            cosine = float(unit[i].astype(np.float64) @ unit[j])
            if cosine >= threshold - 1e-6:
                pairs[i, j] = cosine
                together = linked[i] | linked[j]
                for member in together:
                    linked[member] = together
    assert {(a, b): cosine for a, b, cosine in closest} == pytest.approx(pairs, abs=1e-6)
    assert every.total == few.total == len(pairs) >= 6
    cosines = [cosine for _, _, cosine in closest]
    assert cosines == sorted(cosines, reverse=True)
    expected = {tuple(sorted(group)) for group in linked.values() if len(group) > 1}
    assert {tuple(group) for group in groups} == expected
    assert few.closest() == closest[:3]
    differing = [pair for pair in closest if 40 not in pair[:2] and (pair[0] - pair[1]) % 2]
    assert conflicts.closest() == differing
    assert conflicts.total == len(differing) >= 2


def test_labels_in_another_order_are_no_other_labels():
    pairs = ClosestPairs(9, ["sea;sky", "sky;sea", "sea"])
    pairs.add(np.array([[0, 1], [0, 2]]), np.ones(2, np.float32))
    assert pairs.closest() == [(0, 2, 1.0)]


def test_chains_are_linked_in_whatever_order():
    order = np.random.default_rng(0).permutation(499)
    parents = np.arange(500)
    for part in np.array_split(order, 7):
        unite(parents, np.stack([part, part + 1], 1))
    roots = parents.copy()
    while (roots != parents[roots]).any():
        roots = parents[roots]
    assert (roots == 0).all()


def test_the_duplicates_of_a_folder_are_listed(tmp_path, embedded, capsys):
    argv = ["duplicates", str(embedded), f"output={tmp_path / 'd.json'}"]
    assert main([*argv, "threshold=1"]) == 0
    expected = {("a/00.png", "b/again, 00.png"), ("c/05 $x$ ünï.png", "c/05.png")}
    out = capsys.readouterr().out
    assert out.startswith(
        "2 pairs in 2 groups, among 33 images\nthreshold=1, as given\n"
        "different labels, perhaps of one image: 1 pair\n  1.0000  a/00.png (a)  b/again, 00.png (b)\n"
    )
    assert "different splits" not in out
    listed = json.loads((tmp_path / "d.json").read_text())
    assert {tuple(pair["images"]) for pair in listed["pairs"]} == expected
    assert {tuple(group) for group in listed["groups"]} == expected
    assert listed["pair_count"] == 2
    (conflict,) = listed["label_conflicts"]["pairs"]
    assert conflict["labels"] == ["a", "b"]
    with (
        Image.open(tmp_path / "d.png") as all_pairs,
        Image.open(tmp_path / "d-label-conflicts.png") as conflicts,
    ):
        assert all_pairs.width > conflicts.width > 300
    assert not (tmp_path / "d-split-leaks.png").exists()


def test_test_images_among_those_to_learn_from_are_found(tmp_path, weights, folder):
    shutil.copytree(folder, tmp_path / "photos" / "train")
    for name in ("a/00.png", "c/05.png"):  # the first is in train under two labels
        (tmp_path / "photos" / "test" / name).parent.mkdir(parents=True)
        shutil.copy(folder / name, tmp_path / "photos" / "test" / name)
    embed(tmp_path, weights, tmp_path / "photos", f"output={tmp_path / 'e.parquet'}")
    found = dino_vit.duplicates(
        tmp_path / "e.parquet", threshold=1, output=tmp_path / "d.json", verbose=False
    )
    assert found.pairs.total == 3 + 3
    assert {pair.images for pair in found.split_leaks.closest} == {
        ("test/a/00.png", "train/a/00.png"),
        ("test/a/00.png", "train/b/again, 00.png"),
        ("test/c/05.png", "train/c/05 $x$ ünï.png"),
        ("test/c/05.png", "train/c/05.png"),
    }
    assert all(pair.splits == ("test", "train") for pair in found.split_leaks.closest)
    assert found.label_conflicts.total == 2
    assert found.split_leaks.sheet == tmp_path / "d-split-leaks.png"
    embed(tmp_path, weights, tmp_path / "photos" / "train", f"output={tmp_path / 'e.parquet'}")
    again = dino_vit.duplicates(tmp_path / "e.parquet", threshold=1, verbose=False)
    assert again.split_leaks == ([], 0, None)


def test_splits_are_found_whatever_the_order_of_the_images(tmp_path):
    """As in embeddings of a data set in Python, which come in its own order."""
    values, path = np.eye(6, dtype=np.float32)[[0, 1, 2, 0, 2, 1]], tmp_path / "e.parquet"
    names = ["train/a", "test/b", "train/c", "test/d", "train/e", "train/f"]
    metadata, labels = {"shape": [6], **METADATA}, [None] * 6
    rows = {"values": values, "names": names, "labels": labels, "indices": np.arange(6)}
    write_embeddings(path, Embeddings(**rows, metadata=metadata))
    found = dino_vit.duplicates(path, threshold=1, verbose=False)
    splits = {pair.images: pair.splits for pair in found.split_leaks.closest}
    assert splits == {("train/a", "test/d"): ("train", "test"), ("test/b", "train/f"): ("test", "train")}
    assert splits_of_names(["train/a", "test/b", "bus/c"]) == [None] * 3


def test_a_threshold_that_nearly_all_images_pass_is_said(embedded):
    loose = dino_vit.duplicates(embedded, threshold=-0.99, verbose=False)
    higher = float(re.search(r"more pairs than images: .* threshold=([\d.]+) would", loose.text)[1])
    found = dino_vit.duplicates(embedded, threshold=higher, verbose=False)
    assert found.pairs.total == pytest.approx(33 / 10, abs=2)
    assert "more pairs than images" not in found.text
    few = dino_vit.duplicates(embedded, threshold=-0.99, pairs=3, verbose=False)
    assert "more pairs than images" in few.text, "though fewer are listed than a set usually has"


def test_mistakes_are_explained_and_leave_nothing(tmp_path, weights, folder, capsys):
    (tmp_path / "empty").mkdir()
    embed(tmp_path, weights, "synthetic:5:32", f"output={tmp_path / 'patches.parquet'}", "tokens=patches")
    before = sorted(tmp_path.iterdir())
    common = [f"weights={weights}", f"cache={tmp_path / 'cache'}", "output=e.parquet"]
    for argv, message in (
        (["embed", folder, *common, "weights=none.pth"], "none.pth does not exist"),
        (["embed", folder, *common, "output=e.txt"], "must be FILE.parquet"),
        (["embed", tmp_path / "empty", *common], "empty"),
        (["embed", folder, *common, "size=18"], "18"),
        (["search", "none.parquet", "x.png"], "`dino-vit embed SOURCE WEIGHTS"),
        (
            ["search", tmp_path / "patches.parquet", "x.png"],
            "has several tokens of each image, but needs one: embed with tokens=cls",
        ),
        (["search", "none.parquet", "x.png", "output=x.jpg"], "must be FILE.png"),
        (["duplicates", "none.parquet"], "does not exist"),
        (["duplicates", "none.parquet", "output=x.txt"], "must be FILE.json"),
    ):
        assert main(list(map(str, argv))) == 2, argv
        assert message in capsys.readouterr().err, argv
    assert sorted(tmp_path.iterdir()) == before


def test_weights_of_a_name_are_found_again_by_it(tmp_path, folder, monkeypatch, capsys):
    offline(tmp_path / "hub", monkeypatch)
    exported = snapshot(tmp_path / "hub", "owner/name")
    export_backbone(backbone(), tmp_path / "vit", "huggingface")
    shutil.copytree(tmp_path / "vit", exported, dirs_exist_ok=True)
    embed(tmp_path, "hf:owner/name", folder, f"output={tmp_path / 'e.parquet'}")
    assert read_embeddings(tmp_path / "e.parquet").metadata["weights"]["path"] == "hf:owner/name"
    found = ["search", str(tmp_path / "e.parquet"), str(folder / "a" / "00.png")]
    assert main([*found, f"output={tmp_path / 'f.png'}"]) == 0
    assert "1.0000  b/again, 00.png" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "hub")
    assert main(found) == 2
    assert "hf:owner/name could not be fetched" in (said := capsys.readouterr().err)
    assert "If they were moved, give their new path with weights=" in said


@pytest.mark.parametrize(
    "command",
    [
        "embed synthetic:40:16",
        "attention synthetic:2:16",
        "attention moving.gif",
    ],
)
def test_features_that_are_not_finite_are_refused(tmp_path, capsys, command, monkeypatch):
    """Though the weights are."""
    monkeypatch.chdir(tmp_path)
    model = VisionTransformer(image_size=16, patch_size=4, width=32, depth=1, heads=2)
    with torch.no_grad():
        model.blocks[0].attn.qkv.weight.fill_(1e30)
    save_backbone(model, tmp_path / "overflows.safetensors", mean=(0.5,) * 3, std=(0.5,) * 3)
    frames = [Image.new("L", (16, 16), level) for level in (0, 200)]
    frames[0].save("moving.gif", save_all=True, append_images=frames[1:])
    assert main([*command.split(), "weights=overflows.safetensors"]) == 2
    assert "overflows.safetensors gives features that are NaN or infinite" in capsys.readouterr().err


def test_an_image_to_search_for_whose_features_are_not_finite_is_refused(tmp_path, capsys):
    model = VisionTransformer(image_size=16, patch_size=4, width=32, depth=1, heads=2)
    with torch.no_grad():
        model.patch_embed.proj.weight.fill_(1e38)
    save_backbone(model, tmp_path / "w.safetensors", mean=(0.0,) * 3, std=(1.0,) * 3)  # black is 0
    black, white = tmp_path / "black.png", tmp_path / "white.png"
    Image.new("RGB", (16, 16)).save(black)
    Image.new("RGB", (16, 16), "white").save(white)
    (tmp_path / "list.txt").write_text(str(black))
    embed(tmp_path, tmp_path / "w.safetensors", tmp_path / "list.txt", f"output={tmp_path / 'e.parquet'}")
    given = ["search", str(tmp_path / "e.parquet"), f"output={tmp_path / 's.png'}"]
    assert main([*given, str(white)]) == 2
    assert "gives features that are NaN or infinite" in capsys.readouterr().err
    assert main([*given, str(black)]) == 0
