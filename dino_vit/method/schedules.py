"""Schedules as pure functions of an integer step or epoch: nothing to store, nothing to resume."""

import math


def warmup_cosine(
    step: int, *, base: float, final: float, total: int, warmup: int = 0, start: float = 0.0
) -> float:
    """Return the value at `step`: `start` to `base` in `warmup` steps, then a cosine towards `final`.

    The warm-up reaches `base` at its last step, the cosine starts there again and would reach `final` at step
    `total`, one after the last; from there on `final` holds.
    """
    if not 0 <= warmup <= total:
        raise ValueError(
            f"A warm-up of {warmup} does not fit into a schedule of {total}: shorten it or train longer."
        )
    if step < warmup:
        return _ramp(step, start, base, warmup)
    if step >= total:
        return final
    progress = (step - warmup) / (total - warmup)
    return final + 0.5 * (base - final) * (1 + math.cos(math.pi * progress))


def warmup_constant(epoch: int, *, start: float, final: float, warmup: int) -> float:
    """Return the value at `epoch`: `start` to `final` in `warmup` epochs, then `final`."""
    return _ramp(epoch, start, final, warmup) if epoch < warmup else final


def _ramp(index: int, start: float, end: float, count: int) -> float:
    """Return entry `index` of `count` evenly spaced values from `start` to `end`, both included."""
    if index < 0:
        raise ValueError(f"A schedule has no value at {index}: count from 0.")
    return start + (end - start) * (index / (count - 1)) if count > 1 else start
