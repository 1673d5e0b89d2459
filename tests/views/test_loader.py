import os
from collections import deque
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from dino_vit.data.images.decode import read_image
from dino_vit.data.images.pixels import Pixels
from dino_vit.data.sources.open import FolderSource, SyntheticSource
from dino_vit.views import loader, times
from dino_vit.views.geometry import View, crop_views
from dino_vit.views.loader import SHARED, Loader, WorkerLost
from dino_vit.views.photometry import Augment
from dino_vit.views.sampler import Sampler
from tests.support.images import write_synthetic
from tests.support.runs import kill_a_loader
from tests.support.views import draw_boxes, draw_rows, views_of

AUGMENT = Augment(mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))
VIEWS = views_of(
    "model.patch_size=8",
    "views.global_size=[32, 24]",
    "views.local_size=16",
    "views.local_count=3",
    "photometry.noise=0.5",
)


def take(count, *, source=None, position=0, views=VIEWS, batch_size=8, sampler=None, **settings):
    """Return some batches of a loader that has the settings."""
    source = source or SyntheticSource(length=50)
    plan = Sampler(length=len(source), batch_size=batch_size, seed=7, **(sampler or {}))
    batches = Loader(source=source, views=views, sampler=plan, **settings).batches(position)
    taken = list(islice(batches, count))
    batches.close()
    return taken


@pytest.mark.skipif(not SHARED.exists(), reason="only Linux has it as a folder")
def test_batches_that_shared_memory_cannot_hold_are_refused_before_they_are_made():
    source = SyntheticSource(length=10**8)
    plan = Sampler(length=len(source), batch_size=10**8, seed=7)
    with pytest.raises(ValueError, match="use at most workers=0, or give the container more"):
        Loader(source=source, views=VIEWS, sampler=plan, workers=4)
    Loader(source=source, views=VIEWS, sampler=plan)  # this process needs to share with nobody


def test_a_killed_worker_is_a_sentence():
    source = SyntheticSource(length=500)
    plan = Sampler(length=500, batch_size=8, seed=7)
    batches = Loader(source=source, views=VIEWS, sampler=plan, workers=1).batches()
    next(batches)
    kill_a_loader()
    with pytest.raises(WorkerLost, match=r"ended by SIGKILL.*workers \(now 1\)") as caught:
        deque(batches, maxlen=0)
    assert caught.value.exit_code == 75


@pytest.mark.parametrize("accumulate", [1, 2])
def test_after_a_killed_worker_the_batches_are_the_same(accumulate):
    plan = Sampler(length=100, batch_size=8, seed=7, accumulate=accumulate)
    settings = {"source": SyntheticSource(length=100), "views": VIEWS, "sampler": plan}
    loader = Loader(**settings, workers=1, in_step=True)
    batches, expected = loader.batches(3), Loader(**settings).batches(3)
    for number in range(30):
        assert torch.equal(next(batches).samples, next(expected).samples)
        if number == 2:
            kill_a_loader()
    assert loader.lost_worker


@pytest.mark.skipif(not SHARED.exists(), reason="only Linux has it as a folder")
def test_the_processes_of_a_host_divide_its_shared_memory(monkeypatch):
    """However they were launched: srun sets no LOCAL_WORLD_SIZE."""
    source = SyntheticSource(length=10**8)
    of_one = Loader(source=source, views=VIEWS, sampler=Sampler(length=10**8, batch_size=1, seed=7))
    size = os.statvfs(SHARED).f_blocks * os.statvfs(SHARED).f_frsize
    batch = size // 4 // of_one.dataset.bytes_of_a_batch  # twice a quarter is a half
    half = {"source": source, "views": VIEWS, "sampler": Sampler(length=10**8, batch_size=batch, seed=7)}
    Loader(**half, workers=1)
    monkeypatch.setattr(loader, "local_world_size", lambda: 8)
    with pytest.raises(ValueError, match="use at most workers=0, or give the container more"):
        Loader(**half, workers=1)


@pytest.mark.skipif(not Path("/proc").exists(), reason="a file system that counts no blocks")
def test_shared_memory_without_a_bound_is_enough(monkeypatch):
    monkeypatch.setattr(loader, "SHARED", Path("/proc"))
    source = SyntheticSource(length=50)
    Loader(source=source, views=VIEWS, sampler=Sampler(length=50, batch_size=8, seed=7), workers=1)


@pytest.mark.parametrize("augment", [None, AUGMENT])
def test_a_batch_is_known_to_be_as_large_as_it_is(augment):
    plan = Sampler(length=50, batch_size=8, seed=7, world_size=2, accumulate=2)
    made = Loader(source=SyntheticSource(length=50), views=VIEWS, sampler=plan, augment=augment)
    batch = next(made.batches())
    assert made.dataset.bytes_of_a_batch == sum(view.nbytes for view in batch.views.values())


def same(one, other):
    return (
        (one.epoch, one.step) == (other.epoch, other.step)
        and torch.equal(one.samples, other.samples)
        and list(one.views) == list(other.views)
        and all(torch.equal(one.views[size], other.views[size]) for size in one.views)
        and list(one.photometry) == list(other.photometry)
        and all(torch.equal(one.photometry[size], other.photometry[size]) for size in one.photometry)
    )


def test_a_batch_is_what_its_parts_say():
    source = SyntheticSource(length=50)
    batch = take(1, position=8)[0]
    assert (batch.epoch, batch.step) == (1, 2)
    assert {size: tuple(views.shape) for size, views in batch.views.items()} == {
        (32, 24): (16, 3, 32, 24),
        (16, 16): (24, 3, 16, 16),
    }
    rows = draw_rows(VIEWS, seed=7, epoch=1, samples=batch.samples)
    for position, sample in enumerate(batch.samples.tolist()):
        boxes = draw_boxes(VIEWS, seed=7, epoch=1, sample=sample, height=32, width=32)
        for index, view in enumerate(VIEWS):
            row = (index if index < 2 else index - 2) * 8 + position  # view-major
            expected = crop_views(source.read(sample), boxes[index : index + 1], view.size)[0]
            assert torch.equal(batch.views[view.size][row], expected)
            assert torch.equal(batch.photometry[view.size][row], rows[position, index])


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes")
@pytest.mark.parametrize("workers", [1, 4])
def test_workers_change_nothing(workers):
    alone = take(9)  # into the second epoch
    assert all(map(same, alone, take(9, workers=workers)))


@pytest.mark.parametrize("augment", [None, AUGMENT])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_says_how_long_its_images_took(workers, augment):
    (batch,) = take(1, workers=workers, augment=augment)
    took = batch.times
    assert took.images == 8
    assert min(took.read, took.decode, took.cut) > 0
    assert (took.colour > 0) == (augment is not None)
    twice = took + took
    assert (twice.images, twice.read, twice.cut) == (16, 2 * took.read, 2 * took.cut)


def test_the_time_of_an_image_that_cannot_be_read_counts(monkeypatch):
    clock = iter([1.0, 3.0, 10.0, 15.0])
    monkeypatch.setattr(times.time, "perf_counter", lambda: next(clock))
    found = times.LoadTimes()
    with found.measure("read"):
        pass
    with pytest.raises(ValueError, match="damaged"), found.measure("read"):
        raise ValueError("damaged")
    assert found == times.LoadTimes(read=7.0)


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes")
@pytest.mark.parametrize("workers", [0, 1, 4])
def test_workers_colour_as_this_process_does(workers):
    expected = take(3)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for batch, done in zip(expected, take(3, augment=AUGMENT, workers=workers), strict=True):
            assert done.photometry == {}
            for size, cut in batch.views.items():
                assert torch.equal(done.views[size], AUGMENT(cut, batch.photometry[size]))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("workers", [0, 2])
def test_starting_anywhere_changes_nothing(workers):
    assert all(map(same, take(9)[4:], take(5, position=4, workers=workers)))


def test_two_processes_see_the_views_of_one():
    whole = take(3)
    parts = [take(3, sampler={"rank": rank, "world_size": 2}) for rank in range(2)]
    for step, batch in enumerate(whole):
        for size, views in batch.views.items():
            split = [part[step].views[size].unflatten(0, (-1, 4)) for part in parts]
            assert torch.equal(torch.cat(split, dim=1).flatten(0, 1), views)


def test_views_of_one_size_share_a_tensor_in_their_order():
    views = (
        View(size=(16, 16), scale=(0.4, 1.0)),
        View(size=(8, 8), scale=(0.4, 1.0)),
        View(size=(16, 16), scale=(0.1, 0.2)),
    )
    batch = take(1, views=views)[0]
    assert batch.views[16, 16].shape[0] == 16
    assert torch.equal(batch.views[16, 16][:8], take(1, views=views[:1])[0].views[16, 16])


def test_the_global_random_state_is_left_alone():
    before = torch.get_rng_state()
    take(1)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.fixture
def damaged(tmp_path):
    for number in range(30):
        write_synthetic(tmp_path / f"{number:02d}.png", number)
    (tmp_path / "03.png").write_bytes(b"")
    (tmp_path / "11.png").write_bytes(b"no image")
    return FolderSource(tmp_path)


def test_unreadable_images_are_replaced_by_rule_and_reported(damaged):
    batches = [take(5, source=damaged, batch_size=6, workers=workers) for workers in (0, 2)]
    for alone, together in zip(*batches, strict=True):
        assert same(alone, together)
        assert [str(error) for error in alone.unreadable] == [str(error) for error in together.unreadable]
    errors = [error for batch in batches[0] for error in batch.unreadable]
    assert {error.name for error in errors} == {"03.png", "11.png"}
    assert {error.reason for error in errors if error.name == "03.png"} == {"the file is empty"}
    for batch in batches[0]:
        assert len(batch.samples) == 6
        assert batch.views[16, 16].shape[0] == 18


@pytest.mark.parametrize("workers", [0, 1])
def test_an_unreachable_source_is_an_error(damaged, workers):
    for number in range(30):
        Path(damaged.root, f"{number:02d}.png").write_bytes(b"")
    with pytest.raises(ValueError, match=r"^11 randomly chosen images .* Check that the source is complete"):
        take(1, source=damaged, workers=workers)


def test_an_image_of_weight_0_is_never_read(damaged):
    weights = np.where(np.arange(30) < 15, 1.0, 0.0)
    batches = take(10, source=damaged, batch_size=6, sampler={"weights": weights})
    assert any(batch.unreadable for batch in batches)
    assert all((batch.read < 15).all() for batch in batches)


def test_a_batch_names_its_replacements(damaged):
    (view,) = whole = (View(size=(16, 16), scale=(0.9, 1.0), interpolation="bilinear"),)
    replaced = 0
    for batch in take(5, source=damaged, batch_size=6, views=whole):
        assert batch.read.dtype == torch.int64
        for position, (sample, read) in enumerate(
            zip(batch.samples.tolist(), batch.read.tolist(), strict=True)
        ):
            image = read_image(damaged, read)
            boxes = draw_boxes(whole, seed=7, epoch=batch.epoch, sample=sample, height=32, width=32)
            expected = crop_views(image, boxes, view.size, interpolation="bilinear")[0]
            assert torch.equal(batch.views[16, 16][position], expected)
            replaced += sample != read
    assert replaced == 2


def test_deep_images_are_cut_as_floats_from_zero_to_one():
    source = SyntheticSource(length=50)
    shallow = [source.read(number) for number in range(50)]
    source.read = lambda index: shallow[index].to(torch.uint16) * 257
    deep = take(2, source=source, pixels=Pixels(bits=16))
    for one, other in zip(deep, take(2), strict=True):
        for size, views in one.views.items():
            assert views.dtype == torch.float32
            assert 0 <= views.min() <= views.max() <= 1
            assert (views * 255 - other.views[size]).abs().max() < 1.5  # bytes are rounded twice
    assert all(map(same, deep, take(2, source=source, pixels=Pixels(bits=16), workers=1)))


def test_grey_images_are_converted_as_asked():
    source = SyntheticSource(length=50)
    planes = [source.read(number)[:1] for number in range(50)]
    whole = take(1)[0]
    source.read = lambda index: planes[index]
    assert same(take(1, source=source)[0], whole)
    one = take(1, source=source, pixels=Pixels(channels=1))[0]
    assert torch.equal(one.views[16, 16], whole.views[16, 16][:, :1])


def test_in_step_a_batch_that_cannot_be_filled_comes_with_its_failure(damaged):
    for number in range(1, 30):
        Path(damaged.root, f"{number:02d}.png").write_bytes(b"")
    batch = take(1, source=damaged, in_step=True)[0]
    assert "11 randomly chosen images cannot be read" in str(batch.failure)
    assert len(batch.unreadable) >= 11
    assert {size: len(views) for size, views in batch.views.items()} == {(32, 24): 16, (16, 16): 24}
