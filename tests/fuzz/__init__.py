"""Hostile inputs, each tried in a process with limits: they must end in a result or a sentence."""

import os

os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"  # the others reserve more than the limit
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # as the command does; threads that spin would count as work
