"""Disturbed images: what is random in them, and what they are beside those of the source."""

import numpy as np
import pytest
import torch

from dino_vit.data.images.decode import UnreadableImage
from dino_vit.data.sources.synthetic import SyntheticSource
from dino_vit.eval.disturbances.source import Disturbance, DisturbedSource
from dino_vit.views.preparation import Preparation


def add_noise(picture, strength, generator):
    noise = generator.normal(size=picture.shape) * strength
    return np.clip(picture + noise, 0, 255).astype(np.uint8)


def disturbed(strength=9.0, kind="noise", seed=0, **settings):
    return DisturbedSource(
        SyntheticSource(length=6), Disturbance(kind, strength, add_noise), seed=seed, **settings
    )


def test_noise_is_a_function_of_seed_kind_and_place():
    first, again = disturbed(), disturbed()
    assert torch.equal(first.read(3), again.read(3))
    plain = SyntheticSource(length=6).read(3)
    for other in (disturbed(seed=1), disturbed(kind="more noise"), disturbed(strength=3.0)):
        assert not torch.equal(other.read(3), first.read(3))
        assert other.fingerprint != first.fingerprint
    weak, strong = (
        disturbed(strength=1.0).read(3).int() - plain,
        disturbed(strength=4.0).read(3).int() - plain,
    )
    inside = (plain > 20) & (plain < 235)
    assert (strong - 4 * weak)[inside].abs().max() <= 4  # the same noise, but for rounding
    assert (first.label(3), first.name(3)) == (SyntheticSource(length=6).label(3), first.source.name(3))


def test_a_preparation_comes_first_and_is_not_repeated():
    preparation = Preparation(size=(24, 24), mean=(0.5,) * 3, std=(0.5,) * 3)
    source = disturbed(preparation=preparation)
    whole = Preparation(size=(24, 24), mean=(0.5,) * 3, std=(0.5,) * 3, fit="whole")
    assert source.read(0).shape == (3, 24, 24)
    assert torch.equal(whole.read(source, 0), source.read(0))


def test_an_image_that_cannot_be_read_keeps_its_reason():
    source = disturbed()
    source.source.read = lambda index: b"no image"
    with pytest.raises(OSError, match="it is not a JPEG"):
        source.read(0)
    with pytest.raises(UnreadableImage, match="it is not a JPEG"):
        Preparation(size=(8, 8), mean=(0.5,) * 3, std=(0.5,) * 3).read(source, 0)
