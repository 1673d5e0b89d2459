import math
from itertools import permutations

import numpy as np
import pytest
import torch
from torchvision.transforms.v2 import functional as V

from dino_vit.views.augment import Augment, Column, _blur_by_products_, _blur_by_shifts_, _gaussian
from tests.support.views import draw_rows, ks_distance, views_of

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def images(count=6, channels=3, height=24, width=20, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, channels, height, width), dtype=torch.uint8, generator=generator)


def rows(count=6, **columns):
    made = torch.zeros(count, len(Column))
    made[:, Column.BRIGHTNESS : Column.HUE] = 1
    for name, value in columns.items():
        made[:, getattr(Column, name.upper())] = torch.as_tensor(value)
    return made


def drawn_rows(count, *overrides):
    return draw_rows(views_of(*overrides), samples=np.arange(count)).flatten(0, 1)


def plain(channels=3):
    return Augment(mean=(0.0,) * channels, std=(1.0,) * channels)


def naive(image, row):
    """One image after the other with torchvision's own functions."""
    row = row.tolist()
    x = image / 255
    colour = len(x) == 3
    if row[Column.FLIP]:
        x = V.horizontal_flip(x)
    if row[Column.VERTICAL_FLIP]:
        x = V.vertical_flip(x)
    x = x.rot90(int(row[Column.ROTATION] // 90), (-2, -1))
    if row[Column.JITTER]:
        for operation in list(permutations(range(4)))[int(row[Column.ORDER])]:
            parts = [x] if colour else x.split(1)
            if operation == 0:
                x = torch.cat([V.adjust_brightness(part, row[Column.BRIGHTNESS]) for part in parts])
            elif operation == 1:
                x = torch.cat([V.adjust_contrast(part, row[Column.CONTRAST]) for part in parts])
            elif operation == 2 and colour:
                x = V.adjust_saturation(x, row[Column.SATURATION])
            elif colour:
                x = V.adjust_hue(x, row[Column.HUE])
    if row[Column.GREY] and colour:
        x = V.rgb_to_grayscale(x, num_output_channels=3)
    if row[Column.SIGMA]:
        size = (
            2 * int(row[Column.SIGMA] * math.sqrt(2 * math.log(1000))) + 1
        )  # up to a thousandth of the centre
        x = V.gaussian_blur(x, [size, size], [row[Column.SIGMA]] * 2)
    if row[Column.SOLARISE]:
        x = V.solarize(x, 0.5)
    return x


def matches(x, row):
    expected = torch.stack([naive(image, one) for image, one in zip(x, row, strict=True)])
    return (plain(x.shape[1])(x, row) - expected).abs().max() < 1e-5


def alone(operation):
    """The order of the jitter that starts with one operation; the others have neutral factors."""
    return 6 * operation


@pytest.mark.parametrize("factor", [0.0, 0.6, 1.0, 2.0])
def test_brightness_contrast_and_saturation_are_torchvisions(factor):
    for operation, name in enumerate(("brightness", "contrast", "saturation")):
        assert matches(images(), rows(jitter=1, order=alone(operation), **{name: factor}))


@pytest.mark.parametrize("turn", [-0.5, -0.3, -0.1, 0.0, 0.05, 0.1, 0.5])
def test_hue_is_torchvisions_for_every_kind_of_pixel(turn):
    levels = torch.tensor([0, 1, 128, 254, 255], dtype=torch.uint8)
    every = torch.cartesian_prod(levels, levels, levels).T.reshape(1, 3, 5, 25)  # greys, ties and extremes
    assert matches(every, rows(1, jitter=1, order=alone(3), hue=turn))


def test_grey_flip_and_solarise_are_torchvisions():
    for name in ("grey", "flip", "vertical_flip", "solarise"):
        assert matches(images(), rows(**{name: 1}))


@pytest.mark.parametrize("channels", [1, 3, 5])
def test_quarter_turns_are_exact(channels):
    x, angles = images(channels=channels, height=20), [0, 90, 180, 270, -90, 90]
    turned = [image.rot90(angle // 90, (-2, -1)) for image, angle in zip(x, angles, strict=True)]
    assert torch.equal(plain(channels)(x, rows(rotation=angles)), torch.stack(turned) / 255)
    half = plain(channels)(images(channels=channels), rows(rotation=180))
    assert torch.equal(half, images(channels=channels).flip(-2, -1) / 255)


def naive_rotation(image, angle):
    """Every pixel is a mean of the four around its source, whose indices are mirrored at the borders."""
    channels, height, width = image.shape
    cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle))

    def pixel(row, column):
        row, column = row % (2 * height), column % (2 * width)
        return image[:, min(row, 2 * height - 1 - row), min(column, 2 * width - 1 - column)]

    rotated = torch.empty(channels, height, width)
    for row in range(height):
        for column in range(width):
            down, right = row - (height - 1) / 2, column - (width - 1) / 2
            y = sin * right + cos * down + (height - 1) / 2
            x = cos * right - sin * down + (width - 1) / 2
            top, left = math.floor(y), math.floor(x)
            upper = (left + 1 - x) * pixel(top, left) + (x - left) * pixel(top, left + 1)
            lower = (left + 1 - x) * pixel(top + 1, left) + (x - left) * pixel(top + 1, left + 1)
            rotated[:, row, column] = (top + 1 - y) * upper + (y - top) * lower
    return rotated


@pytest.mark.parametrize(("channels", "size"), [(1, (16, 16)), (3, (24, 20)), (5, (7, 30)), (3, (1, 6))])
def test_rotation_equals_the_loop(channels, size):
    x, angles = images(5, channels, *size), [-170.0, -90.0, -12.5, 0.25, 44.0]
    expected = torch.stack(
        [naive_rotation(image / 255, angle) for image, angle in zip(x, angles, strict=True)]
    )
    assert (plain(channels)(x, rows(5, rotation=angles)) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("sigma", [0.1, 0.5, 1.0, 1.63, 2.0])
def test_blur_is_torchvisions(sigma):
    assert matches(images(), rows(sigma=sigma))
    wide = V.gaussian_blur(images() / 255, [19, 19], [sigma, sigma])
    assert (plain()(images(), rows(sigma=sigma)) - wide).abs().max() < 0.5 / 255


@pytest.mark.parametrize(("channels", "size"), [(3, (224, 224)), (1, (40, 48)), (5, (5, 4)), (3, (1, 7))])
def test_a_gpu_blurs_by_products_what_a_cpu_does_by_shifts(channels, size):
    x = 255 * torch.rand(5, channels, *size)
    weights = _gaussian(np.linspace(0.1, 2, 5, dtype=np.float32), 2.0, min(size) - 1)
    taps = torch.from_numpy(weights).view(-1, 5, 1, 1, 1)
    shifted = x.clone()
    _blur_by_shifts_(shifted, taps)
    assert ((shifted - x).abs().max() > 10) == (len(taps) > 1)
    _blur_by_products_(x, taps)
    assert (shifted - x).abs().max() < 1e-4  # of a level from 0 to 255; sums of 15 numbers, in another order


@pytest.mark.parametrize("channels", [1, 2, 3, 5])
def test_drawn_rows_of_all_kinds_at_once_equal_the_loop(channels):
    row = drawn_rows(4, "augment.vertical_flip=0.5", "augment.rotation=90")
    assert matches(images(len(row), channels, height=20), row)


def test_what_is_off_is_untouched_bit_for_bit():
    row = drawn_rows(2)
    row[::2] = 0
    x = images(len(row))
    assert torch.equal(plain()(x, row)[::2], (x / 255)[::2])
    assert not torch.equal(plain()(x, row)[1::2], (x / 255)[1::2])


def test_normalises_with_mean_and_std():
    x = images()
    assert torch.allclose(Augment(mean=MEAN, std=STD)(x, rows()), V.normalize(x / 255, MEAN, STD), atol=1e-6)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [(23, 19), (181, 187)])
def test_on_a_cpu_an_image_depends_on_no_batch_and_no_threads(size, channels):
    row = drawn_rows(4, "augment.vertical_flip=0.5", "augment.rotation=30")
    x = images(len(row), channels, *size)
    augment = Augment(mean=MEAN[:channels], std=STD[:channels])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        together = augment(x, row)
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert torch.equal(augment(x[3:], row[3:]), together[3:])
            alone = [augment(one[None], own[None]) for one, own in zip(x, row, strict=True)]
            assert torch.equal(torch.cat(alone), together)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("channels", [1, 3, 5])
def test_deep_images_are_treated_as_bytes_are(channels):
    row = drawn_rows(3)
    x = images(len(row), channels)
    deep = x / 255
    before = deep.clone()
    assert torch.allclose(plain(channels)(deep, row), plain(channels)(x, row), atol=1e-6)
    assert torch.equal(deep, before)


def test_augmentation_follows_the_recipe():
    """Each column against its distribution, at a level of about 0.1 %, on fixed seeds."""
    count = 4000
    rows = draw_rows(views_of(), samples=np.arange(count)).numpy()

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

    flat = rows.reshape(-1, len(Column))[:, [0, 1, 2, 3, 4, 5, 6, 7]]
    assert abs(np.corrcoef(flat.T) - np.eye(8)).max() < 0.02


def test_flips_and_rotation_follow_their_settings():
    count = 4000
    settings = ["augment.vertical_flip=0.3", "views.local_size=[96, 64]", "views.local_count=1"]
    before = draw_rows(views_of(*settings[1:]), samples=np.arange(count)).numpy()
    rows = draw_rows(views_of(*settings, "augment.rotation=90"), samples=np.arange(count)).numpy()
    assert np.array_equal(rows[..., : Column.VERTICAL_FLIP], before[..., : Column.VERTICAL_FLIP])
    assert not before[..., Column.VERTICAL_FLIP :].any()
    flips, angles = rows[..., Column.VERTICAL_FLIP], rows[..., Column.ROTATION]
    assert (abs(flips.mean(0) - 0.3) < 3.3 * math.sqrt(0.3 * 0.7 / count)).all()
    for view, turns in (
        (0, [0, 90, 180, 270]),
        (1, [0, 90, 180, 270]),
        (2, [0, 180]),
    ):  # the last is not square
        values, counts = np.unique(angles[:, view], return_counts=True)
        assert values.tolist() == turns
        share = 1 / len(turns)
        assert (abs(counts / count - share) < 3.3 * math.sqrt(share * (1 - share) / count)).all()

    free = draw_rows(views_of("augment.rotation=30"), samples=np.arange(count)).numpy()
    angles = free[:, 0, Column.ROTATION]
    assert abs(angles).max() <= 30
    assert ks_distance(angles, np.linspace(-30, 30, 100_001)) < 1.95 / math.sqrt(count)
    columns = np.stack(
        [angles, free[:, 1, Column.ROTATION], free[:, 0, Column.FLIP], flips[:, 0], flips[:, 1]]
    )
    assert abs(np.corrcoef(columns) - np.eye(5)).max() < 3.5 / math.sqrt(count)
