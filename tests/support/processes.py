"""Environments that start several processes as one launch."""

import socket


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def torchrun_environs():
    """Return the environments of the two processes of one launch."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": "2"}
    return [{**common, "RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
