import numpy as np
import pytest
import torch

from dino_vit.data.sources.open import open_source
from dino_vit.data.sources.synthetic import make_scenes

SCENES = make_scenes(length=300, size=64)


def test_an_image_and_its_mask_have_two_to_five_classes_of_free_shape():
    counts = [len(SCENES.store.mask(index).unique()) for index in range(300)]
    assert set(counts) == {2, 3, 4, 5}
    image, mask = SCENES.read(0), SCENES.store.mask(0)
    assert (image.shape, image.dtype) == ((3, 64, 64), torch.uint8)
    assert (mask.shape, mask.dtype) == ((64, 64), torch.uint8)
    assert mask.max() < len(SCENES.classes)
    borders = [(m[:, 1:] != m[:, :-1]).float().mean() for m in map(SCENES.store.mask, range(100))]
    assert 0.01 < np.mean(borders) < 0.1  # a few borders a row, no noise


def test_scenes_are_a_function_of_seed_and_index():
    again = make_scenes(length=5, size=64)
    assert torch.equal(again.read(4), SCENES.read(4))
    assert torch.equal(again.store.mask(4), SCENES.store.mask(4))
    other = make_scenes(length=5, size=64, seed=1)
    assert not torch.equal(other.read(4), SCENES.read(4))


def test_they_open_by_name():
    opened = open_source("synthetic:scenes:7:48")
    assert len(opened) == 7
    assert opened.read(0).shape == (3, 48, 48)
    assert opened.fingerprint != open_source("synthetic:7:48").fingerprint
    assert len(open_source("synthetic:scenes")) == 20_000
    for spec in ("synthetic:scenes:big", "synthetic:7:48:20"):
        with pytest.raises(ValueError, match="is not valid: write synthetic"):
            open_source(spec)


@pytest.mark.parametrize("count", [2, 20, 150])
def test_they_have_as_many_classes_as_asked_for(count):
    scenes = open_source(f"synthetic:scenes:300:16:{count}")
    assert len(scenes.classes) == len(set(scenes.classes)) == count
    masks = map(scenes.store.mask, range(300))
    assert {int(value) for mask in masks for value in mask.unique()} == {*range(count)}
    assert scenes.read(0).shape == (3, 16, 16)
    assert scenes.fingerprint != make_scenes(length=300, size=16).fingerprint
    with pytest.raises(ValueError, match="scenes have 2 to 255 classes, not 256"):
        open_source("synthetic:scenes:300:16:256")
