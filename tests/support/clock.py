"""How tests wait: for what they mean, not for a time; and what waits for its own time need not be waited for."""

import asyncio
from collections.abc import Callable

GUARD_S = 120.0  # against hanging: no verdict is meant


def put_forward(seconds: float) -> None:
    """The running loop takes it that `seconds` have passed, from now on: all that was due by then is."""
    loop = asyncio.get_running_loop()
    before = loop.time
    loop.time = lambda: before() + seconds


async def until(condition: Callable[[], object]) -> None:
    """Returns when `condition()` is true."""
    async with asyncio.timeout(GUARD_S):
        while not condition():
            await asyncio.sleep(0.005)
