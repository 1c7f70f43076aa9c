"""An engine that makes a token or a frame of every running answer in each step, and prompts between them.

Steps are not events. While the batch stays as it is, a step has one length, so the engine counts steps as a function
of time, and only what somebody waits for is an event: prompts, some steps of an answer, its end."""

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable
from typing import Protocol

from benchmarks.simulation.clock import Clock


class Work(Protocol):
    """Of one answer.

    Attributes:
        positions: of its prompt that must be computed.
        tokens: of its context while it runs.
        is_live: neither ended nor cancelled.
        is_started: has a place of the engine; the engine sets it.
    """

    positions: float
    tokens: float
    is_live: bool
    is_started: bool

    def take_room(self) -> bool:
        """Takes room for its context, and settles `positions`; False: there is none now."""
        ...

    def prefilled(self) -> None:
        """Its prompt is computed, and with a thinker its first token."""


class Engine:
    """Args:
    step_s: of a batch: answers and tokens of their contexts to seconds.
    prefill_s: of a step with so many prompt positions, beside such a batch.
    most_positions: of prompts in a step.
    most_running: answers at a time; further ones wait.
    steps_on: whether a step with prompts is a step of the running answers, too.
    """

    def __init__(
        self,
        clock: Clock,
        step_s: Callable[[int, float], float],
        prefill_s: Callable[[float, int, float], float],
        most_positions: float,
        most_running: int,
        *,
        steps_on: bool,
    ) -> None:
        self._clock, self._step_s, self._prefill_s = clock, step_s, prefill_s
        self._most_positions, self._most_running, self._steps_on = most_positions, most_running, steps_on
        self._waiting = deque[Work]()
        self._started = 0  # has a place: its prompt is being computed, or it runs
        self._running, self._tokens = 0, 0.0
        self._steps, self._since, self._timer = 0.0, clock.now, 0
        self._due = list[tuple[float, int, Callable[[], None], Work]]()
        self._order = itertools.count()
        self._prefilling = self._prefill_planned = False
        self.busy_s = 0.0

    def submit(self, work: Work) -> None:
        self._waiting.append(work)
        self._plan_prefill()

    def run(self, work: Work) -> None:
        """Begins to make its tokens or frames."""
        self._count()
        self._running += 1
        self._tokens += work.tokens
        self._plan()

    def stop(self, work: Work) -> None:
        """It makes no more; its place stays its own."""
        self._count()
        self._running -= 1
        self._tokens -= work.tokens
        self._plan()

    def leave(self) -> None:
        """An answer gives its place to the next one."""
        self._started -= 1
        self._plan_prefill()

    def when(self, work: Work, steps: float, happens: Callable[[], None]) -> None:
        """`happens` at the end of the step that is so many steps from the running one; not if it was cancelled."""
        self._count()
        heapq.heappush(self._due, (math.ceil(self._steps - 1e-9) + steps, next(self._order), happens, work))
        self._plan()

    def works(self) -> bool:
        return self._prefilling or self._running > 0

    def steps_done(self) -> float:
        """Up to now."""
        self._count()
        return self._steps

    def _count(self) -> None:
        """Counts the steps up to now."""
        elapsed = self._clock.now - self._since
        self._since = self._clock.now
        if self._prefilling:
            self.busy_s += elapsed
        elif self._running:
            self.busy_s += elapsed
            self._steps += elapsed / self._step_s(self._running, self._tokens)

    def _plan(self) -> None:
        """Sets the timer for what is due next."""
        self._timer += 1
        if not self._due or self._prefilling or not self._running:
            return
        left = max(0.0, self._due[0][0] - self._steps)
        self._clock.after(left * self._step_s(self._running, self._tokens), self._ring, self._timer)

    def _ring(self, timer: int) -> None:
        if timer != self._timer:
            return
        self._count()
        self._steps = max(self._steps, self._due[0][0])  # without the error of its sum
        self._call_due()
        self._plan()

    def _call_due(self) -> None:
        while self._due and self._due[0][0] <= self._steps + 1e-9:
            _, _, happens, work = heapq.heappop(self._due)
            if work.is_live:
                happens()

    def _plan_prefill(self) -> None:
        """Prompts begin when the running step has ended."""
        if self._prefilling or self._prefill_planned or not self._waiting or self._started >= self._most_running:
            return
        self._count()
        self._prefill_planned = True
        left = math.ceil(self._steps - 1e-9) - self._steps if self._running else 0.0
        delay_s = max(0.0, left) * self._step_s(self._running, self._tokens) if left > 0 else 0.0
        self._clock.after(delay_s, self._prefill)

    def _prefill(self) -> None:
        self._prefill_planned = False
        self._count()
        if self._running:  # a step that began with another batch ends with this one
            self._steps = round(self._steps)
        batch, positions = list[Work](), 0.0
        while self._waiting and positions < self._most_positions and self._started < self._most_running:
            work = self._waiting[0]
            if work.is_live and not work.take_room():
                break
            self._waiting.popleft()
            if work.is_live:
                self._started += 1
                work.is_started = True
                batch.append(work)
                positions += work.positions
        if not batch:
            self._plan()
            return
        self._prefilling = True
        self._timer += 1
        steps = max(1, math.ceil(positions / self._most_positions))  # a longer prompt takes several
        per_step = positions / steps
        length_s = steps * self._prefill_s(per_step, self._running, self._tokens)
        self._clock.after(length_s, self._prefilled, batch, steps)

    def _prefilled(self, batch: list[Work], steps: int) -> None:
        self._count()
        self._prefilling = False
        if self._steps_on and self._running:
            self._steps += steps
        self._call_due()
        for work in batch:
            if work.is_live:
                work.prefilled()
        self._plan()
        self._plan_prefill()
