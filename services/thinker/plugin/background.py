"""Requests that let others go before them in each step: the lines of batches.

vLLM's priorities say who begins first. Who has begun is in every step, and makes it longer for all. A request of the
lowest priority sits out the steps in which there are others, but for every eighth: it always comes to an end, and so
does who waits for its memory.
"""

from functools import wraps
from typing import Any

from services.common.sampling_limits import BACKGROUND_PRIORITY

_EVERY = 8


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
        self.background_waits = step % _EVERY != 0 and next(others, None) is not None
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
