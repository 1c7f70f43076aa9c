"""The gateways that share a database: each says where it is, and finds the others."""

import asyncio
from contextlib import suppress
from typing import Self

import structlog

from gateway.errors import ApiError
from gateway.http.neighbours.store import NeighbourStore
from gateway.store.database import Database
from gateway.tasks import cancel

_RENEWAL_S = 4.0  # of a lease of 15 s: two may fail

log = structlog.get_logger()


class NeighbourGateways:
    """While it is open, others find this gateway.

    Args:
        name: of this gateway, in ids of what it holds.
        own_url: where others reach it; None: nobody does, or another process of the gateway announces it.
    """

    def __init__(self, database: Database, name: str, own_url: str | None) -> None:
        self._store, self._name, self._own_url = NeighbourStore(database), name, own_url
        self._announcing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._own_url is not None:
            await self._announce(self._own_url)  # an id that a client gets now is found at once
            self._announcing = asyncio.create_task(self._announce_often(self._own_url))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._announcing is not None:
            await cancel(self._announcing)
            with suppress(ApiError):  # then it goes with its lease
                await self._store.leave(self._name)

    async def url_of(self, name: str) -> str | None:
        """None: there is no such gateway, or it has gone. Raises ApiError: 503, the database cannot be reached."""
        return await self._store.url_of(name)

    async def _announce_often(self, url: str) -> None:
        while True:
            await asyncio.sleep(_RENEWAL_S)
            await self._announce(url)

    async def _announce(self, url: str) -> None:
        try:
            await self._store.announce(self._name, url)
        except ApiError:
            pass  # the store has logged it, and may be there again in seconds
        except Exception:
            log.exception("this gateway cannot be announced to others")
