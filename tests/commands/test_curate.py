import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

import dino_vit
from dino_vit.cli import main
from dino_vit.commands.embeddings.curate import choose, cluster, default_clusters, share_alike
from dino_vit.data.sources.open import FolderSource
from dino_vit.eval.embeddings import Embeddings, write_embeddings
from dino_vit.views.sampler import read_sampling_weights
from tests.support.embeddings import METADATA
from tests.support.images import write_synthetic

CPU = torch.device("cpu")
SIZES = (400, 40, 40, 4)  # images around each of four directions; the last two are near each other


def directions(sizes=SIZES, seed=0):
    """Return embeddings around some directions, and the direction of each."""
    generator = np.random.default_rng(seed)
    centers = np.eye(len(sizes), 8)
    centers[-1] = centers[-2] + 0.5 * centers[-1]
    kinds = np.repeat(np.arange(len(sizes)), sizes)
    return (centers[kinds] + 0.02 * generator.standard_normal((len(kinds), 8))).astype(np.float32), kinds


def write(path, values, **metadata):
    names = [f"{row}.png" for row in range(len(values))]
    content = {"shape": [8], **METADATA, **metadata}
    indices, labels = np.arange(len(values)), [None] * len(values)
    embeddings = Embeddings(values=values, names=names, labels=labels, indices=indices, metadata=content)
    write_embeddings(path, embeddings)
    return path


def test_made_clusters_are_found_at_each_level():
    values, kinds = directions()
    fine, coarse = cluster(values, [4, 3], seed=0, device=CPU)
    assert len({*zip(fine.tolist(), kinds.tolist(), strict=True)}) == 4
    together = np.array([0, 1, 2, 2])[kinds]
    assert len({*zip(coarse.tolist(), together.tolist(), strict=True)}) == 3
    few = cluster(values[:5], [9, 2], seed=0, device=CPU)
    assert [level.max() < most for level, most in zip(few, (5, 2), strict=True)] == [True, True]


def test_levels_are_as_published():
    assert default_clusters(743_000_000)[1:] == [502_027, 50_202, 10_040]
    assert default_clusters(10_000) == [135, 6]
    assert default_clusters(3) == [2]


def random_levels():
    generator = np.random.default_rng(1)
    fine = np.unique(generator.integers(0, 12, 90) ** 2 // 12, return_inverse=True)[1]
    return [fine, np.arange(fine.max() + 1)[fine] // 3]


def test_clusters_share_alike_at_each_level():
    levels = random_levels()

    def naive(members, depth):
        """Divide a share of 1 among images, from the last level down."""
        if depth < 0:
            return dict.fromkeys(members, 1 / len(members))
        shares, clusters = {}, {levels[depth][member] for member in members}
        for number in clusters:
            below = naive([member for member in members if levels[depth][member] == number], depth - 1)
            shares |= {member: share / len(clusters) for member, share in below.items()}
        return shares

    expected = naive(range(90), 1)
    np.testing.assert_allclose(share_alike(levels), [expected[image] for image in range(90)], rtol=1e-12)


@pytest.mark.parametrize("keep", [1, 7, 40, 89, 90])
def test_clusters_keep_equally_many_as_far_as_they_can(keep):
    levels = random_levels()
    kept = choose(levels, keep, np.random.default_rng(0)) > 0
    assert kept.sum() == keep

    def check(members, depth):
        if depth < 0:
            return
        clusters = [members[levels[depth][members] == number] for number in np.unique(levels[depth][members])]
        most = max(kept[of_cluster].sum() for of_cluster in clusters)
        for of_cluster in clusters:
            assert kept[of_cluster].sum() >= min(most - 1, len(of_cluster))
            check(of_cluster, depth - 1)

    check(np.arange(90), 1)


def test_a_training_reads_the_weights_of_a_folder(tmp_path, weights, capsys):
    for number in range(24):
        write_synthetic(tmp_path / "photos" / f'{number}, "{number % 3}" ü.png', number, size=24)
    shutil.copy(tmp_path / "photos" / '5, "2" ü.png', tmp_path / "photos" / "zz copy.png")
    (tmp_path / "photos" / "broken.png").write_bytes(b"no image")
    file, output = tmp_path / "e.parquet", tmp_path / "w.csv"
    dino_vit.embed(tmp_path / "photos", weights, output=file, cache=str(tmp_path / "cache"), verbose=False)
    assert main(["curate", str(file), f"output={output}", "threshold=1", "clusters=[6,2]"]) == 0
    assert "24 of 26 images to draw from" in capsys.readouterr().out
    source = FolderSource(tmp_path / "photos")
    read = read_sampling_weights(source, output)
    never = {source.name(index) for index in np.flatnonzero(read == 0)}
    assert never == {"broken.png", "zz copy.png"}
    assert read.sum() == pytest.approx(24, rel=1e-4)
    assert [level["clusters"] for level in json.loads(output.with_suffix(".json").read_text())["levels"]] == [
        6,
        2,
    ]
    with Image.open(output.with_suffix(".png")) as sheet:
        assert sheet.width > sheet.height > 200
    (tmp_path / "photos" / "new.png").write_bytes(b"")
    with pytest.raises(ValueError, match=r"has no weight for 1 of 27 images, such as 'new.png'"):
        read_sampling_weights(FolderSource(tmp_path / "photos"), output)


def test_rare_images_are_drawn_as_often_as_frequent_ones(tmp_path):
    values, kinds = directions()
    result = dino_vit.curate(
        write(tmp_path / "e.parquet", values), clusters=[4], threshold=None, verbose=False
    )
    shares = np.bincount(kinds, result.weights) / result.weights.sum()
    assert shares == pytest.approx([0.25] * 4)
    assert result.path is None
    kept = dino_vit.curate(tmp_path / "e.parquet", clusters=[4], threshold=None, keep=34, verbose=False)
    assert np.bincount(kinds, kept.weights).tolist() == [10, 10, 10, 4]


def test_only_images_near_examples_are_drawn(tmp_path):
    values, kinds = directions()
    photos, examples = (
        write(tmp_path / "e.parquet", values),
        write(tmp_path / "x.parquet", values[[405, 445]]),
    )
    result = dino_vit.curate(photos, like=examples, k=30, threshold=None, verbose=False)
    cosines = values @ values[[405, 445]].T / np.linalg.norm(values, axis=1)[:, None]
    nearest = set(np.argsort(-cosines, axis=0)[:30].ravel().tolist())
    assert set(np.flatnonzero(result.weights).tolist()) == nearest
    assert set(kinds[result.weights > 0].tolist()) == {1, 2}


def test_mistakes_are_explained(tmp_path, capsys):
    values, _ = directions()
    photos = write(tmp_path / "e.parquet", values)
    other = write(tmp_path / "x.parquet", values, tokens={"kind": "mean", "blocks": 1})
    for argv, message in (
        (["output=w.txt"], "must end in .csv"),
        (["keep=1000", "threshold=null"], "keep=1000 is more than the 484 images to choose from"),
        ([f"like={other}"], "was embedded with other weights or settings"),
        (["clusters=[3,5]"], "clusters=[3, 5] must fall from level to level"),
    ):
        assert main(["curate", str(photos), *argv]) == 2, argv
        assert message in capsys.readouterr().err, argv
