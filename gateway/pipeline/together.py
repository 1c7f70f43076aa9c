"""Runs what belongs together: all of it succeeds, or all of it is cancelled and the root error is raised."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from gateway.pipeline.job import StageFailure
from services.common.rpc.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidInput,
    NotFound,
    QueueFull,
    RequestCancelled,
    StageLost,
    Unavailable,
)

# When one stage fails, its neighbours fail too, and their errors may arrive first. So the kind of error decides which
# is the root: what a stage says of the request itself comes before what it says of a lost neighbour. A stage that is
# gone is a root whoever tells: StageLost names it.
_ROOT_FIRST = (InvalidInput, QueueFull, DeadlineExceeded, InternalError, Unavailable, NotFound, RequestCancelled)
_ECHOES = (Unavailable, NotFound, RequestCancelled)
ECHO_GRACE_S = 0.25


async def all_or_none(parts: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Results of `parts`, run at the same time. When one fails, or this is cancelled, the others are cancelled and
    waited for.

    Raises:
        StageFailure: the root error. If the first error can be an echo of another part's, the others have
            ECHO_GRACE_S to state theirs.
    """
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        _, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if pending and all(map(_may_be_echo, _failures(tasks))):
            await asyncio.wait(pending, timeout=ECHO_GRACE_S)
    finally:
        for task in tasks:
            task.cancel()
        # A second cancellation must not leave these running.
        await asyncio.shield(asyncio.gather(*tasks, return_exceptions=True))
    if failures := _failures(tasks):
        raise min(failures, key=_rank)
    return [task.result() for task in tasks]


def _failures(tasks: Sequence[asyncio.Future[Any]]) -> list[StageFailure]:
    """Failures in the order of `tasks`; any other exception is raised at once, being a bug."""
    failures = []
    for task in tasks:
        error = task.exception() if task.done() and not task.cancelled() else None
        if isinstance(error, StageFailure):
            failures.append(error)
        elif error is not None:
            raise error
    return failures


def _may_be_echo(failure: StageFailure) -> bool:
    return isinstance(failure.error, _ECHOES) and not isinstance(failure.error, StageLost)


def _rank(failure: StageFailure) -> int:
    return next((i for i, kind in enumerate(_ROOT_FIRST) if isinstance(failure.error, kind)), len(_ROOT_FIRST))
