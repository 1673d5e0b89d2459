"""What becomes of errors in workers, and where shared memory is small."""

import multiprocessing
import re
import resource
import shutil
import subprocess
import sys
import threading
from itertools import islice

import pytest
import torch

from dino_vit.core.process import keep_freed_memory
from dino_vit.data.synthetic import make_textures
from dino_vit.views import loader
from dino_vit.views.loader import Loader
from dino_vit.views.sampler import Sampler
from tests.support.image_sets import with_read
from tests.support.runs import arguments, server
from tests.support.views import views_of

VIEWS = views_of("model.patch_size=8", "views.global_size=64", "views.local_count=0")


def odd(act):
    """Images of which one is not read but acts."""
    textures = make_textures(length=64)
    return with_read(textures, lambda index: act() if index == 5 else textures.read(index))


def loader_of(source, *, workers=2):
    plan = Sampler(length=len(source), global_batch=16, seed=7)
    return Loader(source=source, views=VIEWS, sampler=plan, workers=workers)


class Own(Exception):
    def __init__(self, one, other):
        super().__init__(f"{one} {other}")


def fail():
    raise Own("of my", "own")


def fail_with_lock():
    error = ValueError("I hold a lock")
    error.lock = threading.Lock()
    raise error


@pytest.mark.parametrize(("act", "kind"), [(fail, RuntimeError), (lambda: {}["x"], KeyError)])
def test_an_error_of_the_users_code_arrives_with_its_traceback(act, kind):
    said = r"(?s)in DataLoader worker process \d.*Traceback.*test_workers\.py"
    with pytest.raises(kind, match=said) as held:
        list(islice(loader_of(odd(act)).batches(), 5))
    assert not multiprocessing.active_children(), f"{held.value!r} keeps none alive"


def test_a_sentence_arrives_as_one_with_what_cannot_be_pickled(monkeypatch):
    monkeypatch.setattr(Loader, "make", lambda *_: fail_with_lock())
    with pytest.raises(ValueError, match=r"^I hold a lock$"):
        next(loader_of(make_textures(length=64), workers=1).batches())
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    "size", ["1m", pytest.param("64k", marks=pytest.mark.slow), pytest.param("16m", marks=pytest.mark.slow)]
)
def test_a_run_with_little_shared_memory_works_or_ends_with_a_sentence(size, tmp_path):
    mount = f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"'
    alone = ["unshare", "-m", "sh", "-c", mount, "sh"]
    if not shutil.which("unshare") or subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("only root may mount a small /dev/shm")
    settings = {"data.workers": 2, "data.source": "synthetic:256:64", "data.batch_size": 64}
    settings |= {"views.global_size": 96, "budget.steps": 3, "optim.warmup_epochs": 0}
    settings |= {"optim.freeze_last_layer_epochs": 0}
    program = [sys.executable, "-m", "dino_vit", *arguments(tmp_path / "run", settings)]
    done = subprocess.run([*alone, *program], capture_output=True, text=True, timeout=600)
    if done.returncode:
        assert size != "16m"
        assert done.returncode == 2
        said = "No space left on device|unable to allocate shared memory"  # by Python or by PyTorch
        assert re.search(rf"^dino-vit pretrain: .*({said})", done.stderr, re.MULTILINE)
        if size == "1m":  # in the smaller one there is no room for the locks of two workers
            assert "allocate shared memory" in done.stderr
            assert "Give more shared memory (docker run --shm-size=16g) or set data.workers=0" in done.stderr
            assert "Traceback" not in done.stderr


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def free_as_worker(sizes):
    keep_freed_memory()
    if sizes.get():
        loader.release_freed_memory()
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
