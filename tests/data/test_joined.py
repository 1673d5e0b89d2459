"""Several sources are one table, with splits and labels of their own."""

from itertools import islice

import numpy as np
import pytest

from dino_vit.config.loading import load
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.data.open import open_source
from dino_vit.views.build import shard_starts
from dino_vit.views.sampler import Sampler, ShardUses
from tests.support.image_sets import write_folder, write_tar
from tests.support.images import write_synthetic
from tests.support.remote import write_shards
from tests.support.training import assert_resumes_exactly


@pytest.fixture
def sources(tmp_path):
    write_folder(tmp_path / "labelled")
    write_tar(tmp_path / "plain" / "a.tar", {f"{number}.png": b"%d" % number for number in range(20)})
    return [str(tmp_path / "plain"), str(tmp_path / "labelled")]


def test_a_window_walks_through_the_shards_of_all_sources(tmp_path, sources):
    for name in ("first", "second"):
        files = {f"{name}{number}.png": b"%d" % number for number in range(50)}
        write_tar(tmp_path / "shards" / f"{name}.tar", files)
    parts = open_source([*sources, str(tmp_path / "shards")]).parts
    starts = shard_starts(parts)
    assert starts.tolist() == [0, 20, *range(21, 25), 25, 75, 125], "a file is a shard of its own"
    sampler = Sampler(length=125, global_batch=5, seed=0, shard_starts=starts, window=1)
    assert sorted(sampler.order(1)) == list(range(125))
    for position in (0, 9, 20, 24):
        images = np.concatenate([spec.samples for spec in islice(sampler.batch_specs(position), 50)])
        uses = ShardUses(sampler, 2, first=6).next(position)
        for shard, use in enumerate(uses.tolist()):
            first, end = starts[6 + shard : 8 + shard]
            assert use - 50 <= np.flatnonzero((images >= first) & (images < end))[0]
    by_image = Sampler(length=125, global_batch=5, seed=0)
    assert ShardUses(by_image, 2, first=6).next(3).tolist() == [0, 0]


def test_a_run_of_two_sources_resumes_bit_for_bit(tmp_path, capsys, caplog):
    caplog.set_level("INFO", "dino_vit")  # at which a run shows its lines
    write_shards(tmp_path / "shards", 4, 16)
    for number in range(32):
        write_synthetic(tmp_path / "photos" / ("cat", "dog")[number % 2] / f"{number}.png", number)
    settings = {"data.source": f"[{tmp_path}/shards, {tmp_path}/photos]"}
    settings |= {"data.order": "window", "data.window": 2, "compute.eval_every": 1}
    assert_resumes_exactly(tmp_path, {**settings, "budget.steps": 20}, step=14)
    said = capsys.readouterr().err
    assert f"96 images of {tmp_path}/shards, {tmp_path}/photos" in said
    assert "k-NN" in said, "by the images that have labels"


def test_a_file_of_labels_is_for_one_source():
    settings = {"data.source": "[a, b]", "data.labels": "x.csv"}
    with pytest.raises(ValueError, match=r"data.labels=x\.csv is a file for one source"):
        load(PretrainConfig, None, [f"{key}={value}" for key, value in settings.items()])
