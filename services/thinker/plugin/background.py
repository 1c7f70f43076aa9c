"""Requests that let others go before them in each step: the lines of batches.

vLLM's priorities say who begins first. Who has begun is in every step, and makes it longer for all. A request of the
lowest priority sits out the steps in which there are others, but for every eighth: it always comes to an end, and so
does who waits for its memory. A step that runs cannot be broken off. So for some seconds after others, who may come
back, the engine rests after each step of such requests alone, as long as that took.
"""

import time
from functools import wraps
from typing import Any

from services.common.sampling_limits import BACKGROUND_PRIORITY

_EVERY = 8
_RESTS_S = 5.0  # after others
_LONGEST_REST_S = 0.1  # the engine may have had nothing to do meanwhile


def let_others_go_first() -> None:
    """Mends vLLM's scheduler in this process."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import RequestStatus

    schedule, may_begin = Scheduler.schedule, Scheduler._handle_blocked_waiting_request
    if hasattr(schedule, "__wrapped__"):
        return
    active = (RequestStatus.RUNNING, RequestStatus.WAITING, RequestStatus.PREEMPTED)  # a grammar may take seconds

    @wraps(schedule)
    def schedule_others(self: Any, *arguments: Any, **named: Any) -> Any:
        step = self.current_step + 1  # which this call begins
        others = (
            each for each in self.requests.values() if each.priority < BACKGROUND_PRIORITY and each.status in active
        )
        pace = vars(self).setdefault("background_pace", _Pace())
        if next(others, None) is None:
            self.background_waits = pace.rests(bool(self.requests))
        else:
            pace.others_came()
            self.background_waits = step % _EVERY != 0
        if self.background_waits:
            for request in self.running:
                if request.priority >= BACKGROUND_PRIORITY:  # it stays among those that run, and keeps its memory
                    request.next_decode_eligible_step = max(request.next_decode_eligible_step, step + 1)
        return schedule(self, *arguments, **named)

    @wraps(may_begin)
    def begins(self: Any, request: Any) -> bool:
        return may_begin(self, request) and not (self.background_waits and request.priority >= BACKGROUND_PRIORITY)

    Scheduler.schedule = schedule_others
    Scheduler._handle_blocked_waiting_request = begins


class _Pace:
    """Steps of background requests alone, and the rests between them."""

    def __init__(self) -> None:
        self._others_s, self._began_s, self._rests_until_s = -_RESTS_S, 0.0, 0.0
        self._in_step = False

    def others_came(self) -> None:
        """To the step that begins."""
        self._others_s, self._in_step = time.monotonic(), False

    def rests(self, has_requests: bool) -> bool:
        """Whether the step that begins is a rest."""
        now_s = time.monotonic()
        if self._in_step:  # its end
            self._rests_until_s = now_s + min(now_s - self._began_s, _LONGEST_REST_S)
        self._in_step = False
        if now_s < self._rests_until_s and now_s < self._others_s + _RESTS_S:
            return True
        self._began_s, self._in_step = now_s, has_requests
        return False
