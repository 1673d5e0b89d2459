import numpy as np
import pytest
import torch

from dino_vit.data.images.pixels import RGB, Pixels, unit_scale

GREY16 = Pixels(channels=1, bits=16)


def image(values, dtype=torch.uint8):
    return torch.tensor(values, dtype=torch.float64).to(dtype).reshape(1, 1, -1)


def test_eight_bits_of_the_right_channels_are_left_alone():
    picture = torch.randint(0, 256, (3, 4, 5), dtype=torch.uint8)
    assert RGB.conform(picture) is picture


def test_grey_becomes_rgb_by_repetition_and_nothing_else_is_made_up():
    grey = torch.randint(0, 256, (1, 4, 5), dtype=torch.uint8)
    assert torch.equal(RGB.conform(grey), torch.cat([grey, grey, grey]))
    for channels, wanted in ((3, 1), (4, 3), (2, 3), (5, 3), (1, 5), (3, 5)):
        with pytest.raises(ValueError, match=f"number of channels is {channels}, but must be {wanted}"):
            Pixels(channels=wanted).conform(torch.zeros(channels, 4, 5, dtype=torch.uint8))


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "bool"])
def test_zero_to_the_largest_value_becomes_zero_to_one(dtype):
    dtype = getattr(torch, dtype)
    top = 1 if dtype == torch.bool else torch.iinfo(dtype).max
    values = torch.from_numpy(np.array([0, top // 3, top])).to(dtype).reshape(1, 1, 3)
    expected = torch.tensor([[[0, (top // 3) / top, 1]]], dtype=torch.float64)
    deep, shallow = GREY16.conform(values), Pixels(channels=1).conform(values)
    assert deep.dtype == torch.float32
    assert torch.equal(deep, expected.float())
    assert shallow.dtype == torch.uint8
    assert torch.equal(shallow, (255 * expected).round().to(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_floats_go_from_zero_to_one(dtype):
    values = image([0, 0.25, 1], dtype)
    before = values.clone()
    assert torch.equal(GREY16.conform(values), values.float())
    assert torch.equal(Pixels(channels=1).conform(values), image([0, 64, 255]))
    assert torch.equal(values, before)


def test_a_range_stretches_and_clips():
    pixels = Pixels(channels=1, bits=16, range=(-1000, 3000))
    assert torch.equal(
        pixels.conform(image([-2000, -1000, 0, 3000, 9000], torch.int16)),
        image([0, 0, 0.25, 1, 1], torch.float32),
    )
    eight = Pixels(channels=1, range=(0, 100))
    assert torch.equal(eight.conform(image([0, 50, 100, 200])), image([0, 128, 255, 255]))


@pytest.mark.parametrize(
    ("values", "dtype", "reason"),
    [
        (
            [-5, 3],
            torch.int16,
            r"its int16 values go from -5 to 3, beyond 0 to 32767; .* data.range=\[low, high\]",
        ),
        ([0, 1.5], torch.float32, "its float32 values go from 0 to 1.5, beyond 0 to 1"),
        ([0, float("nan")], torch.float32, "infinite or NaN"),
        ([0, float("inf")], torch.float32, "infinite or NaN"),
    ],
)
def test_what_has_no_place_between_zero_and_one_is_refused(values, dtype, reason):
    with pytest.raises(ValueError, match=reason):
        GREY16.conform(image(values, dtype))


def test_eight_bits_among_deeper_ones_are_not_taken_for_black():
    with pytest.raises(ValueError, match=r"its 8 bits cannot reach data.range=\[0, 4095\]"):
        Pixels(channels=1, bits=16, range=(0, 4095)).conform(image([0, 255]))


def test_unit_scale_takes_both_and_owns_what_it_gives():
    eight, deep = torch.tensor([0, 51, 255], dtype=torch.uint8), torch.tensor([0, 0.2, 1])
    assert torch.equal(unit_scale(eight), deep)
    assert torch.equal(unit_scale(deep), deep)
    assert unit_scale(deep) is not deep


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64", "uint64"])
def test_the_white_of_wide_integers_is_that_of_the_bits_whatever_an_image_holds(dtype):
    def wide(*values):
        return torch.from_numpy(np.array(values, dtype=dtype)).reshape(1, 1, -1)

    assert torch.equal(Pixels(channels=1).conform(wide(0, 85, 255)), image([0, 85, 255]))
    dark, bright = GREY16.conform(wide(0, 200)), GREY16.conform(wide(200, 65535))
    assert dark[0, 0, 1] == bright[0, 0, 0] == torch.tensor(200 / 65535)
    for pixels, white in ((Pixels(channels=1), 255), (GREY16, 65535)):
        with pytest.raises(ValueError, match=rf"beyond 0 to {white}; set data.range=\[low, high\]"):
            pixels.conform(wide(0, white + 1))
