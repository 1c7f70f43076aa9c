"""Running requests of `/inference/v1/generate` that can be cancelled by their ids, at whichever worker they are."""

import asyncio
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gateway.access.shared import SharedState
from gateway.errors import invalid
from gateway.workers.siblings import Siblings

_ABORT = "abort_requests"


class Aborts:
    """The requests of this worker.

    Args:
        shared: where all workers have the ids that are in use.
    """

    def __init__(self, shared: SharedState, siblings: Siblings) -> None:
        self._shared, self._siblings = shared, siblings
        self._running: dict[tuple[str | None, str], asyncio.Future[None]] = {}
        siblings.on(_ABORT, self._on_abort)

    @contextmanager
    def running(self, owner: str | None, request_id: str) -> "Iterator[asyncio.Future[None]]":
        """A future that ends when the request is to be cancelled.

        Raises:
            ApiError: 400, the id is in use; 503, it cannot be kept now.
        """
        digest = hashlib.blake2b(repr((owner, request_id)).encode(), digest_size=16).digest()
        with self._shared.change() as database:
            added = database.execute("INSERT OR IGNORE INTO generations VALUES (?, ?)", (digest, self._shared.worker))
            if not added.rowcount:
                raise invalid("request_id", f"a request {request_id[:80]!r} is running; take another id")
        self._running[owner, request_id] = aborted = asyncio.get_running_loop().create_future()
        try:
            yield aborted
        finally:
            del self._running[owner, request_id]
            self._shared.settle("DELETE FROM generations WHERE digest = ?", digest)

    async def abort(self, owner: str | None, request_ids: Sequence[str]) -> None:
        """Cancels those of the ids that run, here or at another worker."""
        self._abort(owner, request_ids)
        await self._siblings.call_others(_ABORT, [owner, request_ids])

    async def _on_abort(self, argument: Any) -> None:
        self._abort(*argument)

    def _abort(self, owner: str | None, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            aborted = self._running.get((owner, request_id))
            if aborted is not None and not aborted.done():
                aborted.set_result(None)
