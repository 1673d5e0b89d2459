import os
import time

import pytest

from tests.fuzz.generators import GENERATORS
from tests.fuzz.worker import Worker, try_here


def sleep(rng, folder):
    return lambda: time.sleep(60)


def end(rng, folder):
    return lambda: os._exit(3)


def trip(rng, folder):
    return lambda: {}["x"]


def refuse(rng, folder):
    def action():
        raise ValueError(f"{folder} is not what was expected; give another")

    return action


BAD = {sleep: "longer than 5 s", end: "ends the process with 3", trip: "KeyError: 'x'", refuse: ""}


def test_whatever_ends_badly_is_noticed():
    worker = Worker(0, {action.__name__: action for action in BAD}, seconds=5)
    for action, said in BAD.items():
        problem = worker.try_input(action.__name__, 0)
        assert said in problem
        assert bool(said) == bool(problem)
    worker.close()


@pytest.mark.parametrize("kind", GENERATORS)
def test_some_inputs_of_each_kind_end_well(kind, monkeypatch, tmp_path):
    monkeypatch.setenv("DINO_VIT_CACHE", str(tmp_path))
    for number in range(2):
        assert not try_here(GENERATORS[kind], f"0 {kind} {number}"), number
