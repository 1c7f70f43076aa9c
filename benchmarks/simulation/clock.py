"""Simulated time: a heap of what happens when."""

import heapq
import itertools
from collections.abc import Callable
from typing import Any


class Clock:
    """Events in the order of their times; those of one time in the order in which they were made.

    Attributes:
        now: seconds.
        events: that have happened.
    """

    def __init__(self) -> None:
        self.now, self.events = 0.0, 0
        self._heap = list[tuple[float, int, Callable[..., object], tuple[Any, ...]]]()
        self._order = itertools.count()

    @property
    def wall_s(self) -> float:
        """What the users' clocks show."""
        return self.now

    def after(self, delay_s: float, happens: Callable[..., object], *arguments: Any) -> None:
        heapq.heappush(self._heap, (self.now + delay_s, next(self._order), happens, arguments))

    def run(self, until_s: float) -> None:
        """What is due later than `until_s` stays."""
        while self._heap and self._heap[0][0] <= until_s:
            at_s, _, happens, arguments = heapq.heappop(self._heap)
            self._advance(at_s)
            self.events += 1
            happens(*arguments)
        self._advance(max(self.now, until_s))

    def _advance(self, to_s: float) -> None:
        self.now = to_s
