"""Limits of keys that hold over all gateways of a database, without a call to it in any request.

Each gateway says every second what its keys use, and reads what they use at the others. Between two reports it knows
nothing of the others, so together they may admit as much too much as the others admit in that time.
"""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Self, TypeVar

import structlog
from sqlalchemy.exc import SQLAlchemyError

from gateway import tasks
from gateway.access import elsewhere
from gateway.access.api_key import WINDOW_S
from gateway.access.api_keys import ApiKeys
from gateway.access.excess import Excess
from gateway.access.key_usage import KeyUsage
from gateway.access.others import SILENT_S, Others
from gateway.access.own_usage import OwnUsage
from gateway.access.shared import SharedState
from gateway.access.usage_store import UsageStore
from gateway.errors import ApiError
from gateway.store.database import Database
from gateway.store.errors import StoreError, StoreUnavailable

REPORT_S = 1.0
_AT_ONCE = 50  # keys: the event loop waits for a millisecond
Item = TypeVar("Item")

log = structlog.get_logger()


class Usage:
    """Reports while it is open. One process of a gateway has it, and all its workers count what it reads.

    While the database cannot be reached, the gateway counts for itself. It forgets what runs at the others after
    `SILENT_S` seconds.

    Args:
        shared: where the workers count.
        keys: whose limits are looked at; each gateway reads a file of its own.

    Raises:
        StoreError: on entering: the database cannot be used. That it cannot be reached is no error.
    """

    def __init__(self, database: Database, shared: SharedState, keys: ApiKeys) -> None:
        self._store, self._shared, self._keys = UsageStore(database), shared, keys
        self._own, self._excess = OwnUsage(shared), Excess()
        self._written: dict[str, KeyUsage] | None = None  # None: nobody knows
        self._others, self._used = Others(), dict[str, KeyUsage]()
        self._failing_since: float | None = None

    async def __aenter__(self) -> Self:
        try:
            await self._store.__aenter__()
        except StoreUnavailable as error:
            self._failed(error)
        else:
            await self.report()
        self._reporting = asyncio.create_task(self._report_on())
        return self

    async def __aexit__(self, *_) -> None:
        """What was admitted here counts on at the others until it is a minute old."""
        await tasks.cancel(self._reporting)
        await self.report()

    async def _report_on(self) -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            await self.report()

    async def report(self) -> None:
        """Writes and reads once. The log says when this begins to fail, and when it no longer does."""
        try:
            await self._exchange()
        except (StoreError, SQLAlchemyError, ApiError) as error:
            self._failed(error)
        else:
            self._succeeded()

    def _failed(self, error: Exception) -> None:
        self._written, self._others, self._used = None, Others(), {}
        if self._failing_since is None:
            self._failing_since = self._shared.now()
            log.error("limits of API keys are counted without the other gateways", error=str(error))

    def _succeeded(self) -> None:
        if self._failing_since is not None:
            failed_s = round(self._shared.now() - self._failing_since, 1)
            log.info("limits of API keys are counted with the other gateways again", failed_s=failed_s)
            self._failing_since = None

    async def _exchange(self) -> None:
        entries = [key.entry for key in self._keys]
        own = await self._own.read(entries)
        changed, now = self._changed(own), self._shared.now()
        new = await self._store.exchange(self._shared.gateway, own, changed, self._others, self._shared.now)
        if changed is None:  # what other workers still count may be of an earlier time
            with self._shared.change() as database:
                new = {name: KeyUsage() for name in elsewhere.names(database)} | new
        for some in _batches(list(new)):
            with self._shared.change() as database:
                elsewhere.put(database, {name: new[name] for name in some})
            await asyncio.sleep(0)
        with self._shared.change() as database:
            elsewhere.prolong(database, now + SILENT_S)
        self._used = {name: usage for name, usage in (self._used | new).items() if usage != KeyUsage()}
        for some in _batches(entries):
            with self._shared.change() as database:
                self._own.forget(self._excess.move(database, some, own, self._used, now))
            await asyncio.sleep(0)
        self._written = own

    def _changed(self, own: dict[str, KeyUsage]) -> set[str] | None:
        """Keys to write. What has become older since is known to all."""
        if self._written is None:
            return None
        first, written = int(self._shared.now() - WINDOW_S) + 1, self._written
        gone = written.keys() - own.keys()
        return gone | {name for name in own if name not in written or own[name] != written[name].since(first)}


def _batches(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    return (items[begin : begin + _AT_ONCE] for begin in range(0, len(items), _AT_ONCE))
