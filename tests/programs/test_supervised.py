"""Batches of augmented images, and the classes that go with them."""

from contextlib import closing
from itertools import islice

import pytest
import torch
from PIL import Image

from dino_vit.config.commands import SupervisedConfig
from dino_vit.data.open import open_source
from dino_vit.eval.sets import open_sets, open_subset
from dino_vit.features.frozen import FrozenBackbone
from dino_vit.views.eval_transform import EvalTransform
from dino_vit.views.geometry import View, ViewAugment
from supervised import SupervisedLoader
from tests.support.backbones import backbone


def feed_of(train, batch_size, **settings):
    """Return a loader that leaves images as they are, but for their size."""
    transform = EvalTransform(size=(8, 8), mean=(0.0,) * 3, std=(1.0,) * 3)
    frozen = FrozenBackbone(model=backbone(), transform=transform, batch_size=batch_size)
    view = View(size=(8, 8), scale=(1.0, 1.0), augment=ViewAugment(jitter=0, grey=0, blur=0))
    return SupervisedLoader(train, frozen, view=view, seed=0, workers=0, **settings)


def test_an_image_that_replaces_another_brings_its_own_class(tmp_path):
    """Every image is as bright as its class says."""
    for label in range(3):
        (tmp_path / str(label)).mkdir()
        for number in range(8):
            Image.new("RGB", (16, 16), (100 * label,) * 3).save(tmp_path / str(label) / f"{number}.png")
    for label in range(3):
        (tmp_path / str(label) / "0.png").write_bytes(b"no image")
    train = open_subset(str(tmp_path), open_source(str(tmp_path)))
    feed = feed_of(train, 50)
    assert (feed.global_batch, feed.steps_per_epoch) == (24, 1), "no more than there are"
    with closing(feed.batches()) as batches:
        for images, targets in islice(batches, 3):
            brightness = images.mean(dim=(1, 2, 3)) * 255 / 100
            torch.testing.assert_close(brightness, targets.float(), atol=1e-3, rtol=0)


@pytest.mark.parametrize("keep_last", [False, True])
def test_the_last_incomplete_batch_is_dropped_or_kept(keep_last):
    train, _ = open_sets(SupervisedConfig(source="synthetic:75:16"))
    feed = feed_of(train, 32, keep_last=keep_last)
    assert len(train) == 60
    with closing(feed.batches()) as batches:
        sizes = [len(targets) for _, targets in islice(batches, 3)]
    assert (feed.steps_per_epoch, sizes) == ((2, [32, 28, 32]) if keep_last else (1, [32] * 3))
