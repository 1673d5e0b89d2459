"""The time of a step, against a count in loops of all that it computes."""

import pytest

from dino_vit.config.facts import BlockTimes, RunFacts, Speed
from dino_vit.config.length import BETWEEN, evaluation_seconds, forward_flops, step_seconds
from dino_vit.config.loading import load
from dino_vit.config.pretrain import PretrainConfig
from tests.support.facts import facts_of

SETTINGS = [
    *("model.arch=null", "model.width=96", "model.depth=3", "model.heads=3", "model.patch_size=8"),
    *("views.global_size=32", "views.local_size=16", "views.local_count=5", "data.batch_size=7"),
    *("head.prototypes=100", "head.hidden_dim=50", "head.bottleneck_dim=20", "optim.accumulate=2"),
]
NOTHING = Speed((BlockTimes(96, *[1e-30] * 4), BlockTimes(192, *[1e-30] * 4)), *[0.0] * 6)


def config_of(*given: str) -> PretrainConfig:
    return load(PretrainConfig, None, ["data.source=photos", *SETTINGS, *given])


def facts(speed: Speed, seconds: float = 0.0) -> RunFacts:
    known = facts_of(images=1000, speed=speed)
    return RunFacts(images=type(known.images)(**{**vars(known.images), "seconds": seconds}), speed=speed)


def seconds(speed: Speed, *given: str, decoding: float = 0.0, are_decoded: bool = True) -> float:
    return step_seconds(config_of(*given), facts(speed, decoding), are_decoded=are_decoded) / BETWEEN


def blocks(*times: float) -> Speed:
    wide = (value * 2**power for value, power in zip(times, (2, 1, 2, 1), strict=True))
    return NOTHING._replace(blocks=(BlockTimes(96, *times), BlockTimes(192, *wide)))


@pytest.mark.parametrize(("drop", "kept"), [(0.0, 16), (0.75, 4)])
def test_tokens_and_pairs_of_all_sequences_are_counted(drop: float, kept: int) -> None:
    tokens = pairs = trained = trained_pairs = 0
    for _ in range(2 * 7):  # images of a step
        for _ in range(2):  # global views, of 4 x 4 patches and the CLS token
            tokens, pairs = tokens + 17, pairs + 17 * 17
            trained, trained_pairs = trained + 1 + kept, trained_pairs + (1 + kept) ** 2
        for _ in range(5):  # local views
            trained, trained_pairs = trained + 5, trained_pairs + 5 * 5
    given = f"model.patch_drop={drop}"
    times = (3e-6, 5e-8, 7e-6, 11e-8)
    counts = (tokens, pairs, trained, trained_pairs)
    two_and_a_part = 2.3 * sum(time * count for time, count in zip(times, counts, strict=True))
    # Heads: products of as many operations a second as those of a block.
    head = 96 * 50 + 50 * 50 + 50 * 20 + 20 * 100
    flops = 2 * head * (14 * (2 + 5) * 3 + 14 * 2)
    assert seconds(blocks(*times), given) == pytest.approx(two_and_a_part + flops * 3e-6 / (24 * 96**2))


def test_pixels_are_counted_where_they_are_read() -> None:
    views, global_views = 14 * (2 * 32**2 + 5 * 16**2), 14 * 2 * 32**2
    assert seconds(NOTHING._replace(augment=2e-8)) == pytest.approx(2e-8 * views)
    assert seconds(NOTHING._replace(crop=2e-8)) == pytest.approx(2e-8 * views)
    assert seconds(NOTHING._replace(stem=2e-8)) == pytest.approx(2e-8 * (3 * views + global_views))
    assert seconds(NOTHING._replace(edges=2e-8)) < 1e-12
    assert seconds(NOTHING._replace(edges=2e-8), "loss.edge_weight=1") == pytest.approx(2e-8 * global_views)


def test_a_width_between_those_that_were_measured_is_a_power_between() -> None:
    wide = [
        seconds(blocks(3e-6, *[1e-30] * 3), f"model.width={width}", "model.heads=4")
        for width in (96, 128, 192, 384)
    ]
    assert wide[0] < wide[1] < wide[2]
    assert wide[3] / wide[2] == pytest.approx(4, rel=0.1)  # the square of the width


@pytest.mark.parametrize(
    ("workers", "cores", "threads", "expected"),
    [
        (0, 1, 1, 5.0 + 3.0),
        (1, 2, 1, 5.0),  # of their own core
        (1, 2, 2, (2 * 5.0 + 3.0) / 2),  # both take turns
        (3, 16, 1, 5.0),
    ],
)
def test_workers_and_network_share_the_cores(workers: int, cores: int, threads: int, expected: float) -> None:
    views, speed = 14 * (2 * 32**2 + 5 * 16**2), {"workers": workers, "cores": cores, "threads": threads}
    assert seconds(NOTHING._replace(augment=5 / views, crop=3 / views, **speed)) == pytest.approx(expected)


def test_images_are_decoded_in_the_first_epoch_or_in_each() -> None:
    assert seconds(NOTHING, decoding=0.1) < 1e-12
    assert seconds(NOTHING, "data.scaled_decoding=false", decoding=0.1, are_decoded=False) == pytest.approx(
        1.4
    )


def test_an_evaluation_takes_as_long_as_its_images() -> None:
    config = config_of()
    known = facts(blocks(3e-6, 5e-8, 1e-30, 1e-30), seconds=0.1)
    for images in (10, 500):
        forward = 3 * 17 * (3e-6 + 17 * 5e-8)
        expected = images * max(forward, 0.1, forward + 0.1)  # on one core
        assert evaluation_seconds(config, known, images, is_first=False) == pytest.approx(expected)
        first = evaluation_seconds(config, known, images, is_first=True)
        assert first == pytest.approx(expected + 2 * images * 0.1)


def test_a_network_is_as_large_as_its_operations() -> None:
    small, large = (
        forward_flops(config_of()),
        forward_flops(config_of("model.depth=6", "model.width=192", "model.heads=6")),
    )
    assert 7 < large / small < 8
