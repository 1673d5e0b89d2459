"""Copies of photos: each kind changes what its strength says, and the same way every time."""

from typing import get_args

import numpy as np
import pytest
from PIL import Image

from dino_vit.eval.disturbances.copies import COPY_KINDS, LONGEST, Kind, copies

SMOOTH = np.asarray(
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize((80, 60))
)


def copy(kind, strength, picture=SMOOTH, seed=0):
    return COPY_KINDS[kind].apply(picture, strength, np.random.default_rng(seed))


def difference(kind, strength):
    return np.abs(copy(kind, strength).astype(int) - SMOOTH).mean()


@pytest.mark.parametrize("size", [(1, 1), (32, 32), (7, 300)])
@pytest.mark.parametrize("disturbance", copies(COPY_KINDS), ids=str)
def test_copies_are_pictures_made_the_same_way_every_time(disturbance, size):
    picture = np.random.default_rng(1).integers(0, 256, (*size, 3), dtype=np.uint8)
    before = picture.copy()
    _, strength, apply = disturbance
    first, again = (apply(picture, strength, np.random.default_rng(3)) for _ in range(2))
    assert first.dtype == np.uint8
    assert first.shape[2:] == (3,)
    assert np.array_equal(first, again)
    assert np.array_equal(picture, before)


def test_kinds_are_those_that_can_be_asked_for():
    assert get_args(Kind) == tuple(COPY_KINDS)


def test_photos_are_reduced_first():
    assert copy("mirror", 1, np.zeros((900, 1600, 3), np.uint8)).shape == (450, LONGEST, 3)
    assert COPY_KINDS["jpeg"].describe(50, 20) == "quality 50, 20"


@pytest.mark.parametrize("percent", COPY_KINDS["crop"].strengths)
def test_a_crop_is_a_window_of_the_picture(percent):
    found = copy("crop", percent)
    height, width = found.shape[:2]
    assert height * width == pytest.approx((1 - percent / 100) * 60 * 80, rel=0.05)
    windows = np.lib.stride_tricks.sliding_window_view(SMOOTH, found.shape)[:, :, 0]
    assert (windows == found).all((2, 3, 4)).any()


@pytest.mark.parametrize("kind", ["jpeg", "blur", "text", "dark", "contrast"])
def test_a_greater_strength_changes_more(kind):
    changes = [difference(kind, strength) for strength in COPY_KINDS[kind].strengths]
    assert changes[1] > 0
    assert changes == sorted(changes)


def test_turns_and_the_mirror_move_pixels():
    assert np.array_equal(copy("mirror", 1), SMOOTH[:, ::-1])
    assert np.array_equal(copy("turn", 180), SMOOTH[::-1, ::-1])
    turned = {seed: copy("turn", 90, seed=seed) for seed in range(8)}
    sides = [[np.array_equal(one, np.rot90(SMOOTH, k)) for k in (1, -1)] for one in turned.values()]
    assert all(sum(side) == 1 for side in sides)
    assert {side[0] for side in sides} == {True, False}
    assert copy("turn", 45).shape[0] > 60


@pytest.mark.parametrize("percent", COPY_KINDS["overlay"].strengths)
def test_an_overlay_covers_a_share_and_leaves_the_rest(percent):
    changed = (copy("overlay", percent) != SMOOTH).any(2)
    rows, columns = changed.any(1).nonzero()[0], changed.any(0).nonzero()[0]
    covered = (rows[-1] - rows[0] + 1) * (columns[-1] - columns[0] + 1)
    assert covered == pytest.approx(percent / 100 * 60 * 80, rel=0.1)


def test_lines_of_text_are_added_to_those_before():
    one, four = (
        {row // 6 for row in (copy("text", lines) != SMOOTH).any((1, 2)).nonzero()[0]} for lines in (1, 8)
    )
    assert one < four


def test_light_and_contrast():
    assert copy("dark", 50).mean() == pytest.approx(SMOOTH.mean() / 2, abs=1)
    faded = copy("contrast", 70).astype(float)
    assert faded.mean() == pytest.approx(SMOOTH.mean(), abs=1)
    assert faded.std() == pytest.approx(0.3 * SMOOTH.std(), rel=0.02)


@pytest.mark.parametrize("percent", COPY_KINDS["screenshot"].strengths)
def test_a_screenshot_has_a_screen_around_the_whole_picture(percent):
    picture = np.zeros((60, 80, 3), np.uint8)
    picture[..., 0] = 255
    found = copy("screenshot", percent, picture).astype(int)
    red = (found[..., 0] > 180) & (found[..., 1] < 90)
    assert red.sum() == pytest.approx((1 - percent / 100) * red.size, rel=0.1)
