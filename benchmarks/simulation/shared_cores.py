"""A machine whose stages, gateway and clients share its cores."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.simulation.clock import Clock


@dataclass(frozen=True)
class Cores:
    """Args:
    count: that there are.
    of_a_step: that a step of thinker or talker uses while nothing else works. Above one: it has threads; below: it
        also waits, using none.
    """

    count: float = math.inf
    of_a_step: float = 1.0

    def alone(self, kind: str) -> float:
        """Cores that a process of this kind uses while nothing else works."""
        if kind == "gateway":
            return 1.0
        return self.count if kind == "code2wav" else self.of_a_step  # decoding has large tensors, for all threads

    def slowdown(self, wanted: Sequence[float]) -> float:
        """Of processes that use so many cores each when alone. They want them at moments of their own, so some are
        wanted twice, and what nobody wants is idle."""
        if not wanted or self.count == math.inf:
            return 1.0
        used = self.count * (1 - math.prod(1 - each / self.count for each in wanted))
        return sum(wanted) / used


APART = Cores()
"""As many as anybody wants."""


class SharedCores(Clock):
    """`now` counts the time of a process that works alone; `wall_s` is longer while others work, too.

    Attributes:
        processes: of the machine: whether each works, and the cores that it uses when alone.
    """

    def __init__(self, cores: Cores) -> None:
        super().__init__()
        self.processes = list[tuple[Callable[[], bool], float]]()
        self._cores, self._wall_s = cores, 0.0

    @property
    def wall_s(self) -> float:
        return self._wall_s

    def _advance(self, to_s: float) -> None:
        if to_s > self.now:
            wanted = [cores for works, cores in self.processes if works()]
            self._wall_s += (to_s - self.now) * self._cores.slowdown(wanted)
        super()._advance(to_s)
