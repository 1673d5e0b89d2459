"""Label propagation and the measures of DAVIS, against plain loops and a made video."""

import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from eval import davis
from eval.davis import (
    DavisConfig,
    boundaries,
    boundary_accuracy,
    propagate_labels,
    region_similarity,
    run,
)


def blobs(number, height, width, seed):
    """Masks of free shape: smooth noise above a level."""
    noise = torch.randn(number, 1, height, width, generator=torch.Generator().manual_seed(seed))
    return F.avg_pool2d(noise, 9, 1, 4)[:, 0] > 0.1


def naive_boundary(mask):
    """Return the pixels that differ from the one to the right, below or across, as DAVIS' code has it."""
    height, width = mask.shape
    points = []
    for y in range(height):
        for x in range(width):
            others = [(y, x + 1), (y + 1, x), (y + 1, x + 1)]
            if y == height - 1:
                others = [(y, x + 1)]
            if x == width - 1:
                others = [(y + 1, x)]
            if any(v < height and u < width and mask[v, u] != mask[y, x] for v, u in others):
                points.append((y, x))
    return points


def naive_boundary_accuracy(predicted, true):
    radius = math.ceil(0.008 * math.hypot(*true.shape))
    ours, theirs = naive_boundary(predicted), naive_boundary(true)

    def share(points, others):
        near = [any(math.dist(point, other) <= radius for other in others) for point in points]
        return sum(near) / len(near) if near else 1.0

    precision, recall = share(ours, theirs), share(theirs, ours)
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


@pytest.mark.parametrize("size", [(40, 61), (30, 200)])
def test_the_measures_are_those_of_naive_loops(size):
    predicted, true = blobs(5, *size, seed=0), blobs(5, *size, seed=1)
    true[3] = predicted[3].roll(1, dims=1)
    predicted[4] = true[4]
    j, f = region_similarity(predicted, true), boundary_accuracy(predicted, true)
    for row, (ours, theirs) in enumerate(zip(predicted.numpy(), true.numpy(), strict=True)):
        assert j[row].item() == pytest.approx((ours & theirs).sum() / (ours | theirs).sum())
        assert f[row].item() == pytest.approx(naive_boundary_accuracy(ours, theirs))
        marked = zip(*np.nonzero(boundaries(predicted)[row].numpy()), strict=True)
        assert set(marked) == set(naive_boundary(ours))
    assert j[4] == f[4] == 1
    assert f[:3].max() < 0.95


def test_empty_masks_count_as_davis_counts_them():
    none, some = torch.zeros(1, 20, 20, dtype=torch.bool), blobs(1, 20, 20, seed=0)
    for measure in (region_similarity, boundary_accuracy):
        assert measure(none, none) == 1
        assert measure(none, some) == measure(some, none) == 0


def naive_labels(target, frames, labels, radius, k, temperature):
    """Label one patch after the other, as the published code does with matrices of all patches."""
    height, width, _ = target.shape
    result = torch.zeros(len(labels[0]), height, width)
    for y in range(height):
        for x in range(width):
            near = [
                (float(target[y, x] @ frame[v, u]), label[:, v, u])
                for frame, label in zip(frames, labels, strict=True)
                for v in range(height)
                for u in range(width)
                if not radius or (abs(v - y) <= radius and abs(u - x) <= radius)
            ]
            kth = sorted((cosine for cosine, _ in near), reverse=True)[min(k, len(near)) - 1]
            kept = [(math.exp(cosine / temperature), label) for cosine, label in near if cosine >= kth]
            result[:, y, x] = sum(weight * label for weight, label in kept) / sum(w for w, _ in kept)
    return result


@pytest.mark.parametrize(
    ("size", "radius", "k", "cosines"),
    [((9, 7), 2, 5, 1 << 23), ((6, 6), 50, 3, 40), ((4, 5), 0, 5, 1 << 23), ((2, 1), 1, 9, 99)],
    ids=["window", "everywhere, in small blocks", "no radius", "fewer than k"],
)
def test_labels_are_those_of_a_naive_loop(size, radius, k, cosines, monkeypatch):
    monkeypatch.setattr(davis, "COSINES", cosines)
    generator = torch.Generator().manual_seed(0)
    target, *frames = F.normalize(torch.randn(4, *size, 6, generator=generator), dim=-1)
    labels = torch.rand(3, 2, *size, generator=generator)
    how = {"radius": radius, "k": k, "temperature": 0.1}
    expected = naive_labels(target, frames, labels, **how)
    torch.testing.assert_close(propagate_labels(target, frames, labels, **how), expected)


def test_objects_that_move_are_followed(weights, tmp_path):
    """A square of another texture goes from patch to patch; its masks are found and written."""
    generator, root = np.random.default_rng(0), tmp_path / "DAVIS"
    texture = [generator.integers(0, 255, (4, 4, 3), dtype=np.uint8) for _ in range(2)]
    for name, step in (("bear", (0, 1)), ("car", (1, 0))):
        for kind in ("JPEGImages", "Annotations"):
            (root / kind / "480p" / name).mkdir(parents=True)
        for number in range(5):
            mask = np.zeros((12, 16), bool)
            y, x = 1 + step[0] * number, 2 + step[1] * number
            mask[y : y + 5, x : x + 5] = True
            mask = np.kron(mask, np.ones((4, 4), bool))
            tiles = [np.tile(tile, (12, 16, 1)) for tile in texture]
            frame = np.where(mask[..., None], *tiles)
            stem = root / "JPEGImages" / "480p" / name / f"{number:05d}.jpg"
            Image.fromarray(frame).save(stem, quality=100, subsampling=0)
            indexed = Image.fromarray(mask.astype(np.uint8) * 3)
            indexed.putpalette([0] * 9 + [255, 0, 0])
            indexed.save(root / "Annotations" / "480p" / name / f"{number:05d}.png")
    (root / "ImageSets" / "2017").mkdir(parents=True)
    (root / "ImageSets" / "2017" / "val.txt").write_text("bear\ncar\n")
    settings = {"source": str(root), "weights": str(weights), "size": 48, "radius": 0}
    for folder, radius in (("anywhere", 0), ("out", 12)):
        written = run(DavisConfig(**{**settings, "radius": radius}, output=str(tmp_path / folder)))
        figures = json.loads(written.path.read_text())
        assert list(figures["videos"]) == ["bear", "car"]
        assert figures["J"] > 80
    truth = root / "Annotations" / "480p"
    before = (truth / "bear" / "00000.png").read_bytes()
    with pytest.raises(ValueError, match=r"\.png would be replaced, but source=.* is read"):
        run(DavisConfig(**settings, output=str(truth), overwrite=True))
    with pytest.raises(ValueError, match=r"davis\.json already exists, with 10 other files"):
        run(DavisConfig(**settings, output=str(tmp_path / "out")))
    assert (truth / "bear" / "00000.png").read_bytes() == before
    with Image.open(tmp_path / "out" / "car" / "00004.png") as written:
        assert written.getpalette()[9:12] == [255, 0, 0]
        assert set(np.unique(np.array(written))) == {0, 3}
