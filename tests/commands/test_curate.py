import json
import shutil
from dataclasses import asdict

import numpy as np
import pytest
import torch
from PIL import Image

import dino_vit
from dino_vit.cli import main
from dino_vit.commands.embeddings.curate import choose, cluster, default_clusters, share_alike
from dino_vit.commands.embeddings.embed import ImageEmbeddings
from dino_vit.data.sources.folders import open_folder
from dino_vit.eval.embeddings import Embeddings, read_embeddings, write_embeddings
from dino_vit.views.sampler import read_sampling_weights
from tests.support.embeddings import METADATA
from tests.support.images import write_synthetic

FINE = np.sort(np.random.default_rng(1).integers(0, 12, 90)) ** 2 // 20  # clusters of very different sizes
LEVELS = [np.unique(level, return_inverse=True)[1] for level in (FINE, FINE // 3)]
KINDS = np.repeat(np.arange(4), (400, 40, 40, 4))


@pytest.fixture
def values():
    """Embeddings around four directions, of which the last two are near each other."""
    random, directions = np.random.default_rng(0), np.eye(4, 8)
    directions[3] = directions[2] + 0.5 * directions[3]
    return (directions[KINDS] + 0.02 * random.standard_normal((len(KINDS), 8))).astype(np.float32)


def write(path, values, **metadata):
    names, labels = [f"{row}.png" for row in range(len(values))], [None] * len(values)
    metadata = {"shape": [8], **METADATA, **metadata}
    indices = np.arange(len(values))
    content = Embeddings(values=values, names=names, labels=labels, indices=indices, metadata=metadata)
    write_embeddings(path, content)
    return path


def returned(path):
    """Return embeddings as `embed` does, with tuples in the metadata where the file has lists."""
    embeddings = read_embeddings(path)
    metadata = {**embeddings.metadata, "transform": asdict(embeddings.transform)}
    return ImageEmbeddings(**vars(embeddings) | {"metadata": metadata}, path=None, text="")


def test_made_clusters_are_found_at_each_level(values):
    fine, coarse = cluster(values, [4, 3], device=torch.device("cpu"))
    assert len({*zip(fine.tolist(), KINDS.tolist(), strict=True)}) == 4
    together = np.array([0, 1, 2, 2])[KINDS].tolist()
    assert len({*zip(coarse.tolist(), together, strict=True)}) == 3
    assert default_clusters(743_000_000)[1:] == [502_027, 50_202, 10_040]  # of the paper's images
    assert (default_clusters(10_000), default_clusters(3)) == ([135, 6], [2])


def test_clusters_share_alike_at_each_level():
    def naive(members, depth):
        """Divide a share of 1 among images, from the last level down."""
        if depth < 0:
            return dict.fromkeys(members, 1 / len(members))
        shares, clusters = {}, {LEVELS[depth][member] for member in members}
        for number in clusters:
            below = naive([member for member in members if LEVELS[depth][member] == number], depth - 1)
            shares |= {member: share / len(clusters) for member, share in below.items()}
        return shares

    expected = naive(range(90), 1)
    np.testing.assert_allclose(share_alike(LEVELS), [expected[image] for image in range(90)], rtol=1e-12)


@pytest.mark.parametrize("keep", [1, 7, 40, 89, 90])
def test_clusters_keep_equally_many_as_far_as_they_can(keep):
    kept = choose(LEVELS, keep, np.random.default_rng(0)) > 0

    def check(members, depth):
        clusters = [members[LEVELS[depth][members] == number] for number in np.unique(LEVELS[depth][members])]
        most = max(kept[of_cluster].sum() for of_cluster in clusters)
        for of_cluster in clusters:
            assert kept[of_cluster].sum() >= min(most - 1, len(of_cluster))
            if depth:
                check(of_cluster, depth - 1)

    assert kept.sum() == keep
    check(np.arange(90), 1)


def test_a_training_reads_the_weights_of_a_folder(tmp_path, weights, capsys):
    photos, file, output = tmp_path / "photos", tmp_path / "e.parquet", tmp_path / "w.csv"
    for number in range(24):
        write_synthetic(photos / f'{number}, "{number % 3}" ü.png', number, size=24)
    shutil.copy(photos / '5, "2" ü.png', photos / "zz copy.png")
    (photos / "broken.png").write_bytes(b"no image")
    dino_vit.embed(photos, weights, output=file, cache=str(tmp_path / "cache"), verbose=False)
    given = ["curate", str(file), f"output={output}", "threshold=1", "clusters=[6,2]"]
    assert main([*given, "keep=1"]) == main(given) == 0
    assert "24 of 26 images to draw from" in capsys.readouterr().out
    source = open_folder(photos)
    read = read_sampling_weights(source, output)
    assert {source.name(row) for row in np.flatnonzero(read == 0)} == {"broken.png", "zz copy.png"}
    assert read.sum() == pytest.approx(24)
    levels = json.loads(output.with_suffix(".json").read_text())["levels"]
    assert [level["clusters"] for level in levels] == [6, 2]
    with Image.open(output.with_suffix(".png")) as sheet:
        assert sheet.width > sheet.height > 200
    (photos / "broken.png").unlink()
    assert main(given) == 0
    assert read_sampling_weights(open_folder(photos), output).sum() == pytest.approx(24)
    for name in ("broken.png", "new.png"):
        (photos / name).write_bytes(b"")
    with pytest.raises(ValueError, match=r"has no weight for 2 of 27 images, such as 'broken.png'"):
        read_sampling_weights(open_folder(photos), output)
    assert main(given) == 2, "one more than could not be read"
    assert "there is 1 image more than in" in capsys.readouterr().err


def test_rare_images_and_those_near_examples_are_drawn(tmp_path, values, capsys):
    photos = write(tmp_path / "e.parquet", values)
    given = {"threshold": None, "clusters": [4], "verbose": False}
    weighed = dino_vit.curate(photos, **given)
    assert np.bincount(KINDS, weighed.weights) == pytest.approx([121] * 4)
    kept = dino_vit.curate(photos, keep=34, **given)
    assert np.bincount(KINDS, kept.weights).tolist() == [10, 10, 10, 4]
    examples = write(tmp_path / "x.parquet", values[[405, 445]])
    like = dino_vit.curate(photos, like=examples, k=30, **given)
    cosines = values @ values[[405, 445]].T / np.linalg.norm(values, axis=1)[:, None]
    assert {*np.flatnonzero(like.weights)} == {*np.argsort(-cosines, axis=0)[:30].ravel()}
    same = dino_vit.curate(returned(photos), like=examples, k=30, **given)
    assert np.array_equal(same.weights, like.weights)
    other = write(tmp_path / "x.parquet", values, tokens={"kind": "mean", "blocks": 1})
    for setting, message in (
        ("output=w.txt", "must be FILE.csv"),
        ("keep=1000", "keep=1000 is more than the"),
        (f"like={other}", "was embedded with other weights or settings"),
    ):
        assert main(["curate", str(photos), setting]) == 2
        assert message in capsys.readouterr().err
