"""The speed that is measured for a run of some minutes."""

import torch

from dino_vit.config.pretrain import PretrainConfig
from dino_vit.data.open import open_source
from dino_vit.data.statistics import inspect_images
from dino_vit.training.probe import measure_speed
from tests.support.training import configured


def speed_of(tmp_path, settings):
    config: PretrainConfig = configured(tmp_path / "run", {"data.bits": 8, **settings})
    source = open_source(config.data.source)
    return measure_speed(config, inspect_images(source, range(4)), len(source), torch.device("cpu"))


def test_every_part_of_a_step_takes_time(tmp_path):
    speed = speed_of(tmp_path, {"data.workers": 3})
    for times in speed.blocks:
        assert all(value > 0 for value in times[1:])
        assert times.trained > times.token
    for name in ("augment", "stem", "conv", "edges", "crop", "byte"):
        assert getattr(speed, name) > 0, name
    assert (speed.workers, speed.threads) == (3, torch.get_num_threads())


def test_other_pixels_and_modules_of_ones_own_are_measured_too(tmp_path):
    settings = {"data.channels": 2, "data.mean": [0.5, 0.5], "data.std": [0.2, 0.2], "data.bits": 16}
    settings |= {f"augment.{name}": 0 for name in ("saturation", "hue", "grey")}
    assert speed_of(tmp_path, settings).augment > 0


def test_views_smaller_than_a_patch_are_measured_too(tmp_path):
    assert speed_of(tmp_path, {"views.global_size": 4, "views.local_size": 2, "model.patch_size": 2}).stem > 0
