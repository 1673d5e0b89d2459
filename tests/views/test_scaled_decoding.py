"""JPEGs that are decoded no larger than their views need them."""

from functools import cache

import numpy as np
import pytest
import torch
from PIL import Image

from dino_vit.data.images.decode import decode
from dino_vit.data.stores.files import open_folder
from dino_vit.views.geometry import View, ViewBoxes, crop_views, draw_box_numbers
from dino_vit.views.loader import Loader
from dino_vit.views.sampler import Sampler
from tests.support.images import saved

VIEWS = (View(size=(32, 24), scale=(0.4, 1.0)), View(size=(16, 16), scale=(0.05, 0.4)))


@cache
def photo(mode="RGB", size=(896, 704), seed=0):
    """Return a picture with detail of many scales, which a shift or a turn would change."""
    random = np.random.default_rng(seed)
    bands = []
    for _ in mode:
        coarse = random.integers(0, 256, (9, 12), dtype=np.uint8)
        bands.append(Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC))
    return bands[0] if len(bands) == 1 else Image.merge(mode, bands)


def box_draws(sample=0, views=VIEWS):
    return draw_box_numbers(views, seed=3, epoch=1, samples=np.array([sample]))[0]


def both(data, sample=0):
    """Return the views of an image decoded as it is and of the reduced one, and the sizes of both.

    The boxes of the whole image are where those of the reduced one come to lie in it.
    """
    cut = ViewBoxes(VIEWS, box_draws(sample))
    whole, reduced = decode(data, "photo"), decode(data, "photo", reduction=cut.reduction)
    boxes = cut.boxes(reduced)
    factor = round(whole.shape[1] / reduced.shape[1])
    made = [
        [crop_views(image, image_boxes[[index]], view.size) for index, view in enumerate(VIEWS)]
        for image, image_boxes in ((whole, boxes * factor), (reduced, boxes))
    ]
    return *made, whole.shape, reduced.shape


def test_each_pixel_of_a_view_has_one_of_the_image():
    random, found = np.random.default_rng(0), set()
    for sample in range(300):
        height, width = random.integers(20, 900, 2).tolist()
        cut = ViewBoxes(VIEWS, box_draws(sample))
        factor = cut.reduction(height, width)
        found.add(factor)
        for view, (top, left, h, w) in zip(VIEWS, cut.boxes(None).tolist(), strict=True):
            if factor > 1:
                assert h >= view.size[0]
                assert w >= view.size[1]
            assert 0 <= top <= top + h <= -(-height // factor)
            assert 0 <= left <= left + w <= -(-width // factor)
    assert found == {1, 2, 4, 8}


@pytest.mark.parametrize(("mode", "orientation"), [*(("RGB", number) for number in range(1, 9)), ("L", 6)])
def test_views_show_what_those_of_the_whole_image_show(mode, orientation):
    exif = Image.Exif()
    exif[274] = orientation
    data = saved(photo(mode), "JPEG", quality=95, exif=exif)
    for sample in range(3):
        whole, reduced, size, reduced_size = both(data, sample)
        assert reduced_size[1] < size[1] / 1.9
        assert (size[1] > size[2]) == (reduced_size[1] > reduced_size[2]) == (orientation >= 5)
        for ours, theirs in zip(reduced, whole, strict=True):
            assert (ours.float() - theirs.float()).abs().mean() < 2  # of a turned one: about 80


def test_what_cannot_be_reduced_is_decoded_as_ever():
    small = saved(photo(size=(60, 50)), "JPEG")
    large = photo()
    for data in (small, saved(large, "PNG"), saved(large.convert("CMYK"), "JPEG")):
        whole, reduced, size, reduced_size = both(data)
        assert size == reduced_size
        assert all(torch.equal(*pair) for pair in zip(whole, reduced, strict=True))


def test_batches_are_functions_of_the_sample_in_any_worker(tmp_path):
    for number in range(6):
        photo(size=(700 - 90 * number, 600), seed=number).save(tmp_path / f"{number}.jpg")
    photo().save(tmp_path / "6.png")
    source = open_folder(tmp_path)

    def batch(**settings):
        sampler = Sampler(length=7, global_batch=7, seed=7)
        batches = Loader(source=source, views=VIEWS, sampler=sampler, **settings).batches()
        found = next(batches)
        batches.close()
        return found

    exact, scaled = batch(), batch(scaled_decoding=True)
    for size, views in batch(scaled_decoding=True, workers=2).views.items():
        assert torch.equal(views, scaled.views[size])
        difference = (views.float() - exact.views[size].float()).abs().mean()
        assert 0 < difference < 10  # the boxes are rounded to reduced pixels
