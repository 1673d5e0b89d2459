import math

import pytest
import torch
import torch.nn.functional as F

from benchmarks.measure import CLEAR_REFS, peak_memory
from dino_vit.eval.video import propagation
from dino_vit.eval.video.propagation import (
    Propagation,
    classes_of_pixels,
    frame_size,
    patch_labels,
    propagate_labels,
)
from tests.support.allocation import build_propagation


def features(frames, height, width, channels=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(frames, height, width, channels, generator=generator), dim=-1)


def naive_labels(target, sources, labels, radius, k, temperature):
    """Label one patch after the other, as the published code does with matrices of all patches."""
    height, width, _ = target.shape
    found = torch.zeros(len(labels[0]), height, width)
    for y in range(height):
        for x in range(width):
            near = []
            for source, label in zip(sources, labels, strict=True):
                for v in range(height):
                    for u in range(width):
                        if abs(v - y) <= radius and abs(u - x) <= radius:
                            near.append((float(target[y, x] @ source[v, u]), label[:, v, u]))
            kth = sorted((cosine for cosine, _ in near), reverse=True)[min(k, len(near)) - 1]
            kept = [(math.exp(cosine / temperature), label) for cosine, label in near if cosine >= kth]
            found[:, y, x] = sum(weight * label for weight, label in kept) / sum(weight for weight, _ in kept)
    return found


@pytest.mark.parametrize(
    ("size", "radius", "k", "held"),
    [((9, 7), 2, 5, 1 << 23), ((5, 18), 3, 4, 1 << 23), ((6, 6), 50, 3, 40), ((4, 5), 0, 5, 1 << 23)],
    ids=["window", "two tiles", "everywhere, in small blocks", "fewer than k"],
)
def test_labels_are_those_of_a_naive_loop(size, radius, k, held, monkeypatch):
    monkeypatch.setattr(propagation, "TILE", 4)
    monkeypatch.setattr(propagation, "SIMILARITIES", held)
    target, *sources = features(4, *size)
    labels = torch.rand(3, 2, *size, generator=torch.Generator().manual_seed(1))
    how = {"radius": radius, "k": k, "temperature": 0.1}
    torch.testing.assert_close(
        propagate_labels(target, sources, labels, **how), naive_labels(target, sources, labels, **how)
    )


def test_patches_as_near_as_the_kth_count_as_well():
    still = features(1, 3, 3)[0]
    labels = torch.eye(9).reshape(9, 3, 3)
    opposite = torch.rand(9, 3, 3)
    # A picture that does not move has its own patch twice, so one neighbour is two.
    found = propagate_labels(still, [still, still], [labels, opposite], radius=2, k=1, temperature=0.1)
    torch.testing.assert_close(found, (labels + opposite) / 2)


def test_the_first_frame_stays_and_the_last_few_go_on():
    frames = features(5, 4, 4)
    first = torch.rand(2, 4, 4, generator=torch.Generator().manual_seed(1))
    how = {"radius": 2, "k": 3, "temperature": 0.2}
    tracker = Propagation(frames[0], first, last_frames=2, **how)
    found = [tracker.label(frame) for frame in frames[1:]]
    known = [(frames[0], first)]
    for index, labels in enumerate(found, 1):
        used = [known[0], *known[1:][-2:]]
        expected = naive_labels(frames[index], *zip(*used, strict=True), **how)
        torch.testing.assert_close(labels, expected)
        known.append((frames[index], labels))
    alone = Propagation(frames[0], first, last_frames=0, **how)
    alone.label(frames[1])
    expected = naive_labels(frames[2], [frames[0]], [first], **how)
    torch.testing.assert_close(alone.label(frames[2]), expected)


@pytest.mark.skipif(not CLEAR_REFS.exists(), reason="the peak of a process is read from Linux's /proc")
def test_large_frames_need_little_memory():
    # 80 × 80 patches in two frames: the similarities of all, 6400 × 12800 in float32, are 312 MiB.
    assert peak_memory(build_propagation, 80) < 130


def test_labels_of_patches_are_those_of_their_centres():
    mask = torch.tensor([[0, 0, 0, 7, 7, 7], [0, 0, 0, 7, 7, 7], [3, 3, 3, 7, 7, 7]], dtype=torch.uint8)
    found = patch_labels(mask, torch.tensor([0, 3, 7]), (1, 2))
    assert found.tolist() == [[[1, 0]], [[0, 0]], [[0, 1]]]
    assert patch_labels(mask, torch.tensor([0, 3, 7]), (3, 6)).argmax(0).unique().tolist() == [0, 1, 2]


def test_each_class_is_scaled_before_the_largest_is_taken():
    # The second class never reaches a half, but it is at its height in the last patch.
    labels = torch.tensor([[[1.0, 0.9, 0.6]], [[0.0, 0.1, 0.4]]])
    found = classes_of_pixels(labels, (4, 12), (8, 24))
    assert found.shape == (8, 24)
    assert found[0].tolist() == sorted(found[0].tolist())
    assert found[0, 0] == 0
    assert found[0, -1] == 1
    # By hand for a pixel between two centres, at 7.5 of 12: 0.625 of the way from the second to the third.
    for x in range(24):
        place = min(max((x // 2 + 0.5) / 4 - 0.5, 0), 2)
        low = min(int(place), 1)
        scores = [
            (row[low] + (place - low) * (row[low + 1] - row[low]) - min(row)) / (max(row) - min(row))
            for row in ([1.0, 0.9, 0.6], [0.0, 0.1, 0.4])
        ]
        if abs(scores[0] - scores[1]) > 1e-4:
            assert found[3, x] == (scores[1] > scores[0])


def test_a_class_that_fills_the_frame_has_all_pixels():
    labels = torch.stack([torch.zeros(2, 2), torch.tensor([[1.0, 1.0], [1.0, 1.0 - 6e-8]])])
    assert (classes_of_pixels(labels, (8, 8), (8, 8)) == 1).all()


def test_frames_are_resized_by_their_shorter_side():
    assert frame_size((480, 854), 480, (16, 16), published=True) == (480, 832)
    assert frame_size((854, 480), 480, (8, 8), published=True) == (832, 480)
    assert frame_size((480, 854), 480, (14, 14), published=True) == (476, 854)
    assert frame_size((1080, 1920), 480, (16, 16)) == (480, 848)
    assert frame_size((100, 50), 3, (8, 8)) == (8, 8)
