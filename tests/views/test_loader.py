import gc
import multiprocessing
import os
import signal
import time
from collections import deque
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
import torch

from dino_vit.data import remote
from dino_vit.data.images.decode import read_image
from dino_vit.data.images.pixels import Pixels
from dino_vit.data.open import open_source
from dino_vit.data.remote import SourceLost
from dino_vit.data.stores.files import open_folder
from dino_vit.data.synthetic import make_textures
from dino_vit.views import loader
from dino_vit.views.geometry import crop_views
from dino_vit.views.loader import Loader
from dino_vit.views.sampler import Sampler
from tests.support.image_sets import with_read
from tests.support.images import write_synthetic
from tests.support.remote import serving
from tests.support.views import draw_boxes, draw_rows, views_of

VIEWS = views_of(
    "model.patch_size=8",
    "views.global_size=[32, 24]",
    "views.local_size=16",
    "views.local_count=3",
)


def take(count, *, source=None, position=0, views=VIEWS, batch_size=8, sampler=None, **settings):
    """Return some batches of a loader that has the settings."""
    source = source or make_textures(length=50)
    plan = Sampler(length=len(source), global_batch=batch_size, seed=7, **(sampler or {}))
    batches = Loader(source=source, views=views, sampler=plan, **settings).batches(position)
    taken = list(islice(batches, count))
    batches.close()
    return taken


# PyTorch notices the end of a worker anywhere, while it makes a temporary file too, which then complains.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_killed_worker_is_an_error():
    source = make_textures(length=500)
    plan = Sampler(length=500, global_batch=8, seed=7)
    batches = Loader(source=source, views=VIEWS, sampler=plan, workers=1).batches()
    next(batches)
    os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"^DataLoader worker .*(killed by signal|exited)"):
        deque(batches, maxlen=0)
    gc.collect()  # what complains does so here, not in the next test


def start_late(init, *arguments):
    time.sleep(arguments[-1])
    init(*arguments)


def test_workers_live_through_signals_until_the_loader_is_closed(monkeypatch):
    """A signal to all processes of a run must not take the workers, which the step still needs."""
    start = partial(start_late, loader.init_worker)  # the second is still starting when they come
    monkeypatch.setattr(loader, "init_worker", start)
    plan = Sampler(length=500, global_batch=8, seed=7)
    batches = Loader(source=make_textures(length=500), views=VIEWS, sampler=plan, workers=2).batches()
    next(batches)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        for worker in multiprocessing.active_children():
            os.kill(worker.pid, number)
    deque(islice(batches, 20), maxlen=0)
    batches.close()
    assert not multiprocessing.active_children()


def same(one, other):
    return (
        (one.epoch, one.step) == (other.epoch, other.step)
        and torch.equal(one.samples, other.samples)
        and list(one.views) == list(other.views)
        and all(torch.equal(one.views[size], other.views[size]) for size in one.views)
        and list(one.augment) == list(other.augment)
        and all(torch.equal(one.augment[size], other.augment[size]) for size in one.augment)
    )


def test_a_batch_is_what_its_parts_say():
    source = make_textures(length=50)
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
            assert torch.equal(batch.augment[view.size][row], rows[position, index])


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_and_starting_anywhere_change_nothing(workers):
    from_start = take(9)  # into the second epoch
    assert all(map(same, from_start, take(9, workers=workers)))
    assert all(map(same, from_start[4:], take(5, position=4, workers=workers)))


def test_two_processes_see_the_views_of_one():
    whole = take(3)
    parts = [take(3, sampler={"rank": rank, "world_size": 2}) for rank in range(2)]
    for step, batch in enumerate(whole):
        for size, views in batch.views.items():
            split = [part[step].views[size].unflatten(0, (-1, 4)) for part in parts]
            assert torch.equal(torch.cat(split, dim=1).flatten(0, 1), views)


@pytest.fixture
def damaged(tmp_path):
    for number in range(30):
        write_synthetic(tmp_path / f"{number:02d}.png", number)
    (tmp_path / "03.png").write_bytes(b"")
    (tmp_path / "11.png").write_bytes(b"no image")
    return open_folder(tmp_path)


def test_unreadable_images_are_replaced_by_rule_and_reported(damaged):
    batches = [take(5, source=damaged, batch_size=6, workers=workers) for workers in (0, 2)]
    for alone, together in zip(*batches, strict=True):
        assert same(alone, together)
        assert [str(error) for error in alone.unreadable] == [str(error) for error in together.unreadable]
    errors = [error for batch in batches[0] for error in batch.unreadable]
    assert {error.name for error in errors} == {"03.png", "11.png"}
    assert {error.reason for error in errors if error.name == "03.png"} == {"the file is empty"}
    for batch in batches[0]:
        assert batch.views[16, 16].shape[0] == 18
        for position, (sample, read) in enumerate(
            zip(batch.samples.tolist(), batch.read.tolist(), strict=True)
        ):
            assert (sample != read) == (sample in (3, 11))
            boxes = draw_boxes(VIEWS, seed=7, epoch=batch.epoch, sample=sample, height=32, width=32)
            expected = crop_views(read_image(damaged, read), boxes[2:3], (16, 16))[0]
            assert torch.equal(batch.views[16, 16][position], expected)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_unreachable_source_is_an_error(damaged, workers):
    for number in range(30):
        Path(damaged.store.root, f"{number:02d}.png").write_bytes(b"")
    with pytest.raises(ValueError, match=r"^11 randomly chosen images .* Check that the source is complete"):
        take(1, source=damaged, workers=workers)


def test_a_server_of_all_images_that_is_gone_asks_for_a_restart(damaged, tmp_path, monkeypatch):
    with serving(Path(damaged.store.root)) as server:
        urls = [f"{server.url}/{number:02d}.png" for number in range(30)]
        (tmp_path / "list.txt").write_text("\n".join(urls))
        source = open_source(str(tmp_path / "list.txt"))
        server.down = True
        monkeypatch.setattr(remote, "timeout_s", 0.1)
        with pytest.raises(SourceLost, match="could not be read for"):
            take(1, source=source)


def test_deep_images_are_cut_as_floats_from_zero_to_one():
    source = make_textures(length=50)
    shallow = [source.read(number) for number in range(50)]
    source = with_read(source, lambda index: shallow[index].to(torch.uint16) * 257)
    deep = take(2, source=source, pixels=Pixels(bits=16))
    for one, other in zip(deep, take(2), strict=True):
        for size, views in one.views.items():
            assert views.dtype == torch.float32
            assert 0 <= views.min() <= views.max() <= 1
            assert (views * 255 - other.views[size]).abs().max() < 1.5  # bytes are rounded twice
    assert all(map(same, deep, take(2, source=source, pixels=Pixels(bits=16), workers=1)))
