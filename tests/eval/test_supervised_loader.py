from contextlib import closing
from itertools import islice

import torch
from PIL import Image

from dino_vit.eval.datasets import open_sets
from dino_vit.eval.supervised_loader import SupervisedLoader
from dino_vit.views.geometry import View
from dino_vit.views.preparation import Preparation


def test_an_image_that_replaces_another_brings_its_own_class(tmp_path):
    """Every image is as bright as its class says."""
    for label in range(3):
        (tmp_path / str(label)).mkdir()
        for number in range(8):
            Image.new("RGB", (16, 16), (100 * label,) * 3).save(tmp_path / str(label) / f"{number}.png")
    for label in range(3):
        (tmp_path / str(label) / "0.png").write_bytes(b"no image")
    sets = open_sets(str(tmp_path), train=str(tmp_path))
    feed = SupervisedLoader(
        sets.train,
        view=View(size=(8, 8), scale=(1.0, 1.0)),
        preparation=Preparation(size=(8, 8), mean=(0.0,) * 3, std=(1.0,) * 3),
        batch_size=50,
        seed=0,
        workers=0,
        device=torch.device("cpu"),
    )
    assert (feed.global_batch, feed.steps_per_epoch) == (24, 1), "no more than there are"
    with closing(feed.batches()) as batches:
        for images, targets in islice(batches, 3):
            brightness = images.mean(dim=(1, 2, 3)) * 255 / 100
            torch.testing.assert_close(brightness, targets.float(), atol=1e-3, rtol=0)
