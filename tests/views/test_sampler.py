from itertools import islice

import numpy as np
import pytest

from dino_vit.core.randomness import RngPurpose, random_bits, random_uniform
from dino_vit.views import sampler as module
from dino_vit.views.sampler import Sampler, ShardUses


def take(sampler, position, count):
    return [
        (plan.epoch, plan.step, plan.samples.tolist())
        for plan in islice(sampler.batch_specs(position), count)
    ]


def test_an_epoch_is_a_permutation_that_seed_and_epoch_decide():
    sampler = Sampler(length=1000, global_batch=10, seed=5)
    assert sorted(sampler.order(3)) == list(range(1000))
    assert (sampler.order(3) == Sampler(length=1000, global_batch=50, seed=5).order(3)).all()
    assert (sampler.order(3) != sampler.order(4)).mean() > 0.99
    assert (sampler.order(3) != Sampler(length=1000, global_batch=10, seed=6).order(3)).mean() > 0.99


@pytest.mark.parametrize(("world_size", "accumulate"), [(2, 1), (1, 3), (3, 2)])
def test_processes_and_micro_batches_share_the_images_of_a_step(world_size, accumulate):
    settings = {"length": 100, "global_batch": 12, "seed": 0}
    whole = take(Sampler(**settings), 5, 20)
    settings |= {"world_size": world_size, "accumulate": accumulate}
    ranks = [take(Sampler(**settings, rank=rank), 5, 20 * accumulate) for rank in range(world_size)]
    for step, (epoch, number, samples) in enumerate(whole):
        parts = [rank_parts[accumulate * step + micro] for micro in range(accumulate) for rank_parts in ranks]
        assert [sample for part in parts for sample in part[2]] == samples
        assert all(part[:2] == (epoch, number) for part in parts)


def test_a_position_is_all_that_resume_needs():
    sampler = Sampler(length=50, global_batch=8, seed=0)
    assert sampler.steps_per_epoch == 6
    all_steps = take(sampler, 0, 20)
    assert [step[:2] for step in all_steps] == [divmod(position, 6) for position in range(20)]
    for position in (1, 5, 6, 13):
        assert take(sampler, position, 20 - position) == all_steps[position:]


def test_any_other_image_stands_in_for_one_that_cannot_be_read():
    sampler = Sampler(length=4, global_batch=1, seed=0)
    assert {other for sample in range(20) for other in sampler.replacements(sample, 10)} == {0, 1, 2, 3}
    again, first, second = (list(sampler.replacements(sample, 10)) for sample in (7, 7, 8))
    assert again == first != second


SHARDS = np.repeat(np.arange(20, dtype=np.int32), 50)


def windowed(**settings):
    starts = np.concatenate([[0], np.cumsum(np.bincount(settings.pop("shards", SHARDS)))])
    fixed = {"length": 1000, "global_batch": 10, "seed": 5, "shard_starts": starts, "window": 4}
    return Sampler(**fixed | settings)


def naive_window_order(sampler, epoch, shards):
    """Return the order with which images lie at random within `window` shards from the first of their own."""
    shards, sizes = shards.tolist(), np.bincount(shards)
    span = min(4 * int(sizes @ sizes) // sampler.length, sampler.length)
    lots = random_bits(sampler.seed, RngPurpose.SHARDS, epoch, np.arange(max(shards) + 1)).tolist()
    uniform = random_uniform(sampler.seed, RngPurpose.WINDOW, epoch, np.arange(sampler.length)).tolist()
    keys = []
    for image, shard in enumerate(shards):
        before = sum(lots[other] < lots[shard] for other in shards)
        keys.append(((before + span * uniform[image]) % sampler.length, image))
    return [image for _, image in sorted(keys)]


UNEVEN = np.sort(np.arange(1000, dtype=np.int32) ** 2 % 17)


@pytest.mark.parametrize("block", [1, 60, 2**18])
@pytest.mark.parametrize("shards", [SHARDS, UNEVEN])
def test_the_window_order_is_a_permutation_that_seed_and_epoch_decide(shards, block, monkeypatch):
    """It is drawn in blocks, whose size changes nothing."""
    monkeypatch.setattr(module, "BLOCK", block)
    sampler = windowed(shards=shards)
    assert sampler.order(3).tolist() == naive_window_order(sampler, 3, shards)
    steps = [spec.samples for spec in islice(sampler.batch_specs(300 + 47), 53)]
    assert np.concatenate(steps).tolist() == sampler.order(3)[470:].tolist()
    assert sorted(sampler.order(3)) == list(range(1000))
    assert (sampler.order(3) == windowed(shards=shards, global_batch=50).order(3)).all()
    assert (sampler.order(3) != sampler.order(4)).mean() > 0.9


@pytest.mark.parametrize("position", [0, 1, 57, 98, 99, 250])
def test_each_shard_is_asked_for_before_it_is_needed_and_not_long_before(position):
    sampler = windowed()
    sequence = np.concatenate([spec.samples for spec in islice(sampler.batch_specs(position), 150)])
    uses = ShardUses(sampler, sampler.build_order(), 20, 0).next(position)
    for shard in range(20):
        needed = int(np.flatnonzero(SHARDS[sequence] == shard)[0])
        assert uses[shard] - 50 <= needed, shard
        if uses[shard]:  # one that has begun may have no image left
            assert needed <= uses[shard] + 100, shard


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_last_batch_that_is_kept_is_shared_evenly(world_size):
    """A process takes an image again where there are too few, as PyTorch's DistributedSampler."""
    keywords = {"length": 20, "global_batch": 12, "seed": 0, "world_size": world_size, "keep_last": True}
    ranks = [Sampler(**keywords, rank=rank).batch_specs() for rank in range(world_size)]
    for _ in range(2):
        steps = [[next(specs).samples for specs in ranks] for _ in range(2)]
        assert {len(part) for part in steps[0]} == {12 // world_size}
        assert {len(part) for part in steps[1]} == {-(-8 // world_size)}
        assert set(np.concatenate([part for step in steps for part in step])) == set(range(20))


def test_fewer_images_than_processes_are_shared_by_all():
    keywords = {"length": 3, "global_batch": 8, "seed": 0, "world_size": 8, "keep_last": True}
    batches = [next(Sampler(**keywords, rank=rank).batch_specs()).samples.tolist() for rank in range(8)]
    assert [len(batch) for batch in batches] == [1] * 8
    assert {image for (image,) in batches} == {0, 1, 2}
