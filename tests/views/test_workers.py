"""What workers hand over, and how the process that waits for them finds out what became of them."""

import multiprocessing
import resource
import sys
import threading
import time
from itertools import islice

import pytest
import torch

from dino_vit.core.process import keep_freed_memory
from dino_vit.data.sources.synthetic import make_textures
from dino_vit.views import loader, workers
from dino_vit.views.loader import Loader
from dino_vit.views.sampler import Sampler
from dino_vit.views.workers import NoBatch
from tests.support.image_sets import with_read
from tests.support.runs import server
from tests.support.views import views_of

VIEWS = views_of("model.patch_size=8", "views.global_size=64", "views.local_count=0")


def odd(act):
    """Images of which one is not read but acts."""
    textures = make_textures(length=64)
    return with_read(textures, lambda index: act() if index == 5 else textures.read(index))


def loader_of(source, *, workers=2):
    plan = Sampler(length=len(source), batch_size=16, seed=7)
    return Loader(source=source, views=VIEWS, sampler=plan, workers=workers)


def read_without_shared_memory(failed):
    multiprocessing.set_start_method("fork", force=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # also of files in /dev/shm
    source = make_textures(length=64)
    expected = list(islice(loader_of(source, workers=0).batches(), 6))
    batches = loader_of(source).batches()
    for batch, other in zip(expected, batches, strict=False):
        assert torch.equal(batch.read, other.read)
        assert all(torch.equal(views, other.views[size]) for size, views in batch.views.items())
    batches.close()
    assert workers._has_warned
    failed.clear()


def test_batches_come_where_shared_memory_is_too_small():
    failed = server.Event()
    failed.set()
    process = server.Process(target=read_without_shared_memory, args=(failed,))
    process.start()
    process.join(120)
    process.kill()
    assert not failed.is_set()


def fail_locally():
    class Local(Exception):
        pass

    raise Local("of my own")


def fail_with_lock():
    error = ValueError("I hold a lock")
    error.lock = threading.Lock()
    raise error


@pytest.mark.parametrize(
    ("act", "kind", "text"),
    [(fail_locally, RuntimeError, "Local: of my own"), (lambda: {}["x"], KeyError, "'x'")],
)
def test_an_error_of_the_users_code_arrives_with_its_traceback(act, kind, text):
    with pytest.raises(kind) as raised:
        list(islice(loader_of(odd(act)).batches(), 5))
    assert str(raised.value) == text
    (note,) = raised.value.__notes__
    assert note.startswith("in a DataLoader worker:\nTraceback")


def test_a_sentence_arrives_as_one_with_what_cannot_be_pickled(monkeypatch):
    monkeypatch.setattr(Loader, "make", lambda *_: fail_with_lock())
    with pytest.raises(ValueError, match=r"^I hold a lock$") as raised:
        next(loader_of(make_textures(length=64), workers=1).batches())
    assert not hasattr(raised.value, "__notes__")


def test_what_cannot_be_pickled_is_an_error_too(monkeypatch):
    monkeypatch.setattr(Loader, "make", lambda *_: threading.Lock())
    with pytest.raises(TypeError, match="cannot pickle"):
        next(loader_of(make_textures(length=64), workers=1).batches())


@pytest.mark.parametrize("pin", [False, True])
def test_a_batch_that_does_not_come_is_not_waited_for_after_a_signal(monkeypatch, pin):
    monkeypatch.setattr(loader, "LOOK_S", 0.1)
    monkeypatch.setattr(workers, "LOOK_S", 0.1)
    monkeypatch.setattr(workers, "GRACE_S", 0.3)
    hanging = loader_of(odd(lambda: time.sleep(600)))
    hanging.pin = pin and torch.cuda.is_available()
    signalled = []

    def is_stopping():
        signalled.append(True)
        return len(signalled) > 3

    with pytest.raises(NoBatch):
        list(islice(hanging.batches(0, is_stopping), 5))
    assert len(signalled) >= 6
    assert not multiprocessing.active_children()


def test_a_slow_batch_is_waited_for_after_a_signal_if_others_were_as_slow():
    """By the count of looks, so that no clock decides."""

    class Slow:
        looks = 0

        def __next__(self):
            self.looks += 1
            if self.looks <= 30:
                raise RuntimeError("DataLoader timed out after 1 seconds")
            return "batch"

    assert workers.wait_for_batch(Slow(), lambda: True, longest=16.0) == "batch"


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def free_as_worker(sizes):
    keep_freed_memory()
    if sizes.get():
        workers.release_freed_memory()
    before = resident()
    blocks = [torch.ones(10_000_000) for _ in range(4)]  # 40 MB each
    held = resident() - before
    del blocks
    sizes.put((held, resident() - before))


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_a_worker_gives_back_the_memory_that_the_process_of_the_run_keeps():
    for releases in (True, False):
        sizes = server.SimpleQueue()
        process = server.Process(target=free_as_worker, args=(sizes,))
        process.start()
        sizes.put(releases)
        process.join(120)
        held, kept = sizes.get()
        assert held > 150e6
        assert (kept < 20e6) == releases
