import math

import numpy as np
import pytest
import torch
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as V

from dino_vit.core.randomness import RngPurpose, random_uniform
from dino_vit.views.geometry import RATIO, View, crop_views
from tests.support.views import draw_boxes, draw_rows, ks_distance, views_of


def test_the_recipe_is_the_default():
    views = views_of()
    assert [view.size for view in views] == [(224, 224)] * 2 + [(96, 96)] * 8
    assert [view.augment.blur for view in views] == [1.0, 0.1] + [0.5] * 8
    assert [view.augment.solarise for view in views] == [0.0, 0.2] + [0.0] * 8
    assert views[0].scale == views[1].scale == (0.4, 1.0)
    assert views[2].scale == (0.05, 0.4)


def naive_box(draws, view, height, width):
    for area, ratio, top, left in draws:
        target = height * width * (view.scale[0] + (view.scale[1] - view.scale[0]) * area)
        lows = math.log(RATIO[0]), math.log(RATIO[1])
        aspect = math.exp(lows[0] + (lows[1] - lows[0]) * ratio)
        w = round(math.sqrt(target * aspect))
        h = round(math.sqrt(target / aspect))
        if 0 < w <= width and 0 < h <= height:
            return [math.floor(top * (height - h + 1)), math.floor(left * (width - w + 1)), h, w]
    if width / height < min(RATIO):
        w, h = width, round(width / min(RATIO))
    elif width / height > max(RATIO):
        w, h = round(height * max(RATIO)), height
    else:
        w, h = width, height
    return [(height - h) // 2, (width - w) // 2, h, w]


@pytest.mark.parametrize(("height", "width"), [(375, 500), (32, 32), (10, 200), (200, 10), (1, 1), (1, 7)])
def test_boxes_equal_the_loop(height, width):
    views = views_of()
    for sample in range(20):
        boxes = draw_boxes(views, seed=1, epoch=2, sample=sample, height=height, width=width)
        for index, view in enumerate(views):
            keys = 2, sample, index, np.arange(10)[:, None], np.arange(4)
            draws = random_uniform(1, RngPurpose.BOXES, *keys)
            assert boxes[index].tolist() == naive_box(draws, view, height, width)


@pytest.mark.parametrize(("height", "width"), [(375, 500), (100, 180)])
def test_boxes_are_distributed_as_torchvisions(height, width):
    view = View(size=(8, 8), scale=(0.4, 1.0))
    where = {"height": height, "width": width}
    ours = np.array([draw_boxes([view], seed=0, epoch=0, sample=i, **where)[0] for i in range(2000)])
    torch.manual_seed(0)
    crop = v2.RandomResizedCrop(8, scale=(0.4, 1.0))
    image = torch.empty(3, height, width)
    drawn = [crop.make_params([image]) for _ in range(2000)]
    theirs = np.array([[p["top"], p["left"], p["height"], p["width"]] for p in drawn])
    for column in range(4):  # 0.1 % point of the two-sample Kolmogorov-Smirnov test
        assert ks_distance(ours[:, column], theirs[:, column]) < 1.95 * math.sqrt(2 / 2000)


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_crop_views_resample_as_torchvision_does(interpolation):
    """Whatever the memory format of an image."""
    image = torch.randint(0, 256, (3, 41, 53), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    boxes = np.array([[0, 0, 41, 53], [3, 5, 30, 22], [7, 9, 5, 4], [7, 9, 1, 1]])
    turned = image[None].contiguous(memory_format=torch.channels_last)[0]  # as files are decoded
    room = torch.empty(2, 4, 3, 16, 12, dtype=torch.uint8)
    mode = V.InterpolationMode(interpolation)
    expected = [V.resized_crop(image, *box, [16, 12], mode, antialias=True) for box in boxes.tolist()]
    levels = 0 if "AVX" in torch.backends.cpu.get_cpu_capability() else 1  # where kernels depend on strides
    for given in (image, turned):
        views = crop_views(given, boxes, (16, 12), interpolation=interpolation, out=room[1])
        torch.testing.assert_close(views, torch.stack(expected), rtol=0, atol=levels)
        assert torch.equal(room[1], views)


def test_a_view_is_a_function_of_seed_epoch_sample_and_view():
    views, size = views_of(), {"height": 375, "width": 500}
    row = draw_rows(views, seed=3, epoch=5, samples=[77])[0]
    boxes = draw_boxes(views, seed=3, epoch=5, sample=77, **size)
    assert (draw_rows(views, seed=3, epoch=5, samples=[1, 77, 2])[1] == row).all()
    assert (boxes[:3] == draw_boxes(views[:3], seed=3, epoch=5, sample=77, **size)).all()
    for seed, epoch, sample in ((4, 5, 77), (3, 6, 77), (3, 5, 78)):
        assert (boxes != draw_boxes(views, seed=seed, epoch=epoch, sample=sample, **size)).any()
        assert (row != draw_rows(views, seed=seed, epoch=epoch, samples=[sample])[0]).any()
