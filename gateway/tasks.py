"""Ends of work: of several tasks together, of the first one, by a limit of time. What the request of a task holds."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

Result = TypeVar("Result")
# Counts bytes that the request of this task holds. It raises ApiError: 503, there is no room.
held: ContextVar[Callable[[int], None]] = ContextVar("held", default=lambda size: None)


async def cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancels `tasks` and waits for their ends, which a second cancellation does not cut short."""
    running = []
    for task in tasks:
        if not task.done():
            task.cancel()
            running.append(task)
        elif not task.cancelled():
            task.exception()  # else asyncio logs it as one that nobody looked at
    if running:
        await asyncio.shield(asyncio.gather(*running, return_exceptions=True))


@asynccontextmanager
async def limited(limit_s: float, error: Exception) -> AsyncIterator[None]:
    """Raises `error` if the context lasts longer."""
    try:
        async with asyncio.timeout(limit_s) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise error from None


async def first(*works: Awaitable[Result]) -> Result:
    """The result, or error, of the work that ends first; the others are cancelled. At a tie the earlier one counts."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task.done()).result()
    finally:
        await cancel(*tasks)
