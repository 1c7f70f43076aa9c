"""Batches in a database: what each is, which gateway works on it, and what its lines came to."""

import asyncio
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Row, Update, delete, func, insert, or_, select, update

from gateway.answers.batches.tables import batches, lines, tables
from gateway.store import clock
from gateway.store.database import Database
from gateway.store.queries import owned_by, rows_behind
from gateway.store.sqlite import file_of
from gateway.store.store import ClientStore

UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")
_LINES_AT_ONCE = 100


@dataclass(frozen=True)
class StoredBatch:
    """A batch.

    Attributes:
        owner: name of its API key; "" without keys.
        body: OpenAI's Batch object.
        cancels: whether its lines that have not begun are to be left out.
    """

    id: str
    owner: str
    body: dict[str, Any]
    cancels: bool

    @property
    def is_unfinished(self) -> bool:
        return self.body["status"] in UNFINISHED


class BatchLost(Exception):
    """Another gateway works on the batch, as this one did not renew its lease."""


class BatchStore(ClientStore):
    """Owners see their own batches only; owner None sees all.

    Args:
        place: as of `Store`.
        holder: this gateway's name.
        ttl_s: how long a batch is kept after it was made.
    """

    name, setting, fault = "batches", "files_dir", "batches cannot be stored or read"
    tables = tables

    def __init__(self, place: Database | Path | None, holder: str, ttl_s: float) -> None:
        super().__init__(place)
        self._place = place
        self._holder, self._ttl_s = holder, ttl_s

    async def may_have_some(self) -> bool:
        """False: there is no file of SQLite, which nobody then has to look into."""
        place = self._place
        return not isinstance(place, Path) or await asyncio.to_thread(file_of(place, self.name).exists)

    async def add(self, batch: StoredBatch, models: Iterable[str]) -> None:
        """A new one, on which nobody works. `models`: all that this gateway serves."""
        values = {"id": batch.id, "owner": batch.owner, "models": _names(models), **_columns(batch.body)}
        await self.write(lambda connection: connection.execute(insert(batches).values(values)))

    async def get(self, batch_id: str, owner: str | None) -> StoredBatch | None:
        """None: there is none, or it is another owner's."""
        found = select(batches).where(batches.c.id == batch_id, owned_by(owner, batches.c.owner))
        return await self.read(lambda connection: _first(connection, connection.execute(found).all()))

    async def page(self, after: str | None, limit: int, owner: str | None) -> list[StoredBatch] | None:
        """At most `limit`, newest first, behind the one with the id `after`. None: there is no such batch."""
        found = select(batches).where(owned_by(owner, batches.c.owner))
        is_after = None if after is None else batches.c.id == after

        def read(connection: Connection) -> list[StoredBatch] | None:
            rows = rows_behind(connection, found, batches.c.sequence, is_after, limit, newest_first=True)
            return None if rows is None else [_batch_of(connection, row) for row in rows]

        return await self.read(read)

    async def request_cancel(self, batch_id: str) -> None:
        unfinished = batches.c.id == batch_id, batches.c.status.in_(UNFINISHED)
        await self.write(lambda connection: connection.execute(update(batches).where(*unfinished).values(cancels=True)))

    async def take(self, models: Iterable[str]) -> StoredBatch | None:
        """The oldest batch on which nobody works, for this gateway. None: there is none. Removes old ones.

        Args:
            models: all that this gateway serves. Another system may keep its batches here, too.
        """
        is_ours = batches.c.models == _names(models)

        def take(connection: Connection) -> StoredBatch | None:
            self.database.lock(connection, "batches.take")
            old = int(time.time() - self._ttl_s)
            connection.execute(delete(batches).where(batches.c.expires_at < old, batches.c.status.not_in(UNFINISHED)))
            now = clock.now(connection)
            is_free = or_(batches.c.holder.is_(None), batches.c.held_until < now)
            free = (
                select(batches).where(batches.c.status.in_(UNFINISHED), is_free, is_ours).order_by(batches.c.sequence)
            )
            row = connection.execute(free.limit(1)).first()
            if row is None:
                return None
            held = {"holder": self._holder, "held_until": clock.lease_end(connection)}
            connection.execute(update(batches).where(batches.c.id == row.id).values(held))
            return _batch_of(connection, row)

        return await self.write(take)

    async def renew(self, batch_id: str) -> bool:
        """Whether it is to be cancelled. Raises BatchLost."""

        def renew(connection: Connection) -> bool | None:
            longer = self._held(batch_id).values(held_until=clock.lease_end(connection))
            return connection.execute(longer.returning(batches.c.cancels)).scalar()

        cancels = await self.write(renew)
        if cancels is None:
            raise BatchLost
        return cancels

    async def save(self, batch: StoredBatch, is_over: bool = False) -> None:
        """Replaces a held batch's object. `is_over`: nobody works on it any more. Raises BatchLost."""
        values = _columns(batch.body) | ({"holder": None, "held_until": None} if is_over else {})

        def save(connection: Connection) -> bool:
            if not connection.execute(self._held(batch.id).values(values)).rowcount:
                return False
            if is_over:
                connection.execute(delete(lines).where(lines.c.batch == batch.id))
            return True

        if not await self.write(save):
            raise BatchLost

    async def give_back(self, batch_id: str) -> None:
        """Another gateway may take it at once."""
        free = self._held(batch_id).values(holder=None, held_until=None)
        await self.write(lambda connection: connection.execute(free))

    async def add_line(self, batch_id: str, number: int, is_error: bool, body: dict[str, Any]) -> None:
        """Keeps what a line of a held batch came to, once. Raises BatchLost."""
        row = {"batch": batch_id, "number": number, "is_error": is_error, "body": json.dumps(body, ensure_ascii=False)}
        known = select(lines.c.number).where(lines.c.batch == batch_id, lines.c.number == number)
        held = select(batches.c.id).where(batches.c.id == batch_id, batches.c.holder == self._holder)

        def add(connection: Connection) -> bool:
            if connection.execute(held.with_for_update()).first() is None:
                return False
            if connection.execute(known).first() is None:
                connection.execute(insert(lines).values(row))
            return True

        if not await self.write(add):
            raise BatchLost

    async def done(self, batch_id: str) -> set[int]:
        """Numbers of the lines that came to something."""
        found = select(lines.c.number).where(lines.c.batch == batch_id)
        return await self.read(lambda connection: set(connection.execute(found).scalars()))

    async def results(self, batch_id: str, is_error: bool, after: int) -> list[tuple[int, str]]:
        """(number, JSON) of the next lines after the number `after`, in order; at most 100."""
        these = lines.c.batch == batch_id, lines.c.is_error == is_error, lines.c.number > after
        found = select(lines.c.number, lines.c.body).where(*these).order_by(lines.c.number).limit(_LINES_AT_ONCE)
        return await self.read(lambda connection: [(row.number, row.body) for row in connection.execute(found)])

    def _held(self, batch_id: str) -> Update:
        return update(batches).where(batches.c.id == batch_id, batches.c.holder == self._holder)


def _names(models: Iterable[str]) -> str:
    return json.dumps(sorted(models))


def _columns(body: dict[str, Any]) -> dict[str, Any]:
    text = json.dumps(body, ensure_ascii=False)
    return {"status": body["status"], "expires_at": body["expires_at"], "body": text}


def _first(connection: Connection, rows: Iterable[Row[Any]]) -> StoredBatch | None:
    return next((_batch_of(connection, row) for row in rows), None)


def _batch_of(connection: Connection, row: Row[Any]) -> StoredBatch:
    """With the counts of what was done so far."""
    body = json.loads(row.body)
    if row.status in UNFINISHED and row.status != "validating":
        count = func.count().label("lines")
        each = select(lines.c.is_error, count).where(lines.c.batch == row.id).group_by(lines.c.is_error)
        counted = {found.is_error: found.lines for found in connection.execute(each)}
        body["request_counts"] |= {"completed": counted.get(False, 0), "failed": counted.get(True, 0)}
    if row.cancels and row.status in UNFINISHED:
        body["status"] = "cancelling"
    return StoredBatch(row.id, row.owner, body, row.cancels)
