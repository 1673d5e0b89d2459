"""Runs of several processes, as launchers start them."""

import socket

from tests.support.runs import Run


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def pair(output, settings, environ, **options):
    """Start the two tasks of one launch."""
    port = free_port()
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [Run(output, settings, environ={**common, **environ(n)}, **options) for n in (0, 1)]


def torchrun_environ(number):
    return {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2"}


def srun_environ(number):
    rank = {"SLURM_PROCID": str(number), "SLURM_LOCALID": str(number)}
    return {**rank, "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "localhost"}
