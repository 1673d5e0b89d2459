"""Runs of several processes, as launchers start them."""

import socket

from tests.support.runs import Run


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def torchrun_environs():
    """Return the environments of the two processes of one launch by torchrun."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": "2"}
    return [{**common, "RANK": rank, "LOCAL_RANK": rank} for rank in "01"]


def srun_environs():
    """Return the environments of two tasks of srun."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    common |= {"SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "localhost"}
    return [{**common, "SLURM_PROCID": task, "SLURM_LOCALID": task} for task in "01"]


def pair(output, settings, environs, **options):
    """Start the two processes of one run."""
    return [Run(output, settings, environ=environ, **options) for environ in environs]
