"""A process that tries inputs, with a limit of memory, and is killed when one takes too long."""

import logging
import multiprocessing
import os
import re
import resource
import sys
import tempfile
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random

from dino_vit.core import log
from dino_vit.data.images.decode import UnreadableImage
from tests.fuzz.generators import GENERATORS, Generator

SECONDS, BYTES = 20.0, 2**30
LIBTIFF = "tempfile.tif: "  # what it prints of a damaged file, before Pillow raises its error
server = multiprocessing.get_context("forkserver")
# There is one fork server: with what the runs of the other tests need, or they would each do it again.
server.set_forkserver_preload(["tests.support.forked", "tests.fuzz.worker"])


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
        self.connection.recv()  # it is warm

    def try_input(self, kind: str, number: int) -> str:
        """Return what is wrong about how an input ended, or nothing."""
        try:
            self.connection.send((kind, number))
            if self.connection.poll(self.seconds):
                return str(self.connection.recv())
            problem = f"it takes longer than {self.seconds:g} s"
        except (EOFError, ConnectionError):
            self.process.join()
            said = Path(self.said.name).read_text(errors="replace")
            problem = f"{said[-2000:]}it ends the process with {self.process.exitcode}"
        self.close()
        self._start()
        return problem

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()
        self.said.close()


def _serve(connection: Connection, path: str, seed: int, generators: dict[str, Generator]) -> None:
    logging.basicConfig()
    log.setLevel(logging.CRITICAL)
    if generators.keys() == GENERATORS.keys():
        for kind, generator in generators.items():  # libraries load parts of themselves at first use
            try_here(generator, f"0 {kind} 0")
    with open(path, "r+b", buffering=0) as written:
        os.dup2(written.fileno(), 2)  # what libraries write to stderr past Python too
        connection.send("ready")
        while True:
            kind, number = connection.recv()
            written.seek(0)
            written.truncate()
            _limit_memory()
            problem = try_here(generators[kind], f"{seed} {kind} {number}")
            sys.stderr.flush()
            lines = os.pread(2, 400, 0).decode(errors="replace").splitlines()
            noise = "\n".join(line for line in lines if not line.startswith(LIBTIFF))
            connection.send(problem or (f"it writes to stderr: {noise}" if noise else ""))


def try_here(generator: Generator, seed: str) -> str:
    """Try an input in this process; return what is wrong about how it ended, or nothing."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DINO_VIT_CACHE"] = f"{folder}/cache"
        action = generator(Random(seed), Path(folder))
        try:
            action()
        except (ValueError, OSError, UnreadableImage) as error:
            return _judge_message(str(error))
        except BaseException:
            return traceback.format_exc()
    return ""


def _judge_message(sentence: str) -> str:
    if len(sentence) < 10 or len(sentence) > 5000 or "\n" in sentence:
        return f"its error is no sentence: {sentence[:400]!r}"
    if re.search(r"object has no|positional argument|unhashable|not subscriptable", sentence):
        return f"its error is Python's: {sentence[:400]}"
    return ""


def _limit_memory() -> None:
    """Allow so many bytes beyond what the process has taken."""
    taken = re.search(r"VmData:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert taken
    resource.setrlimit(resource.RLIMIT_DATA, (int(taken[1]) * 1024 + BYTES, resource.RLIM_INFINITY))
