"""Blobs that belong to rows of a store, by the rows' ids."""

import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
from pathlib import Path
from typing import ClassVar

import structlog
from sqlalchemy import Column, Connection, MetaData, Table, Text, insert, select

from gateway.settings import GatewaySettings
from gateway.store.blobs import Blobs
from gateway.store.database import Database
from gateway.store.errors import required, store_errors
from gateway.store.store import ClientStore

_SETTLED_S = 3600.0  # the row of a blob is written at once after it, or shortly before: one without is then nobody's

log = structlog.get_logger()


def spaces_table(name: str, tables: MetaData) -> Table:
    """One row: what the names of this database's blobs begin with. Other databases may have theirs in the same
    bucket."""
    return Table(name, tables, Column("name", Text, primary_key=True))


class BlobStore(ClientStore):
    """A store whose rows have blobs.

    Attributes:
        spaces: as of `spaces_table`.
        space: what the names of its blobs begin with; from the first call on.
    """

    spaces: ClassVar[Table]
    space = ""

    def recover(self, connection: Connection) -> None:
        self.database.lock(connection, self.name)  # another gateway may begin, too
        found = connection.execute(select(self.spaces.c.name)).scalar()
        if found is None:
            found = secrets.token_hex(8)
            connection.execute(insert(self.spaces).values(name=found))
        self.space = found


class RowBlobs:
    """The blobs of `store`, by ids of its rows.

    Raises:
        ApiError: from every method: 500, the place cannot be used; 503, it cannot be reached.
    """

    def __init__(self, blobs: Blobs, store: BlobStore) -> None:
        self._blobs, self._store = blobs, store

    async def put(self, row_id: str, pieces: AsyncIterable[bytes]) -> int:
        """Writes one, and returns its size. If this raises, or is cancelled, or if `pieces` raises, there is none."""
        with store_errors(self._store.fault):
            return await self._blobs.put(self._name(row_id), pieces)

    async def open(self, row_id: str, start: int = 0, end: int | None = None) -> AsyncGenerator[bytes, None] | None:
        """Its bytes from `start` to before `end`, or to its own. None: it is not there."""
        with store_errors(self._store.fault):
            pieces = await self._blobs.open(self._name(row_id), start, end)
        return None if pieces is None else self._with_errors(pieces)

    async def size(self, row_id: str) -> int | None:
        """None: it is not there."""
        with store_errors(self._store.fault):
            return await self._blobs.size(self._name(row_id))

    async def delete(self, row_id: str) -> None:
        """Removes it, if it is there."""
        with store_errors(self._store.fault):
            await self._blobs.delete(self._name(row_id))

    async def sweep(self, known: Callable[[list[str]], Awaitable[set[str]]]) -> None:
        """Removes what crashes left: blobs whose ids are not among those that `known` returns of some."""
        with store_errors(self._store.fault):
            async for names in self._blobs.older(self._space(), time.time() - _SETTLED_S):
                ids = {name.rpartition("/")[2]: name for name in names}
                for row_id in ids.keys() - await known(list(ids)):
                    await self._blobs.delete(ids[row_id])
                    log.warning("removed bytes that belong to nothing", store=self._store.name, id=row_id)

    def _name(self, row_id: str) -> str:
        return f"{self._space()}/{row_id}"

    def _space(self) -> str:
        assert self._store.space, "the store was used before"
        return self._store.space

    async def _with_errors(self, pieces: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        with store_errors(self._store.fault):
            async for piece in pieces:
                yield piece


def blobs_of(settings: GatewaySettings) -> Blobs:
    """Where the bytes of files are. Raises StoreError: nowhere, this user has no home directory."""
    if settings.blobs_url is not None:
        return Blobs(settings.blobs_url, "blobs_url")
    folder: Path = required(settings.files_dir, "files_dir", "files")
    return Blobs(folder / "blobs", "files_dir")


def shared_blobs_of(settings: GatewaySettings, database: Database | None) -> Blobs | None:
    """Where several gateways find the bytes of rows that they share, which is where those of files are: if they have a
    database, or a bucket. None: neither. Raises StoreError, as `blobs_of`."""
    return blobs_of(settings) if database is not None or settings.blobs_url is not None else None
