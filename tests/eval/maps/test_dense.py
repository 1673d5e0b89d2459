import numpy as np
import pytest
import torch

from dino_vit.data.sources.masks import IGNORED
from dino_vit.eval.maps.attention import mass_mask
from dino_vit.eval.maps.dense import (
    Overlaps,
    best_head_overlap,
    mean_iou,
    mean_over_images,
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
    found = patch_classes(masks, (3, 4), 4)
    for image in range(6):
        for row in range(3):
            for column in range(4):
                pixels = masks[image, 4 * row : 4 * row + 4, 3 * column : 3 * column + 3].flatten().tolist()
                counts = [pixels.count(kind) for kind in (0, 1, 2, 3, IGNORED)]
                assert found[image, row, column] == (0, 1, 2, 3, IGNORED)[int(np.argmax(counts))]


def test_figures_are_those_of_pixel_by_pixel_counting():
    predicted, masks = random_masks()
    right = known = 0
    inside, outside = np.zeros(4), np.zeros(4)
    for guess, truth in zip(predicted.flatten().tolist(), masks.flatten().tolist(), strict=True):
        if truth == IGNORED:
            continue
        known += 1
        right += guess == truth
        for kind in range(4):
            inside[kind] += guess == kind and truth == kind
            outside[kind] += guess == kind or truth == kind
    overlaps = Overlaps.of(predicted, masks, 4)
    assert pixel_accuracy(overlaps).percent == pytest.approx(100 * right / known)
    assert mean_iou(overlaps).percent == pytest.approx(100 * np.mean(inside / outside))


@pytest.mark.parametrize("background", [None, 2])
def test_the_best_head_is_found_pixel_by_pixel(background):
    _, masks = random_masks()
    masks[5] = 2 if background == 2 else IGNORED  # without an object
    attention = torch.rand(6, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    found = best_head_overlap(attention, masks, background)
    for image in range(5):
        known = {(y, x): int(masks[image, y, x]) for y in range(12) for x in range(12)}
        known = {place: kind for place, kind in known.items() if kind != IGNORED}
        kinds = set(known.values())
        objects = [{kind} for kind in kinds] if background is None else [kinds - {background}]
        best = []
        for thing in objects:
            pixels = {place for place, kind in known.items() if kind in thing}
            shares = []
            for head in range(3):
                marked = mass_mask(attention[image, head], 0.6)
                inside = {(y, x) for y, x in known if marked[y // 3, x // 3]}
                shares.append(len(inside & pixels) / len(inside | pixels))
            best.append(max(shares))
        assert found[image].item() == pytest.approx(np.mean(best))
    assert found[5].isnan()
    assert mean_over_images(found).percent == pytest.approx(100 * found[:5].mean().item(), abs=1e-4)


def test_classes_that_no_mask_has_do_not_count():
    predicted, masks = random_masks()
    assert mean_iou(Overlaps.of(predicted, masks, 9)) == mean_iou(Overlaps.of(predicted, masks, 4))


def test_rare_classes_are_inside_their_interval():
    """Each of 20 images has a class of its own, which most images drawn again do not have."""
    masks = torch.zeros(20, 8, 8, dtype=torch.uint8)
    masks[:, :4] = torch.arange(1, 21, dtype=torch.uint8)[:, None, None]
    predicted = masks.long()
    predicted[:, 0] = 0
    found = mean_iou(Overlaps.of(predicted, masks, 21))
    assert found.low - 0.5 <= found.percent <= found.high + 0.5


def test_no_object_in_any_image_has_no_mean():
    assert mean_over_images(torch.full((3,), torch.nan)) is None


def test_confidence_is_over_images():
    """Images that are all alike leave no doubt, however few; many that differ leave less than a few."""
    predicted, masks = random_masks(images=1)
    alike = Overlaps.of(predicted.expand(5, -1, -1), masks.expand(5, -1, -1), 4)
    assert pixel_accuracy(alike).low == pytest.approx(pixel_accuracy(alike).high)
    shares = torch.linspace(0.3, 0.9, 40)
    widths = []
    for times in (1, 9):
        right = (1000 * shares.repeat(times)[:, None]).long()
        whole = torch.full_like(right, 1000)
        found = pixel_accuracy(Overlaps(right, whole, whole))
        assert found.low < found.percent < found.high
        assert found.percent == pytest.approx(60, abs=0.1)
        widths.append(found.high - found.low)
    deviation = 100 * shares.std().item()
    assert widths[0] == pytest.approx(2 * 1.96 * deviation / 40**0.5, rel=0.1)
    assert widths[1] == pytest.approx(widths[0] / 3, rel=0.15)


def test_logits_of_patches_become_classes_of_pixels():
    logits = torch.zeros(1, 2, 2, 2)
    logits[0, 1, :, 1] = 5.0
    logits[0, 0, :, 0] = 5.0
    assert upsample(logits, (4, 8))[0].tolist() == [[0] * 4 + [1] * 4] * 4
