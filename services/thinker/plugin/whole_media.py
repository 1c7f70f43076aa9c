"""Whole pictures in a step, in models whose pictures see all of themselves.

vLLM keeps a step from ending within a picture that it does not begin with. One that it begins with, such as the first
of a prompt, or one of which the prefix cache has a part, it may cut.
"""

from functools import wraps
from typing import Any


def keep_media_whole() -> None:
    """Mends vLLM's scheduler in this process: a step has all that is left of a picture, or none of it."""
    from vllm.v1.core.sched.scheduler import Scheduler

    schedule = Scheduler._try_schedule_encoder_inputs
    if hasattr(schedule, "__wrapped__"):
        return

    @wraps(schedule)
    def schedule_whole(
        self: Any, request: Any, num_computed_tokens: int, num_new_tokens: int, *others: Any, **named: Any
    ) -> Any:
        # The sound of an encoder-decoder model has its places in the encoder, not among the prompt's tokens.
        if self.scheduler_config.disable_chunked_mm_input and not self.is_encoder_decoder:
            places = (feature.mm_position for feature in request.mm_features)
            ranges = [(place.offset, place.offset + place.length) for place in places]
            num_new_tokens = fitting(num_computed_tokens, num_new_tokens, ranges)
        return schedule(self, request, num_computed_tokens, num_new_tokens, *others, **named)

    Scheduler._try_schedule_encoder_inputs = schedule_whole


def fitting(computed: int, new: int, ranges: list[tuple[int, int]]) -> int:
    """Of `new` tokens behind `computed` ones, how many can be taken: none of a medium, (first, end), that comes next
    and would not be ended."""
    return next((0 for first, end in ranges if first <= computed < end and computed + new < end), new)
