from operator import attrgetter

import numpy as np
import pytest
import torch

from dino_vit.data.images.pixels import RGB, Pixels
from dino_vit.data.statistics import channel_statistics, inspect_images
from tests.support.images import npy, saved, smooth, tiff


class Items:
    """A source of given items."""

    def __init__(self, *items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def read(self, index):
        return self.items[index]

    def size(self, index):
        return 0

    def name(self, index):
        return f"{index}.png"


def test_images_are_seen_as_they_are():
    deep = np.zeros((4, 5), np.uint16)
    source = Items(
        saved(smooth("L"), "PNG"),
        saved(smooth("RGBA"), "PNG"),
        saved(smooth("LA"), "PNG"),
        tiff(np.zeros((9, 7, 4), np.uint8), photometric="rgb", extrasamples=[0]),
        npy(deep),
        torch.zeros(2, 6, 8),
        b"",
    )
    seen = inspect_images(source, range(7))
    fields = attrgetter("height", "width", "channels", "alpha", "kind", "format")
    assert [fields(image) for image in seen.images] == [
        (20, 30, 1, False, "uint8", "PNG"),
        (20, 30, 3, True, "uint8", "PNG"),
        (20, 30, 1, True, "uint8", "PNG"),
        (9, 7, 4, False, "uint8", "TIFF"),  # the fourth is not alpha
        (4, 5, 1, False, "uint16", "npy"),
        (6, 8, 2, False, "float32", "array"),
    ]
    assert [str(image) for image in seen.unreadable] == ["6.png: the file is empty"]
    assert (seen.bits, seen.image_size) == (16, 13)
    said = seen.describe(RGB)
    for part in (
        "6 images inspected: ",
        "1 RGB with alpha (uint8)",
        "2 lose their alpha channel",
        "3 repeated from grey to RGB",
        "1 scaled down to 8 bits",
        "2 cannot be converted to data.channels=3 and count as unreadable",
        "1 cannot be read (unreadable.txt lists all that the run meets):\n  6.png: the file is empty",
    ):
        assert part in said
    kept = seen.describe(Pixels(channels=4, bits=16))
    assert "lose" not in kept
    assert "scaled" not in kept


def test_what_fits_is_what_can_be_converted():
    """`ImageInfo.fits` predicts what `Pixels.conform` does."""
    files = {mode: saved(smooth(mode), "PNG") for mode in ("L", "LA", "RGB", "RGBA")}
    for mode, data in files.items():
        for channels in range(1, 6):
            (image,) = inspect_images(Items(data), [0]).images
            usable = True
            try:
                channel_statistics(Items(data), [0], Pixels(channels=channels))
            except ValueError:
                usable = False
            assert image.fits(channels) == usable, (mode, channels)


@pytest.mark.parametrize("bits", [8, 16])
def test_mean_and_std_are_those_of_a_loop_in_which_each_image_counts_the_same(bits):
    generator = np.random.default_rng(0)
    arrays = [generator.integers(0, 65536, (5, 8 + 3 * n, 9)).astype(np.uint16) for n in range(6)]
    arrays[0] //= 2
    found = channel_statistics(Items(*map(npy, arrays)), range(6), Pixels(channels=5, bits=bits))
    levels = [np.rint(array / 257) / 255 if bits == 8 else array / 65535 for array in arrays]
    mean = np.mean([[plane.mean() for plane in array] for array in levels], axis=0)
    square = np.mean([[(plane**2).mean() for plane in array] for array in levels], axis=0)
    assert found.mean == pytest.approx(mean, rel=1e-5)
    assert found.std == pytest.approx(np.sqrt(square - mean**2), rel=1e-4)
    assert found.highest == pytest.approx(max(array.max() for array in levels))
    assert found.images == 6


def test_what_cannot_be_used_is_left_out_unless_it_is_all():
    grey = torch.full((1, 4, 4), 51, dtype=torch.uint8)
    found = channel_statistics(Items(grey, torch.zeros(5, 4, 4), b""), range(3), RGB)
    assert found.mean == pytest.approx((0.2,) * 3)
    assert found.images == 1
    with pytest.raises(ValueError, match=r"none of 1 image .* 0.png: the number of channels is 5"):
        channel_statistics(Items(torch.zeros(5, 4, 4)), [0], RGB)
    with pytest.raises(ValueError, match=r"none of 1 image can be used, such as 0.png: the file is empty"):
        inspect_images(Items(b""), [0])


def test_likeness_is_the_mean_correlation_of_two_images():
    random = np.random.default_rng(0)
    shared = random.integers(0, 120, (16, 16, 1))
    images = [(shared + random.integers(0, 120, (16, 16, 3))).astype(np.uint8) for _ in range(9)]
    light = [image.mean(axis=2).ravel() for image in images]  # as large as the layout, so none is reduced
    pairs = np.corrcoef(light)[np.triu_indices(9, 1)]
    seen = inspect_images(Items(*map(npy, images)), range(9))
    assert 0.3 < pairs.mean() < 0.9
    assert seen.likeness == pytest.approx(pairs.mean(), abs=1e-5)
    plain = [np.full((20, 30, 3), value, np.uint8) for value in (0, 100, 255)]
    assert inspect_images(Items(*map(npy, plain)), range(3)).likeness == 0
