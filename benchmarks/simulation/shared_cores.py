"""A machine whose stages, gateway and clients share its cores."""

from collections.abc import Callable

from benchmarks.simulation.clock import Clock


class SharedCores(Clock):
    """While more processes work than there are cores, all are slower by the same factor.

    `now` counts what a process does that has a core to itself; `wall_s` is longer.

    Attributes:
        processes: of the machine; whether each works.
    """

    def __init__(self, cores: float) -> None:
        super().__init__()
        self.processes = list[Callable[[], bool]]()
        self._cores, self._wall_s = cores, 0.0

    @property
    def wall_s(self) -> float:
        return self._wall_s

    def _advance(self, to_s: float) -> None:
        if to_s > self.now:
            working = sum(works() for works in self.processes)
            self._wall_s += (to_s - self.now) * max(1.0, working / self._cores)
        super()._advance(to_s)
