"""How long a step takes, as far as a run of some minutes knows by now."""

# How far, in natural logarithms, the planned pace may be off, and the mean of steps that took all the time:
# the mean of those that took a hundredth of it, ten times as far.
PLANNED, MEASURED = 0.25, 0.05
UNTIMED = 0.1  # of the time, at most, before steps are timed


class Pace:
    """Between the planned seconds per step and their mean so far: the steadier the steps, the closer to it.

    A mean of all steps, since what a source or another program takes now and then belongs to it. The first
    ones do not count: networks are compiled, and workers have made their images ahead.
    """

    def __init__(self, planned: float, *, budget: float, untimed: int) -> None:
        """`budget` is the time of the whole run in seconds, and `untimed` the steps that do not count."""
        self.planned, self.budget, self.untimed = planned, budget, untimed
        self.taken = self.timed = 0
        self.sum = self.sum_of_squares = 0.0
        self.start: float | None = None
        self.last: float | None = None  # step that was timed, or before the first

    def count(self, now: float) -> None:
        """Count a step that ended at `now`, a time without evaluations."""
        self.taken += 1
        self.start = now if self.start is None else self.start
        if self.last is not None:
            self.timed += 1
            self.sum += now - self.last
            self.sum_of_squares += (now - self.last) ** 2
        if self.timed or self.taken >= self.untimed or now - self.start >= UNTIMED * self.budget:
            self.last = now

    @property
    def seconds(self) -> float:
        """Seconds per step."""
        if self.sum <= 0:
            return self.planned
        mean = self.sum / self.timed
        spread = self.sum_of_squares / self.timed / mean**2 - 1  # variance of the steps, relative to the mean
        doubt = max(spread, 0.0) / self.timed + MEASURED**2 * self.budget / self.sum
        return float(self.planned * (mean / self.planned) ** (PLANNED**2 / (PLANNED**2 + doubt)))
