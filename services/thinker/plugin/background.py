"""Requests that let others go before them in each step: the lines of batches.

vLLM's priorities say who begins first. Who has begun is in every step, and makes it longer for all. A request of the
lowest priority sits out seven steps in a row in which there are others, then has one: it always comes to an end, and so
does who waits for its memory. It also waits for those who are about to come, since they would have to wait for the end
of a step.
"""

import time
from functools import wraps
from pathlib import Path
from typing import Any

from services.common.sampling_limits import BACKGROUND_PRIORITY
from services.thinker.plugin.expected import Expected

_SAT_OUT = 7  # steps
_WAIT_S = 0.001
_MOST_WAITS = 1000  # in a row: who is expected need not come


class _Turns:
    """Says of each step whether the background sits it out."""

    def __init__(self, expected: Expected) -> None:
        self._expected, self._sat_out, self._waits = expected, 0, 0

    def gives_way(self, has_others: bool) -> bool:
        """Waits for a moment if the step would be empty."""
        if has_others:
            sits_out, self._sat_out = self._sat_out < _SAT_OUT, self._sat_out + 1
        elif sits_out := self._waits < _MOST_WAITS and self._expected.is_near():
            self._waits += 1
            time.sleep(_WAIT_S)
        if not sits_out:
            self._sat_out = self._waits = 0
        return sits_out


def let_others_go_first(directory: Path) -> None:
    """Mends vLLM's scheduler in this process.

    Args:
        directory: where the thinker announces requests; see `Expected`.
    """
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import RequestStatus

    schedule, may_begin = Scheduler.schedule, Scheduler._handle_blocked_waiting_request
    if hasattr(schedule, "__wrapped__"):
        return
    active = (RequestStatus.RUNNING, RequestStatus.WAITING, RequestStatus.PREEMPTED)  # a grammar may take seconds
    turns = _Turns(Expected(directory))

    @wraps(schedule)
    def schedule_others(self: Any, *arguments: Any, **named: Any) -> Any:
        others = (
            each for each in self.requests.values() if each.priority < BACKGROUND_PRIORITY and each.status in active
        )
        # without requests a step tells the workers of those that have ended, and waits for nobody
        self.background_waits = bool(self.requests) and turns.gives_way(next(others, None) is not None)
        if self.background_waits:
            step = self.current_step + 1  # which this call begins
            for request in self.running:
                if request.priority >= BACKGROUND_PRIORITY:  # it stays among those that run, and keeps its memory
                    request.next_decode_eligible_step = max(request.next_decode_eligible_step, step + 1)
        return schedule(self, *arguments, **named)

    @wraps(may_begin)
    def begins(self: Any, request: Any) -> bool:
        return may_begin(self, request) and not (self.background_waits and request.priority >= BACKGROUND_PRIORITY)

    Scheduler.schedule = schedule_others
    Scheduler._handle_blocked_waiting_request = begins
