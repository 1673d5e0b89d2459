"""A process that runs commands on hostile inputs, with bounds on its time and memory."""

import io
import os
import random
import resource
import tempfile
import traceback
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from dino_vit.cli import main
from tests.fuzz.inputs import Input, remove
from tests.support.runs import server

SECONDS, BYTES = 5, 10**9


class Outcome(NamedTuple):
    """What a command did with an input: the exit code, or why there is none, and what it said."""

    seed: int
    kind: str
    code: int | str
    said: str

    @property
    def bad(self) -> bool:
        return self.code not in (0, 2)


def try_input(make: Input, seed: int) -> tuple[int | str, str]:
    """Make an input and run its command in this process; return the exit code and the output."""
    folder = Path(tempfile.mkdtemp(prefix=f"fuzz-{seed}-"))
    said = io.StringIO()
    try:
        with redirect_stdout(said), redirect_stderr(said):
            code = main(make(random.Random(seed), folder))
    except SystemExit as stop:  # of argparse
        code = int(stop.code or 0)
    except Exception:
        code = 1
        traceback.print_exc(file=said)
    finally:
        remove(folder)
    return code, said.getvalue()


def serve(kinds: Mapping[str, Input], connection: Connection) -> None:
    """Try the inputs that are asked for, with a limit on the memory of all of them together."""
    os.environ["DINO_VIT_CACHE"] = tempfile.mkdtemp(prefix="fuzz-cache-")
    for make in kinds.values():  # so that no input pays for imports and good files
        try_input(make, 0)
    used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (used + BYTES, used + BYTES))
    connection.send(None)
    with suppress(EOFError):  # there are no more
        while True:
            kind, seed = connection.recv()
            connection.send(try_input(kinds[kind], seed))


class Worker:
    """A process that tries inputs, and is replaced when one ends it or takes too long."""

    def __init__(self, kinds: Mapping[str, Input]) -> None:
        self.kinds = kinds
        self.start()

    def start(self) -> None:
        self.connection, theirs = server.Pipe()
        self.process = server.Process(target=serve, args=(self.kinds, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.connection.recv()

    def __call__(self, seed: int) -> Outcome:
        kind = list(self.kinds)[seed % len(self.kinds)]
        self.connection.send((kind, seed))
        try:
            if self.connection.poll(SECONDS):
                return Outcome(seed, kind, *self.connection.recv())
            reason = f"took more than {SECONDS} s"
        except (EOFError, ConnectionError):
            self.process.join()
            reason = f"ended its process with {self.process.exitcode}"
        self.process.kill()
        self.start()
        return Outcome(seed, kind, reason, "")
