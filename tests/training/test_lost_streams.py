"""A run whose terminal, log or reader is gone goes on."""

import os
from functools import partial

import pytest

from tests.support.runs import Run, history, steps

FEW = {"budget.steps": 6, "optim.warmup_epochs": 0.1, "compute.checkpoint_every": 3}


def open_only(path):
    """Have standard error be a file, which may be full."""
    os.dup2(os.open(path, os.O_WRONLY), 2)


def lose_reader():
    reader, writer = os.pipe()
    os.dup2(writer, 2)
    os.close(reader)


@pytest.mark.parametrize(
    "lose",
    [partial(open_only, "/dev/full"), lose_reader],
    ids=["full", "no reader"],
)
def test_a_run_goes_on_without_what_it_would_say(tmp_path, lose):
    output = tmp_path / "run"
    started = Run(output, FEW, before=lose)
    assert started.wait() == 0
    assert steps(output) == [3, 6]
    assert [line["step"] for line in history(output)] == [1, 2, 3, 4, 5, 6]
