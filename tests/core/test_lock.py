import errno
import os
import signal
import time

import pytest

from dino_vit.core import lock
from dino_vit.core.lock import locked
from tests.support.runs import server


def hold(folder, held):
    with locked(folder):
        if os.fork():
            held.set()
            time.sleep(60)
        else:  # as a DataLoader worker, which lives on for a while
            time.sleep(5)


def test_a_lock_is_held_until_its_process_dies(tmp_path):
    held = server.Event()
    other = server.Process(target=hold, args=(tmp_path / "run", held))
    other.start()
    assert held.wait(60)
    with pytest.raises(ValueError, match=rf"another run is using .*run \(process {other.pid} on "):
        locked(tmp_path / "run").__enter__()
    os.kill(other.pid, signal.SIGKILL)
    other.join()
    for _ in range(2):
        with locked(tmp_path / "run"):
            pass


def test_only_a_new_folder_in_which_nothing_was_written_goes(tmp_path):
    (tmp_path / "mine").mkdir()
    for name in ("mine", "new"):
        with locked(tmp_path / name):
            assert os.listdir(tmp_path / name) == [".lock"]
    assert os.listdir(tmp_path) == ["mine"]


def test_a_file_system_without_locks_is_no_reason_to_stop(tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(lock, "lockf", refuse)
    with locked(tmp_path):
        assert "cannot be locked (Function not implemented)" in caplog.text
