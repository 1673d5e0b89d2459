import math
from itertools import product

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as V

from dino_vit.config.pretrain import PretrainConfig
from dino_vit.core.randomness import RngPurpose, random_uniform
from dino_vit.views.build import build_views
from dino_vit.views.geometry import (
    COLUMNS,
    Column,
    View,
    ViewPhotometry,
    cut_views,
    draw_boxes,
    draw_photometry,
    interleave,
)


def ks_distance(a, b):
    points = np.concatenate([a, b])
    a, b = np.sort(a), np.sort(b)
    return abs(
        np.searchsorted(a, points, "right") / len(a) - np.searchsorted(b, points, "right") / len(b)
    ).max()


def test_the_recipe_is_the_default():
    views = build_views(PretrainConfig())
    assert [view.size for view in views] == [(224, 224)] * 2 + [(96, 96)] * 8
    assert [view.photometry.blur for view in views] == [1.0, 0.1] + [0.5] * 8
    assert [view.photometry.solarise for view in views] == [0.0, 0.2] + [0.0] * 8
    assert views[0].scale == views[1].scale == (0.4, 1.0)
    assert views[2].scale == (0.05, 0.4)


def naive_box(draws, view, height, width):
    for area, ratio, top, left in draws:
        target = height * width * (view.scale[0] + (view.scale[1] - view.scale[0]) * area)
        lows = math.log(view.ratio[0]), math.log(view.ratio[1])
        aspect = math.exp(lows[0] + (lows[1] - lows[0]) * ratio)
        w = round(math.sqrt(target * aspect))
        h = round(math.sqrt(target / aspect))
        if 0 < w <= width and 0 < h <= height:
            return [math.floor(top * (height - h + 1)), math.floor(left * (width - w + 1)), h, w]
    if width / height < min(view.ratio):
        w, h = width, round(width / min(view.ratio))
    elif width / height > max(view.ratio):
        w, h = round(height * max(view.ratio)), height
    else:
        w, h = width, height
    return [(height - h) // 2, (width - w) // 2, h, w]


@pytest.mark.parametrize(("height", "width"), [(375, 500), (32, 32), (10, 200), (200, 10), (1, 1), (1, 7)])
def test_boxes_equal_the_loop(height, width):
    views = build_views(PretrainConfig())
    for sample in range(20):
        boxes = draw_boxes(views, seed=1, epoch=2, sample=sample, height=height, width=width)
        for number, view in enumerate(views):
            keys = 2, sample, number, np.arange(10)[:, None], np.arange(4)
            draws = random_uniform(1, RngPurpose.BOXES, *keys)
            assert boxes[number].tolist() == naive_box(draws, view, height, width)


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
def test_cut_views_resample_as_torchvision_does(interpolation):
    image = torch.randint(0, 256, (3, 40, 50), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    boxes = np.array([[0, 0, 40, 50], [3, 5, 30, 22], [7, 9, 5, 4]])
    cut = cut_views(image, boxes, (16, 12), interpolation=interpolation)
    mode = V.InterpolationMode(interpolation)
    for view, (top, left, height, width) in zip(cut, boxes.tolist(), strict=True):
        expected = V.resized_crop(image, top, left, height, width, [16, 12], mode, antialias=True)
        assert torch.equal(view, expected)


def test_how_an_image_lies_in_memory_changes_nothing():
    image = torch.randint(0, 256, (3, 41, 53), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    boxes = np.array([[0, 0, 41, 53], [3, 5, 30, 22], [7, 9, 1, 1]])
    turned = interleave(image)
    assert turned.stride() == (1, 3 * 53, 3)
    assert torch.equal(turned, image)
    plain = [
        F.interpolate(
            image[None, :, t : t + h, left : left + w], size=(16, 12), mode="bicubic", antialias=True
        )
        for t, left, h, w in boxes.tolist()
    ]
    room = torch.empty(2, 3, 3, 16, 12, dtype=torch.uint8)
    for given in (image, turned):
        assert torch.equal(cut_views(given, boxes, (16, 12), out=room[1]), torch.cat(plain))
    assert torch.equal(room[1], torch.cat(plain))


@pytest.mark.parametrize("channels", [1, 2, 3, 5])
def test_cut_views_takes_any_channels_and_keeps_flat_areas(channels):
    image = torch.arange(channels, dtype=torch.uint8)[:, None, None].expand(channels, 30, 30) * 40
    cut = cut_views(image, np.array([[1, 2, 20, 20]]), (8, 8))
    assert torch.equal(cut[0], image[:, :8, :8])


def test_a_view_depends_on_seed_epoch_sample_and_view_alone():
    views = build_views(PretrainConfig())
    where = {"height": 375, "width": 500}
    alone = draw_photometry(views, seed=3, epoch=5, samples=np.array([77]))[0]
    assert (draw_photometry(views, seed=3, epoch=5, samples=np.array([1, 77, 2]))[1] == alone).all()
    base = draw_boxes(views, seed=3, epoch=5, sample=77, **where)
    assert (base == draw_boxes(views, seed=3, epoch=5, sample=77, **where)).all()
    assert (base[:3] == draw_boxes(views[:3], seed=3, epoch=5, sample=77, **where)).all()
    for seed, epoch, sample in ((4, 5, 77), (3, 6, 77), (3, 5, 78)):
        assert (base != draw_boxes(views, seed=seed, epoch=epoch, sample=sample, **where)).any()
        assert (alone != draw_photometry(views, seed=seed, epoch=epoch, samples=np.array([sample]))[0]).any()


def test_photometry_follows_the_recipe():
    """Each column against its distribution, at a level of about 0.1 %, on fixed seeds."""
    count = 4000
    rows = draw_photometry(build_views(PretrainConfig()), seed=0, epoch=0, samples=np.arange(count))

    def share(column, view, expected):
        bound = 3.3 * math.sqrt(max(expected * (1 - expected), 1e-12) / count)
        assert abs((rows[:, view, column] > 0).mean() - expected) <= bound

    for view, (blur, solarise) in enumerate([(1.0, 0.0), (0.1, 0.2), (0.5, 0.0)]):
        share(Column.FLIP, view, 0.5)
        share(Column.JITTER, view, 0.8)
        share(Column.GREY, view, 0.2)
        share(Column.SIGMA, view, blur)
        share(Column.SOLARISE, view, solarise)

    def is_uniform(values, low, high):
        expected = np.linspace(low, high, 100_001)
        assert values.min() >= low - 1e-6
        assert values.max() <= high + 1e-6
        assert ks_distance(values, expected) < 1.95 / math.sqrt(len(values))

    is_uniform(rows[:, 0, Column.BRIGHTNESS], 0.6, 1.4)
    is_uniform(rows[:, 0, Column.CONTRAST], 0.6, 1.4)
    is_uniform(rows[:, 0, Column.SATURATION], 0.8, 1.2)
    is_uniform(rows[:, 0, Column.HUE], -0.1, 0.1)
    is_uniform(rows[:, 0, Column.SIGMA], 0.1, 2.0)

    orders = np.bincount(rows[:, :, Column.ORDER].astype(int).ravel(), minlength=24)
    expected = count * 10 / 24
    assert len(orders) == 24
    assert (((orders - expected) ** 2) / expected).sum() < 49.7  # 0.1 % point for 23 degrees of freedom

    flat = rows.reshape(-1, COLUMNS)[:, [0, 1, 2, 3, 4, 5, 6, 7]]
    assert abs(np.corrcoef(flat.T) - np.eye(8)).max() < 0.02


def test_noise_is_drawn_as_asked_and_changes_no_other_draw():
    count = 4000
    views = [View(size=(8, 8), scale=(0.4, 1.0), photometry=ViewPhotometry(noise=p)) for p in (0.0, 0.3, 1.0)]
    rows = draw_photometry(views, seed=0, epoch=3, samples=np.arange(count))
    without = [View(size=(8, 8), scale=(0.4, 1.0))] * 3
    silent = draw_photometry(without, seed=0, epoch=3, samples=np.arange(count))
    assert (rows[..., : Column.NOISE] == silent[..., : Column.NOISE]).all()
    assert not silent[..., Column.NOISE :].any()
    assert not rows[:, 0, Column.NOISE :].any()
    noisy = rows[:, 1, Column.NOISE] > 0
    assert abs(noisy.mean() - 0.3) < 3.3 * math.sqrt(0.3 * 0.7 / count)
    assert not rows[~noisy, 1, Column.NOISE :].any()
    assert (rows[:, 2, Column.NOISE] > 0).all()
    for column, low, high in (
        (Column.NOISE, 0.01, 0.1),
        (Column.KEY_HIGH, 0, 2**24),
        (Column.KEY_LOW, 0, 2**24),
    ):
        drawn = rows[:, 2, column]
        assert ks_distance(drawn, np.linspace(low, high, 100_001)) < 1.95 / math.sqrt(count)
        assert column == Column.NOISE or (drawn == np.floor(drawn)).all()
    flat = rows[:, 2, [Column.FLIP, Column.NOISE, Column.KEY_HIGH, Column.KEY_LOW]]
    assert abs(np.corrcoef(flat.T) - np.eye(4)).max() < 4 / math.sqrt(count)
    alone = draw_photometry(views, seed=0, epoch=3, samples=np.array([77]))
    assert (alone[0] == rows[77]).all()
    assert (draw_photometry(views, seed=0, epoch=4, samples=np.array([77]))[0, 2] != rows[77, 2])[-3:].all()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ViewPhotometry(blur=1.5), "blur is a probability"),
        (lambda: ViewPhotometry(hue=0.6), "hue must lie between 0 and 0.5"),
        (lambda: ViewPhotometry(blur_sigma=(0.0, 1.0)), "blur_sigma"),
        (lambda: ViewPhotometry(noise=-0.1), "noise is a probability"),
        (lambda: ViewPhotometry(noise_std=(1.0, 10.0)), "noise_std must be a pair"),
        (lambda: View(size=(0, 4), scale=(0.1, 1.0)), "at least one pixel"),
        (lambda: View(size=(4, 4), scale=(0.5, 0.2)), "scale must be"),
        (lambda: View(size=(4, 4), scale=(0.1, 1.0), ratio=(2.0, 1.0)), "ratio must be"),
    ],
)
def test_impossible_views_are_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_no_two_views_share_a_box():
    boxes = [
        draw_boxes(build_views(PretrainConfig()), seed=0, epoch=e, sample=s, height=375, width=500)
        for e, s in product(range(3), range(5))
    ]
    assert len({tuple(box) for image in boxes for box in image.tolist()}) == 150
