"""Looks now and then for what crashes left."""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from gateway.errors import ApiError

SWEEP_S = 3600.0

log = structlog.get_logger()


async def sweep_often(sweep: Callable[[], Awaitable[None]], store: str) -> None:
    """Calls `sweep` now and once an hour, until this is cancelled; its errors end nothing.

    Args:
        store: whose things it removes, for the log.
    """
    while True:
        try:
            await sweep()
        except ApiError:  # the store has logged it
            pass
        except Exception:
            log.exception("what crashes left cannot be removed", store=store)
        await asyncio.sleep(SWEEP_S)
