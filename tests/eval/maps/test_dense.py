import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dino_vit.data.sources.masks import IGNORED
from dino_vit.eval.accuracy import with_confidence
from dino_vit.eval.maps.attention import mass_mask
from dino_vit.eval.maps.dense import (
    Bank,
    best_head_overlap,
    count_pixels,
    linear_layer,
    mean_iou,
    patch_classes,
    pixel_accuracy,
    upsample,
)


def random_masks(images=6, size=12, classes=4, ignored=0.1):
    generator = torch.Generator().manual_seed(0)
    masks = torch.randint(classes, (images, size, size), generator=generator, dtype=torch.uint8)
    masks[torch.rand(masks.shape, generator=generator) < ignored] = IGNORED
    predicted = torch.where(torch.rand(masks.shape, generator=generator) < 0.6, masks.clamp(max=3), 1)
    return predicted.long(), masks


def test_a_patch_has_the_class_of_most_of_its_pixels():
    masks = torch.tensor(
        [[[1, 1, 0, 0], [2, 1, 0, 3], [255, 255, 3, 3], [2, 255, 255, 3]]], dtype=torch.uint8
    )
    assert patch_classes(masks, (2, 2), 4).tolist() == [[[1, 0], [IGNORED, 3]]]
    _, masks = random_masks()
    classes = patch_classes(masks, (3, 4), 4)
    for image in range(6):
        for row in range(3):
            for column in range(4):
                pixels = masks[image, 4 * row : 4 * row + 4, 3 * column : 3 * column + 3].flatten().tolist()
                counts = [pixels.count(kind) for kind in (0, 1, 2, 3, IGNORED)]
                assert classes[image, row, column] == (0, 1, 2, 3, IGNORED)[int(np.argmax(counts))]


def test_figures_are_those_of_pixel_by_pixel_counting():
    predicted, masks = random_masks()
    right = judged = 0
    inside, outside = np.zeros(4), np.zeros(4)
    for guess, truth in zip(predicted.flatten().tolist(), masks.flatten().tolist(), strict=True):
        if truth == IGNORED:
            continue
        judged += 1
        right += guess == truth
        for kind in range(4):
            inside[kind] += guess == kind and truth == kind
            outside[kind] += guess == kind or truth == kind
    totals = count_pixels(predicted, masks, 4).sum(0)
    assert pixel_accuracy(*totals).item() == pytest.approx(right / judged)
    assert mean_iou(*totals).item() == pytest.approx(np.mean(inside / outside))


@pytest.mark.parametrize("background", [None, 2])
def test_the_best_head_is_found_pixel_by_pixel(background):
    _, masks = random_masks()
    masks[5] = 2 if background == 2 else IGNORED  # without an object
    attention = torch.rand(6, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    overlaps = best_head_overlap(attention, masks, background)
    for image in range(5):
        pixels = {(y, x): int(masks[image, y, x]) for y in range(12) for x in range(12)}
        pixels = {place: kind for place, kind in pixels.items() if kind != IGNORED}
        kinds = set(pixels.values())
        objects = [{kind} for kind in kinds] if background is None else [kinds - {background}]
        best = []
        for thing in objects:
            of_thing = {place for place, kind in pixels.items() if kind in thing}
            shares = []
            for head in range(3):
                marked = mass_mask(attention[image, head], 0.6)
                inside = {(y, x) for y, x in pixels if marked[y // 3, x // 3]}
                shares.append(len(inside & of_thing) / len(inside | of_thing))
            best.append(max(shares))
        assert overlaps[image].item() == pytest.approx(np.mean(best))
    assert overlaps[5].isnan()


def test_rare_classes_are_inside_their_interval():
    """Each of 20 images has a class of its own, which most images drawn again do not have."""
    masks = torch.zeros(20, 8, 8, dtype=torch.uint8)
    masks[:, :4] = torch.arange(1, 21, dtype=torch.uint8)[:, None, None]
    predicted = masks.long()
    predicted[:, 0] = 0
    interval = with_confidence(count_pixels(predicted, masks, 21).unbind(1), mean_iou)
    assert interval.low - 0.5 <= interval.percent <= interval.high + 0.5


def test_logits_of_patches_become_classes_of_pixels():
    logits = torch.zeros(1, 2, 2, 2)
    logits[0, 1, :, 1] = 5.0
    logits[0, 0, :, 0] = 5.0
    assert upsample(logits, (4, 8))[0].tolist() == [[0] * 4 + [1] * 4] * 4


@pytest.mark.parametrize("in_order", [False, True])
def test_the_linear_layer_learns_what_is_linear(in_order):
    """Of images that are sorted by class too."""
    generator = torch.Generator().manual_seed(0)
    classes = torch.arange(3).repeat_interleave(200) if in_order else torch.arange(3).repeat(200)
    features = F.one_hot(classes, 8).float() + 0.1 * torch.randn(600, 8, generator=generator)
    head, _ = linear_layer(Bank(features, classes, torch.arange(3)), (0.01, 1.0, 100.0))
    assert (head.scores(features)[:, 0].argmax(1) == classes).float().mean() > 0.99
