"""A process that tries inputs, with a limit of memory, and is killed when one takes too long."""

import logging
import multiprocessing
import os
import re
import resource
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random

import psutil

from dino_vit.core import log
from dino_vit.data.images.decode import UnreadableImage
from tests.fuzz.generators import GENERATORS, Action, Generator

SECONDS, BYTES = 5.0, 2**30
MAKING = 60.0  # seconds, as the first input of a kind may train a network
server = multiprocessing.get_context("forkserver")
# What takes seconds to import is there before an input is tried.
IMPORTED = [
    "tests.fuzz.worker",
    "dino_vit.data.sources.parquet",
    "matplotlib.figure",
    "sklearn.manifold",
]
server.set_forkserver_preload(IMPORTED)


class Worker:
    """A process that is started again after each input that ends it."""

    def __init__(
        self, seed: int, generators: dict[str, Generator] = GENERATORS, seconds: float = SECONDS
    ) -> None:
        self.seed, self.generators, self.seconds = seed, generators, seconds
        self._start()

    def _start(self) -> None:
        self.connection, other = server.Pipe()
        self.said = tempfile.NamedTemporaryFile()  # noqa: SIM115 - what the process writes to stderr
        arguments = (other, self.said.name, self.seed, self.generators)
        self.process = server.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        other.close()
        self.connection.recv()  # it has imported everything

    def try_input(self, kind: str, number: int, again: bool = True) -> str:
        """Return what is wrong about how an input ended, or nothing; one that is slow has a second try."""
        try:
            self.connection.send((kind, number))
            for limit in (MAKING, self.seconds):  # until the input is made, and until it has been tried
                if not self._answers(limit):
                    problem = f"it takes longer than {limit:g} s"
                    break
                answer = str(self.connection.recv())
            else:
                return answer
        except (EOFError, ConnectionError):
            self.process.join()
            said = Path(self.said.name).read_text(errors="replace")
            problem, again = f"{said[-2000:]}it ends the process with {self.process.exitcode}", False
        self.close()
        self._start()
        return self.try_input(kind, number, again=False) if again else problem

    def _answers(self, limit: float) -> bool:
        """Wait for an answer, for so many seconds of work or, where it sleeps, four times as many."""
        used = psutil.Process(self.process.pid).cpu_times
        start, end = sum(used()[:2]), time.monotonic() + 4 * limit
        while not self.connection.poll(limit / 10):
            if sum(used()[:2]) - start > limit or time.monotonic() > end:
                return False
        return True

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()
        self.said.close()


def _serve(connection: Connection, path: str, seed: int, generators: dict[str, Generator]) -> None:
    written = open(path, "r+b", buffering=0)  # noqa: SIM115 - for as long as the process runs
    os.dup2(written.fileno(), 2)  # what libraries write to stderr past Python too
    logging.basicConfig()
    log.setLevel(logging.CRITICAL)
    if generators == GENERATORS:
        for kind, generator in generators.items():  # libraries load parts of themselves at first use
            try_here(generator, f"0 {kind} 0")
    connection.send("ready")

    def made() -> None:
        _limit_memory(BYTES)
        connection.send("made")

    while True:
        kind, number = connection.recv()
        written.seek(0)
        written.truncate()
        problem = try_here(generators[kind], f"{seed} {kind} {number}", made)
        _limit_memory(None)
        sys.stderr.flush()
        noise = os.pread(2, 400, 0).decode(errors="replace")
        connection.send(problem or (f"it writes to stderr: {noise}" if noise else ""))


def try_here(generator: Generator, seed: str, made: Action = lambda: None) -> str:
    """Try an input in this process; return what is wrong about how it ended, or nothing.

    `made` is called between making it, which may take its time, and trying it.
    """
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DINO_VIT_CACHE"] = f"{folder}/cache"
        action = generator(Random(seed), Path(folder))
        made()
        try:
            action()
        except (ValueError, OSError, UnreadableImage) as error:
            return _judge(str(error))
        except BaseException:
            return traceback.format_exc()
    return ""


def _judge(sentence: str) -> str:
    if len(sentence) < 10 or len(sentence) > 5000 or "\n" in sentence:
        return f"its error is no sentence: {sentence[:400]!r}"
    if re.search(r"object has no|positional argument|unhashable|not subscriptable", sentence):
        return f"its error is Python's: {sentence[:400]}"
    return ""


def _limit_memory(more: int | None) -> None:
    """Allow so many bytes beyond what the process has taken, or any."""
    taken = re.search(r"VmData:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert taken
    limit = resource.RLIM_INFINITY if more is None else int(taken[1]) * 1024 + more
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
