"""Places for the answers of one request, which run as places come free."""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from typing import Any

from gateway.access.api_key import ApiKey
from services.common.errors import Unavailable
from services.common.rpc.call import Admission

_LOOK_AGAIN_S = 0.1  # another process may give back a key's place


class Places:
    """Places for a request's answers beside its first, which has the request's own.

    Args:
        admission: the gateway's. Further answers of all requests leave half of its places free.
        key: its limit counts, too; None: there are no keys.
    """

    def __init__(self, admission: Admission, key: ApiKey | None) -> None:
        self._admission, self._key = admission, key

    def take(self) -> ExitStack | None:
        """A place; closing it gives it back. None: none is free."""
        if self._admission.in_flight >= self._admission.max_running // 2:
            return None
        with ExitStack() as place:
            try:
                place.enter_context(self._admission.admit())
            except Unavailable:  # the gateway drains
                return None
            if self._key is not None:
                if (of_key := self._key.one_more()) is None:
                    return None
                place.push(of_key)
            return place.pop_all()


def in_turn(
    works: Sequence[Callable[[], Coroutine[Any, Any, None]]], places: Places
) -> list[Coroutine[Any, Any, None]]:
    """Coroutines that do `works` in order when run side by side: the first without a place, each other one with its."""
    left, looking = deque(works), asyncio.Lock()

    async def free_place() -> ExitStack | None:
        """None: no work is left."""
        async with looking:
            while left:
                if (place := places.take()) is not None:
                    return place
                await asyncio.sleep(_LOOK_AGAIN_S)
        return None

    async def work(is_first: bool) -> None:
        if (place := ExitStack() if is_first else await free_place()) is None:
            return
        with place:
            while left:
                await left.popleft()()

    return [work(is_first=not i) for i in range(len(works))]
