"""Several orders in one: their shares, and that any part of it is what the whole has there."""

from itertools import islice

import numpy as np
import pytest

from dino_vit.core.randomness import RngPurpose, random_uniform
from dino_vit.views.sampler import GlobalOrder, MixedOrder, Sampler, ShardUses, WindowOrder

LENGTHS, COUNTS = (300, 1000, 50), (300, 450, 7)
STARTS = [0, 300, 1300, 1350]
SHARDS = np.arange(0, 1001, 50)  # where they begin


def mixed(seed=3):
    orders = [GlobalOrder(300, seed), WindowOrder(SHARDS, seed, 3), GlobalOrder(50, seed)]
    return MixedOrder(orders, COUNTS, STARTS, seed)


def naive(order, epoch):
    """Sort all images of an epoch by when they come."""
    items = []
    for number, (each, count) in enumerate(zip(order.orders, COUNTS, strict=True)):
        late = random_uniform(order.seed, RngPurpose.MIX, epoch, number, np.arange(count)).tolist()
        images = each.take(epoch, 0, count).tolist()
        items += [((j + late[j]) / count, number, STARTS[number] + images[j]) for j in range(count)]
    return [image for *_, image in sorted(items)]


@pytest.mark.parametrize("epoch", [0, 5])
def test_any_part_of_a_mix_is_what_all_of_it_has_there(epoch):
    order, expected = mixed(), naive(mixed(), epoch)
    assert order.take(epoch, 0, order.length).tolist() == expected
    for start, stop in ((0, 1), (0, 64), (10, 11), (333, 400), (700, 757), (756, 757), (5, 5)):
        assert order.take(epoch, start, stop).tolist() == expected[start:stop]


def test_no_image_comes_twice_in_an_epoch_and_shares_are_kept_all_along():
    order = mixed()
    images = order.take(2, 0, order.length)
    assert len(set(images.tolist())) == order.length == sum(COUNTS)
    number = np.searchsorted(STARTS, images, side="right") - 1
    assert np.bincount(number).tolist() == list(COUNTS)
    for stop in range(0, order.length, 50):
        for each, count in enumerate(COUNTS):
            assert abs(np.count_nonzero(number[:stop] == each) - stop * count / order.length) <= 3


def test_an_image_of_the_same_source_stands_in_for_one_that_cannot_be_read():
    sampler = Sampler(length=sum(COUNTS), global_batch=24, seed=3, mixed=mixed())
    for sample in (0, 299, 300, 1299, 1300, 1349):
        number = int(np.searchsorted(STARTS, sample, side="right"))
        others = list(sampler.replacements(sample, 10))
        assert all(STARTS[number - 1] <= other < STARTS[number] for other in others)


@pytest.mark.parametrize("position", [0, 9, 25, 30, 31])
def test_shards_of_a_mix_are_asked_for_in_time(position):
    sampler = Sampler(length=sum(COUNTS), global_batch=24, seed=3, mixed=mixed())
    uses = ShardUses(sampler, 20, 1).next(position)
    sequence = np.concatenate([spec.samples for spec in islice(sampler.batch_specs(position), 50)])
    shards = np.where((sequence >= 300) & (sequence < 1300), (sequence - 300) // 50, -1)
    for shard in range(20):
        places = np.flatnonzero(shards == shard)
        if len(places) and places[0] < 31 * 24:  # in this epoch or the next
            assert uses[shard] <= places[0] + 150, shard
