import os
import time

import pytest

from tests.fuzz import worker
from tests.fuzz.__main__ import main, outcomes


def good(rng, folder):
    return ["config", "pretrain"]


def refused(rng, folder):
    return ["config", "pretrain", "optim.lr=-1"]


def hang(rng, folder):
    return ["config", "pretrain"] if ready(folder) else time.sleep(60)


def crash(rng, folder):
    return ["config", "pretrain"] if ready(folder) else os._exit(3)


def memory(rng, folder):
    return ["config", "pretrain"] if ready(folder) else [bytes(1_200_000_000).decode()]


def fault(rng, folder):
    return ["config", "pretrain"] if ready(folder) else 1 / 0


def ready(folder):
    """Tell whether the input is only made so that the process is ready."""
    return not folder.name.startswith("fuzz-7-")


@pytest.mark.parametrize(
    ("make", "code", "said"),
    [
        (good, 0, ""),
        (refused, 2, "optim.lr = -1"),
        (hang, "took more than 1 s", ""),
        (crash, "ended its process with 3", ""),
        (memory, 1, "MemoryError"),
        (fault, 1, "ZeroDivisionError"),
    ],
)
def test_what_a_command_must_not_do_is_found(monkeypatch, make, code, said):
    monkeypatch.setattr(worker, "SECONDS", 1)
    first, second = outcomes(range(7, 9), {"kind": make}, processes=1)
    assert first.code == code
    assert said in first.said
    assert first.bad == (code not in (0, 2))
    assert second.code in (0, 2), "a new process goes on"


def test_the_same_seed_is_the_same_input(capsys):
    said = []
    for _ in range(2):
        main(["--seed", "11", "--inputs", "1", "--processes", "1", "--kinds", "settings"])
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    assert "1 inputs" in said[0]
