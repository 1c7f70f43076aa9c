"""The answers of one request run as places come free."""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from typing import Any

_LOOK_AGAIN_S = 0.1  # another process may give back a key's place
TakePlace = Callable[[], ExitStack | None]
"""A place, which closing it gives back; None: none is free."""


def in_turn(
    works: Sequence[Callable[[], Coroutine[Any, Any, None]]], take: TakePlace
) -> list[Coroutine[Any, Any, None]]:
    """Coroutines that do `works` in order when run side by side: the first without a place, each other one with its."""
    left, looking = deque(works), asyncio.Lock()

    async def free_place() -> ExitStack | None:
        """None: no work is left."""
        async with looking:
            while left:
                if (place := take()) is not None:
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
