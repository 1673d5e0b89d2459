"""The order of 10^9 images in 10^6 shards, of which there is only the catalogue."""

import numpy as np
import pytest

from benchmarks.catalogues import SHARD, simulate, simulated_sampler, write_catalogue
from dino_vit.data.catalogue import Catalogue
from dino_vit.data.sources.catalogued import catalogued

IMAGES = 10**9


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("catalogue") / "catalogue.arrow"
    write_catalogue(path, IMAGES)
    return path


@pytest.fixture(scope="module")
def source(path):
    return catalogued(Catalogue("s3://nowhere", path), stamp="")


@pytest.mark.slow
def test_each_image_of_a_shard_comes_once_in_the_window_that_it_is_in(source):
    sampler = simulated_sampler(source)
    order = sampler.build_order()
    shards, begins = order._shuffled(0)
    first = np.empty_like(begins)
    first[shards] = begins
    last = int(np.argmax(first))  # continues at the start of the epoch
    for shard in (0, 123_456, last):
        start, stop = max(0, first[shard] - 10 * SHARD), min(IMAGES, first[shard] + 40 * SHARD)
        images = order.take(0, start, stop)
        if shard == last:
            images = np.concatenate([images, order.take(0, 0, 40 * SHARD)])
        own = images[(images // SHARD) == shard]
        assert sorted(own.tolist()) == list(range(shard * SHARD, (shard + 1) * SHARD))


@pytest.mark.slow
def test_a_host_holds_less_than_a_gigabyte(path):
    figures = [simulate(path, copies_shards) for copies_shards in (True, False)]
    assert path.stat().st_size + figures[0]["memory"] + 7 * figures[1]["memory"] < 0.8e9
