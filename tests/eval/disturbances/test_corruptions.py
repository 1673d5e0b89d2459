"""The corruptions of ImageNet-C: formulas against loops, and that each severity does what it should."""

import colorsys
import math
from itertools import pairwise

import numpy as np
import pytest
from PIL import Image

from dino_vit.eval.disturbances import blurs, weather
from dino_vit.eval.disturbances import corruptions as kinds
from dino_vit.eval.disturbances.corruptions import corruptions


def picture(height=48, width=40, seed=0):
    """Return smooth colours with some edges."""
    small = np.random.default_rng(seed).integers(0, 256, (6, 5, 3), dtype=np.uint8)
    return np.array(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))


def values(**size):
    return picture(**size).astype(np.float32) / np.float32(255)


def apply(disturbance, image, seed=0):
    return disturbance.apply(image, disturbance.strength, np.random.default_rng(seed))


def test_there_are_15_kinds_at_5_severities_that_each_change_a_picture():
    every = corruptions()
    assert len({str(each) for each in every}) == 75
    for shape in ((224, 224), (48, 40)):
        image = picture(*shape)
        for each in every:
            changed = apply(each, image)
            assert (changed.shape, changed.dtype) == (image.shape, np.uint8), each
            assert np.array_equal(changed, apply(each, image)), each
            unchanged = shape == (48, 40) and str(each) == "defocus_blur 1"  # the disk is one pixel
            assert np.array_equal(changed, image) == unchanged, each


@pytest.mark.parametrize(
    "kind", ["gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "zoom_blur", "contrast", "jpeg"]
)
def test_a_higher_severity_changes_more(kind):
    image = picture(224, 224).astype(int)
    far = [np.abs(apply(each, picture(224, 224)) - image).mean() for each in corruptions([kind])]
    assert all(weak < strong for weak, strong in pairwise(far)), far


def test_noise_has_the_published_strength():
    grey, generator = np.full((200, 200, 3), 0.5, np.float32), np.random.default_rng(0)
    assert kinds.add_gaussian_noise(grey, 3, generator).std() == pytest.approx(0.18, rel=0.02)
    shot = kinds.add_shot_noise(grey, 2, generator)
    assert shot.std() == pytest.approx(math.sqrt(0.5 / 25), rel=0.02)
    assert shot.mean() == pytest.approx(0.5, rel=0.02)
    impulse = kinds.add_impulse_noise(grey, 5, generator)
    assert [(impulse == each).mean() for each in (0, 1)] == pytest.approx([0.135, 0.135], rel=0.05)


def test_the_gaussian_filter_equals_a_loop_even_if_it_is_longer_than_the_image():
    image = values(height=5, width=7)[..., 0]
    for border, inside in (
        ("edge", lambda i, n: min(max(i, 0), n - 1)),
        ("symmetric", lambda i, n: i % (2 * n) if i % (2 * n) < n else 2 * n - 1 - i % (2 * n)),
    ):
        radius = int(4 * 3.0 + 0.5)
        weight = [math.exp(-0.5 * (offset / 3.0) ** 2) for offset in range(-radius, radius + 1)]
        expected = np.zeros((5, 7))
        for y, x in np.ndindex(5, 7):
            for down in range(-radius, radius + 1):
                for right in range(-radius, radius + 1):
                    shares = weight[down + radius] * weight[right + radius] / sum(weight) ** 2
                    expected[y, x] += shares * image[inside(y + down, 5), inside(x + right, 7)]
        np.testing.assert_allclose(blurs.gaussian(image, 3.0, border=border), expected, atol=1e-5)


def test_a_streak_is_half_a_gaussian_along_its_direction():
    dot = np.zeros((224, 224), np.float32)
    dot[100, 100] = 1
    drawn = blurs.streak(dot, 10, 3, 0)
    weights = [math.exp(-0.5 * (step / 3) ** 2) for step in range(21)]
    expected = [weight / sum(weights) for weight in weights]
    np.testing.assert_allclose(drawn[100, 100:79:-1], expected, atol=1e-6)
    assert drawn.sum() == pytest.approx(1, abs=1e-5)
    np.testing.assert_allclose(blurs.streak(dot, 10, 3, 90)[100:79:-1, 100], expected, atol=1e-6)


def test_a_point_out_of_focus_is_a_disk():
    dot = np.zeros((224, 224, 3), np.float32)
    dot[100, 110] = 1
    drawn = blurs.defocus(dot, 1, np.random.default_rng(0))[..., 1]  # radius 3, hardly smoothed
    area = sum(x * x + y * y <= 9 for x in range(-3, 4) for y in range(-3, 4))
    expected = np.zeros((224, 224))
    for y, x in np.ndindex(7, 7):
        if (x - 3) ** 2 + (y - 3) ** 2 <= 9:
            expected[97 + y, 107 + x] = 1 / area
    np.testing.assert_allclose(drawn, expected, atol=1e-4)
    for severity in kinds.SEVERITIES:  # white stays white
        white = blurs.defocus(np.ones_like(dot), severity, np.random.default_rng(0))
        np.testing.assert_allclose(white, 1, atol=1e-5)


def test_zoom_averages_the_published_enlargements():
    published = [np.arange(1, 1.11, 0.01), np.arange(1, 1.16, 0.01), np.arange(1, 1.21, 0.02)]
    published += [np.arange(1, 1.26, 0.02), np.arange(1, 1.31, 0.03)]
    image = values(height=64, width=64)
    whole = Image.fromarray(np.rint(image * 255).astype(np.uint8))
    for severity, factors in enumerate(published, 1):
        larger = [np.asarray(blurs.enlarged(whole, factor), np.float32) / 255 for factor in factors]
        found = blurs.zoom(image, severity, np.random.default_rng(0))
        np.testing.assert_allclose(found, np.mean([image, *larger], axis=0), atol=1e-5)


def test_images_of_a_few_pixels_can_be_corrupted():
    for side in (1, 2, 4, 8):
        for each in corruptions():
            assert apply(each, picture(side, side)).shape == (side, side, 3)


def test_glass_copies_pixels_one_after_another():
    image, shift = values(height=224, width=224), 2
    moved = np.rint(blurs.gaussian(image, 0.9) * 255).astype(np.uint8)
    places = [(y, x) for y in range(222, 2, -1) for x in range(222, 2, -1)]
    down, right = np.random.default_rng(3).integers(-shift, shift, (2, len(places)))
    for (y, x), dy, dx in zip(places, down, right, strict=True):
        moved[y, x] = moved[y + dy, x + dx]
    expected = blurs.gaussian(moved.astype(np.float32) / np.float32(255), 0.9)
    np.testing.assert_array_equal(blurs.glass(image, 2, np.random.default_rng(3)), expected)


def test_brightness_raises_the_value_of_hsv():
    image = values(height=8, width=8)
    image[0, 0] = 0
    found = weather.brighten(image, 3, np.random.default_rng(0))
    for y, x in np.ndindex(8, 8):
        hue, saturation, value = colorsys.rgb_to_hsv(*image[y, x].tolist())
        expected = colorsys.hsv_to_rgb(hue, saturation, min(value + 0.3, 1))
        np.testing.assert_allclose(found[y, x], expected, atol=1e-5)


def test_clouds_are_made_level_by_level():
    class FirstOnly:
        """Draws the largest number at first, and zeros from then on."""

        def __init__(self):
            self.reaches = []

        def uniform(self, low, high, shape):
            self.reaches.append(high)
            return np.full(shape, 1.0 if len(self.reaches) == 1 else 0.0)

    generator = FirstOnly()
    field = weather.clouds(4, 2.0, generator)
    # One point of 100 in the middle, with the corner at 0; the rest are means of four around them.
    assert generator.reaches == [100, 100, 100, 50, 50, 50]
    assert field[2, 2] == field.max() == 1
    assert field[0, 0] == field.min() == 0
    assert field[0, 2] == field[2, 0] == pytest.approx(0.5)
    assert field[1, 1] == pytest.approx((0 + 0.5 + 0.5 + 1) / 4)
    real = weather.clouds(100, 2.0, np.random.default_rng(0))
    assert (real.shape, real.min() >= 0, real.max() <= 1) == ((100, 100), True, True)


def test_elastic_moves_colours_and_contrast_fades_them():
    image = picture(224, 224)
    *_, strongest = corruptions(["elastic"])
    moved = apply(strongest, image)
    assert np.abs(moved.mean((0, 1)) - image.mean((0, 1))).max() < 8
    assert np.abs(moved.astype(int) - image).mean() > 2
    faded = apply(corruptions(["contrast"])[4], image).astype(float)
    mean = (image / 255).mean((0, 1))
    np.testing.assert_allclose(faded / 255, mean + 0.05 * (image / 255 - mean), atol=1.01 / 255)
