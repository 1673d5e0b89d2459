import errno
import os
import signal
import sys
import threading
import time

import pytest

from dino_vit.config.settings import ConfigError
from dino_vit.core import process
from dino_vit.core.process import Interruption, locked, portable
from tests.support.runs import command_here, server


def leave_after(names):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    before = signal.getsignal(signal.SIGTERM)
    try:
        code = 3
        with Interruption() as interruption:
            interruption.in_steps = names[0] != "before"
            names = [name for name in names if name != "before"]
            assert interruption.received is None
            for name in names:
                os.kill(os.getpid(), name)
                assert interruption.received == name
            if interruption.received == signal.SIGINT:  # a single one, after the step
                code = 130
            interruption.leave()
    except KeyboardInterrupt:
        pass
    except SystemExit as stop:
        code = stop.code
    assert signal.getsignal(signal.SIGTERM) == before
    sys.exit(code)


def test_signals_are_remembered_until_the_step_is_over():
    term, user, interrupt, at_once = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, 3
    cases = {
        (term,): 75,
        (user,): 75,
        (signal.SIGHUP,): 75,
        (interrupt,): 130,
        (term, term): 75,
        (interrupt, term): 75,
        (interrupt, interrupt): at_once,
        (term, interrupt): at_once,
        ("before", interrupt): at_once,
        ("before", term): 75,
    }
    started = {names: server.Process(target=leave_after, args=(names,)) for names in cases}
    for child in started.values():
        child.start()
    for names, child in started.items():
        child.join()
        assert child.exitcode == cases[names], names


def outlive_the_terminal():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    with Interruption() as interruption:
        os.kill(os.getpid(), signal.SIGHUP)
        sys.exit(0 if interruption.received is None else 1)


def test_what_nohup_started_goes_on_without_its_terminal():
    child = server.Process(target=outlive_the_terminal)
    child.start()
    child.join()
    assert child.exitcode == 0


def hold(folder, held):
    with locked(folder):
        if os.fork():
            held.set()
            time.sleep(600)  # until it is killed
        else:  # as a DataLoader worker, which lives on for a while
            time.sleep(5)


def test_a_lock_is_held_until_its_process_dies(tmp_path):
    held = server.Event()
    other = server.Process(target=hold, args=(tmp_path / "run", held))
    other.start()
    assert held.wait(60)
    with pytest.raises(ValueError, match=rf"another run is using .*run \(process {other.pid} on "):
        locked(tmp_path / "run").__enter__()
    said = command_here("pretrain", "synthetic:64:32", tmp_path / "run", code=2)
    assert "another run is using" in said
    os.kill(other.pid, signal.SIGKILL)
    other.join()
    for _ in range(2):
        with locked(tmp_path / "run"):
            pass


def test_an_error_that_cannot_be_pickled_becomes_its_text():
    error = ConfigError(["a", "b"])
    assert portable(error) is error
    error = ValueError("a sentence")
    error.lock = threading.Lock()
    copy = portable(error)
    assert (type(copy), str(copy)) == (ValueError, str(error))


def test_a_file_system_without_locks_is_no_reason_to_stop(tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(process, "lockf", refuse)
    with locked(tmp_path):
        assert "cannot be locked (Function not implemented)" in caplog.text
