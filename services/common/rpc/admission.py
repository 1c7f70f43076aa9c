"""How many requests a stage takes on."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from services.common.rpc.errors import QueueFull, Unavailable
from services.common.telemetry import metrics


class Admission:
    """Bounded admission: `max_running` requests in the engine and `max_queued` more waiting for it.

    The engine does the queueing; this only counts what is inside and refuses what would be too much.
    Closed until `open()`, and again from `drain()` on.

    Args:
        max_running: requests the engine works on.
        max_queued: requests that may wait beyond those.
        stage: name in the metrics; none without one.
    """

    def __init__(self, max_running: int, max_queued: int, stage: str = "") -> None:
        self.max_running = max_running
        self.max_queued = max_queued
        self.in_flight = 0
        self._closed: str | None = "the stage is loading its model; retry later"
        self._idle = asyncio.Event()
        self._idle.set()
        self._stage = stage
        if stage:
            metrics.RUNNING.labels(stage).set_function(lambda: self.running)
            metrics.QUEUED.labels(stage).set_function(lambda: self.queued)

    @property
    def running(self) -> int:
        """Of the requests inside, those that the engine has room for."""
        return min(self.in_flight, self.max_running)

    @property
    def queued(self) -> int:
        """The others. The two are never negative, whatever thread asks."""
        return max(0, self.in_flight - self.max_running)

    def open(self) -> None:
        """Takes requests from now on."""
        self._closed = None

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Holds a place for one request.

        Raises:
            Unavailable: the stage is loading or draining.
            QueueFull: all places are taken.
        """
        if self._closed:
            self._count_refusal("not_serving")
            raise Unavailable(self._closed)
        if self.in_flight >= self.max_running + self.max_queued:
            self._count_refusal("queue_full")
            raise QueueFull(f"{self.max_running} requests are running and {self.max_queued} are queued; retry later")
        self.in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self._idle.set()

    def _count_refusal(self, reason: str) -> None:
        if self._stage:
            metrics.REFUSED.labels(self._stage, reason).inc()

    async def drain(self) -> None:
        """Refuses new requests from now on; returns when the last one in flight has ended."""
        self._closed = "the stage is draining and takes no new requests; try another replica"
        await self._idle.wait()
