import os
import time

import pytest

from tests.fuzz.generators import GENERATORS
from tests.fuzz.worker import Worker, try_here


def sleep(rng, folder):
    return lambda: time.sleep(60)


def fill(rng, folder):
    return lambda: len(bytearray(2**31))


def end(rng, folder):
    return lambda: os._exit(3)


def trip(rng, folder):
    return lambda: {}["x"]


def speak(rng, folder):
    return lambda: os.write(2, b"Corrupt JPEG data\n")


def mumble(rng, folder):
    def action():
        raise ValueError("?")

    return action


def refuse(rng, folder):
    def action():
        raise ValueError(f"{folder} is not what was expected; give another")

    return action


BAD = {sleep: "longer than 1 s", fill: "MemoryError", end: "ends the process with 3", trip: "KeyError: 'x'"}
BAD |= {speak: "writes to stderr: Corrupt", mumble: "no sentence: '?'", refuse: ""}


tried = []


def end_the_second(rng, folder):
    return lambda: tried.append(1) or (len(tried) > 1 and os._exit(4))


def test_an_input_that_ends_a_process_after_others_is_noticed():
    worker = Worker(0, {"end": end_the_second})
    assert [worker.try_input("end", number) for number in range(2)] == ["", "it ends the process with 4"]
    worker.close()


def test_whatever_ends_badly_is_noticed():
    worker = Worker(0, {action.__name__: action for action in BAD}, seconds=1)
    for action, said in BAD.items():
        problem = worker.try_input(action.__name__, 0)
        assert said in problem
        assert bool(said) == bool(problem)
    worker.close()


@pytest.mark.parametrize("kind", GENERATORS)
def test_some_inputs_of_each_kind_end_well(kind, monkeypatch, tmp_path):
    monkeypatch.setenv("DINO_VIT_CACHE", str(tmp_path))
    for number in range(10):
        assert not try_here(GENERATORS[kind], f"0 {kind} {number}"), number
