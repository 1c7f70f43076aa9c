"""Responses that go on without their clients: those that this gateway makes, and those of others, by the store."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing, suppress

import structlog

from gateway.dialects.responses.leases import Leases
from gateway.dialects.responses.output import ResponseEvent
from gateway.dialects.responses.run import ResponseRun
from gateway.dialects.responses.spec import UNFINISHED
from gateway.errors import ApiError
from gateway.tasks import cancel

_PUBLISH_S = 0.5  # how often other gateways get events, and cancellations come from them
_SWEEP_S = 5.0  # how often a gateway looks for what another one has left
_FOLLOW_S = 0.25
_MAX_REPLAYS = 16  # responses that have ended whose events this gateway still has itself

log = structlog.get_logger()


class Background:
    """A response that this gateway makes without its client.

    Args:
        run: makes it.
        place: what it takes of the gateway's and the key's limits; given back at its end.
    """

    def __init__(self, run: ResponseRun, place: ExitStack) -> None:
        self.run = run
        self._events: list[ResponseEvent] = []
        self._published = 0  # events that the store has
        self._changed = asyncio.Event()
        self.task = asyncio.create_task(self._run(place))
        if (key := run.spec.key) is not None:
            key.tasks.add(self.task)
            self.task.add_done_callback(key.tasks.discard)

    async def _run(self, place: ExitStack) -> None:
        spec = self.run.spec
        try:
            with place:
                async with aclosing(self.run.events()) as events:
                    async for event in events:
                        self._events.append(event)
                        changed, self._changed = self._changed, asyncio.Event()
                        changed.set()
        except asyncio.CancelledError:
            await self.run.give_up("cancelled")
            raise
        finally:
            self._changed.set()
            duration_ms = round((time.monotonic() - spec.arrived) * 1000, 1)
            log.info("response", status=self.run.status, duration_ms=duration_ms, **spec.log)

    def cancel(self) -> None:
        """Only before its end: that is being stored then, and must not be cut short."""
        if self.run.status in UNFINISHED and not self.task.done() and not self.task.cancelling():
            self.task.cancel()

    async def events(self, after: int) -> AsyncGenerator[ResponseEvent, None]:
        """Its events after the number `after`, past ones first."""
        at = after + 1
        while True:
            changed = self._changed
            while at < len(self._events):
                yield self._events[at]
                at += 1
            if self.task.done():
                return
            if at == len(self._events):
                await asyncio.wait([asyncio.ensure_future(changed.wait()), self.task], return_when="FIRST_COMPLETED")

    async def publish(self, leases: Leases) -> None:
        """Gives other gateways what is new. Raises ApiError: the next call tries again."""
        is_over, until = self.task.done(), len(self._events)
        new = self._events[self._published : until]
        if is_over:
            await leases.publish_end(self.run.spec.id, new)
        elif new and not await leases.publish(self.run.spec.id, self.run.public() | {"output": []}, new):
            return  # they come with the last ones
        self._published = until


class BackgroundRuns:
    """All that this gateway makes. Use as `async with`: leaving it waits for them, `drain_timeout_s` at most, and
    cancels the others."""

    def __init__(self, leases: Leases, is_shared: bool, drain_timeout_s: float) -> None:
        self.leases, self._is_shared, self._drain_timeout_s = leases, is_shared, drain_timeout_s
        self._runs: dict[str, Background] = {}
        self._unpublished, self._publishing = dict[str, Background](), asyncio.Lock()

    async def __aenter__(self) -> "BackgroundRuns":
        self._tasks = [asyncio.create_task(self._keep_leases()), asyncio.create_task(self._sweep())]
        return self

    async def __aexit__(self, *_) -> None:
        tasks = [running.task for running in self._runs.values() if not running.task.done()]
        if tasks:
            log.info("draining responses", running=len(tasks))
            await asyncio.wait(tasks, timeout=self._drain_timeout_s)
        await cancel(*tasks)
        with suppress(ApiError):
            await self._publish()
        await cancel(*self._tasks)

    def get(self, response_id: str) -> Background | None:
        """A response that this gateway makes, or lately made."""
        return self._runs.get(response_id)

    def forget(self, response_id: str) -> None:
        self._runs.pop(response_id, None)
        self._unpublished.pop(response_id, None)

    def add(self, running: Background) -> None:
        ended = [name for name, each in self._runs.items() if each.task.done()]
        for name in ended[: max(0, len(ended) - _MAX_REPLAYS)]:
            del self._runs[name]
        self._runs[running.run.spec.id] = self._unpublished[running.run.spec.id] = running

    async def _keep_leases(self) -> None:
        """Renews them, cancels what is to be cancelled, and what this gateway has lost."""
        while True:
            await asyncio.sleep(_PUBLISH_S)
            held = {name: running for name, running in self._unpublished.items() if not running.task.done()}
            with suppress(ApiError):  # the store has logged it, and other calls may work soon
                if held:
                    leases = await self.leases.renew(list(held))
                    for name, running in held.items():
                        if leases.get(name, True):
                            running.cancel()
                await self._publish()

    async def _publish(self) -> None:
        async with self._publishing:
            for name, running in list(self._unpublished.items()):
                is_over = running.task.done()
                if self._is_shared:
                    await running.publish(self.leases)
                if is_over:
                    self._unpublished.pop(name, None)

    async def _sweep(self) -> None:
        """Ends what another gateway has left."""
        failed_s: float | None = None
        while self._is_shared:
            try:
                # While the database was away nobody could renew: each gets the time for it.
                is_settled = failed_s is None or time.monotonic() - failed_s > 2 * _SWEEP_S
                ended = await self.leases.end_lost() if is_settled else 0
                if ended:
                    log.warning("responses that no gateway makes any more have failed", responses=ended)
            except ApiError:
                failed_s = time.monotonic()
            await asyncio.sleep(_SWEEP_S)


async def followed(leases: Leases, response_id: str, after: int) -> AsyncGenerator[ResponseEvent, None]:
    """The events after the number `after` of a response that another gateway makes, or made lately. Raises ApiError."""
    while True:
        events, is_more = await leases.events_after(response_id, after)
        for event in events:
            yield event
            after = event["sequence_number"]
        if not is_more:
            return
        if not events:
            await asyncio.sleep(_FOLLOW_S)
