import errno
import os
import signal
import socket
import time

import pytest

from dino_vit.core import lock
from dino_vit.core.lock import locked
from tests.support.runs import server


@pytest.fixture(params=["lock", "lease"])
def without_locks(request):
    """Have the file system refuse locks, or not."""
    return request.param == "lease"


def hold(folder, without_locks, held):
    if without_locks:
        lock.lockf = refuse
    with locked(folder):
        if os.fork():
            held.set()
            time.sleep(60)
        else:  # as a loader process, which lives on for a while
            time.sleep(5)


def refuse(*_):
    raise OSError(errno.ENOLCK, "no locks available")


def test_a_lock_is_held_until_its_process_dies(tmp_path, monkeypatch, without_locks):
    if without_locks:
        monkeypatch.setattr(lock, "lockf", refuse)
    held = server.Event()
    other = server.Process(target=hold, args=(tmp_path / "run", without_locks, held))
    other.start()
    assert held.wait(60)
    with pytest.raises(ValueError, match=rf"another run is using .*run \(process {other.pid} on "):
        locked(tmp_path / "run").__enter__()
    os.kill(other.pid, signal.SIGKILL)
    other.join()
    for _ in range(2):
        with locked(tmp_path / "run"):
            pass


def test_a_lease_of_another_host_must_be_removed_by_hand(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "lockf", refuse)
    (tmp_path / ".lease").write_text("1 elsewhere")
    with pytest.raises(ValueError, match=r"process 1 on elsewhere.*remove .*\.lease"):
        locked(tmp_path).__enter__()
    (tmp_path / ".lease").unlink()
    with locked(tmp_path):
        assert (tmp_path / ".lease").exists()
    assert not (tmp_path / ".lease").exists()


def test_only_a_folder_that_the_lock_made_goes_with_it(tmp_path):
    (tmp_path / "mine").mkdir()
    for name in ("mine", "new"):
        with locked(tmp_path / name):
            assert [path.name for path in (tmp_path / name).iterdir()] == [".lock"]
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_what_stands_in_the_way_of_a_lock_is_named(tmp_path):
    (tmp_path / ".lock").mkdir()
    with pytest.raises(IsADirectoryError, match=r"\.lock"):
        locked(tmp_path).__enter__()


def test_a_lease_of_a_container_that_started_again_is_replaced(tmp_path, monkeypatch):
    """There every run has the same process number."""
    monkeypatch.setattr(lock, "lockf", refuse)
    (tmp_path / ".lease").write_text(f"{os.getpid()} {socket.gethostname()}")
    with locked(tmp_path):
        assert not (tmp_path / ".lock").exists()
