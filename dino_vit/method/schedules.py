"""Schedules as pure functions of a step or an epoch, without state to save."""

import math


def warmup_cosine(step: float, *, base: float, final: float, total: int, warmup: int = 0) -> float:
    """Return the value at `step`: `warmup` linear steps from 0 to `base`, then a cosine to `final`.

    The last step of the warm-up has `base`, and so does the first of the cosine; `final` is reached at step
    `total`, one after the last, and stays from there on.
    """
    if step < warmup:
        return _ramp(step, 0.0, base, warmup)
    if step >= total:
        return final
    progress = (step - warmup) / (total - warmup)
    return final + 0.5 * (base - final) * (1 + math.cos(math.pi * progress))


def warmup_constant(epoch: int, *, start: float, final: float, warmup: int) -> float:
    """Return the value at `epoch`: `warmup` linear epochs from `start` to `final`, then `final`."""
    return _ramp(epoch, start, final, warmup) if epoch < warmup else final


def _ramp(index: float, start: float, end: float, count: int) -> float:
    """Return entry `index` of `count` evenly spaced values from `start` to `end`, both included."""
    return start + (end - start) * (index / (count - 1)) if count > 1 else start
