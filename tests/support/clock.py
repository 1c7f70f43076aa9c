"""The event loop's clock, put forward by tests: what waits for its time to come need not be waited for."""

import asyncio


def put_forward(seconds: float) -> None:
    """The running loop takes it that `seconds` have passed, from now on: all that was due by then is."""
    loop = asyncio.get_running_loop()
    before = loop.time
    loop.time = lambda: before() + seconds
