"""Runs of several processes, as launchers start them."""

import socket

from tests.support.runs import Command, Run


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def torchrun_environs():
    """Return the environments of the two processes of one launch by torchrun."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": "2"}
    return [{**common, "RANK": rank, "LOCAL_RANK": rank} for rank in "01"]


def pair(output, settings, environs, before=(None, None)):
    """Start the two processes of one run, and let each do something first."""
    both = zip(environs, before, strict=True)
    return [Run(output, settings, environ=environ, before=act) for environ, act in both]


def finish(started, code=0):
    """Wait for the processes of a run, check their exit codes and return what each said."""
    codes, said = [one.wait() for one in started], [one.said for one in started]
    assert codes == [code] * len(started), "\n".join(said)
    return said


def run_in_two(output, settings, *, code=0):
    """Run a pretraining in two processes to the end and return what each said."""
    return finish(pair(output, settings, torchrun_environs()), code)


def command_in_two(log, *argv, code=0, **options):
    """Run a command in two processes to the end and return what each said."""
    argv, environs = [str(argument) for argument in argv], torchrun_environs()
    logs = [log.with_name(f"{log.name}.{rank}") for rank in (0, 1)]
    started = zip(logs, environs, strict=True)
    return finish([Command(argv, own, environ=environ, **options) for own, environ in started], code)
