"""Stores responses and conversations for their owners, in memory or in a database."""

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, delete, func, insert, select, update

from gateway.dialects.responses.parts import Item
from gateway.dialects.responses.tables import items, tables, threads
from gateway.store.database import Database
from gateway.store.queries import owned_by, rows_behind
from gateway.store.store import ClientStore

_ROW_BYTES = 512  # that a row takes beside its text
_SWEEP_S = 1.0  # sums of all threads take 0.2 s where they are small


@dataclass(frozen=True)
class Thread:
    """A stored response or conversation.

    Attributes:
        created_at: Unix seconds.
        previous: id of the response before.
        body: the response's object, or the conversation's metadata.
        used_at: Unix seconds of the last creation, change or answer.
        size: in bytes, items included.
        holder: name of the gateway that makes it; None: it has ended.
    """

    id: str
    created_at: int
    previous: str | None
    body: dict[str, Any]
    used_at: float = 0.0
    size: int = 0
    holder: str | None = None


class ResponseStore(ClientStore):
    """Stores responses and conversations. Owners see their own only; owner None sees all. Several gateways may share a
    database or a directory.

    Args:
        place: as of `Store`.
        ttl_s: how long unused threads stay.
        max_bytes: of all threads. Beyond, the largest owner's longest unused thread goes first.

    Raises:
        ApiError: from every method: 500, the place cannot be used; 503, it cannot be reached.
    """

    name, setting, fault = "responses", "responses_dir", "responses cannot be stored or read"
    tables = tables

    def __init__(self, place: Database | Path | None, ttl_s: float, max_bytes: int) -> None:
        super().__init__(place)
        self._ttl_s, self._max_bytes = ttl_s, max_bytes
        self._swept_at, self._unswept = 0.0, 0

    async def put(
        self,
        thread: Thread,
        owner: str | None,
        items: Sequence[Item] = (),
        output: Sequence[Item] = (),
        conversation: str | None = None,
    ) -> None:
        """Stores or replaces a thread; a conversation's items are input. `conversation` gets all items, too."""
        rows = rows_of(items, output)
        await self.write(lambda connection: self.insert(connection, thread, owner, rows, conversation))

    def insert(
        self,
        connection: Connection,
        thread: Thread,
        owner: str | None,
        rows: Sequence["ItemRow"],
        conversation: str | None = None,
    ) -> None:
        """`put`, in a transaction."""
        body, now = text_of(thread.body), time.time()
        connection.execute(delete(threads).where(threads.c.id == thread.id))
        size = _size(body)
        values = {"id": thread.id, "owner": owner or "", "created_at": thread.created_at, "used_at": now}
        connection.execute(insert(threads).values(**values, bytes=size, previous=thread.previous, body=body))
        self._unswept += size
        self._add(connection, thread.id, rows)
        if conversation is not None:
            self._add(connection, conversation, [(name, 0, text) for name, _, text in rows])
        self._make_room(connection, now)

    def complete(self, connection: Connection, thread_id: str, body: dict[str, Any], rows: Sequence["ItemRow"]) -> None:
        """Replaces a thread's body and adds items to it, in a transaction."""
        where, text = threads.c.id == thread_id, text_of(body)
        before = connection.execute(select(threads.c.body).where(where).with_for_update()).scalar()
        if before is not None:
            changes = {"bytes": threads.c.bytes + _size(text) - _size(before), "body": text}
            connection.execute(update(threads).where(where).values(changes))
            self.append(connection, thread_id, rows)

    def append(self, connection: Connection, thread_id: str, rows: Sequence["ItemRow"]) -> None:
        """`add`, in a transaction."""
        self._add(connection, thread_id, rows)
        self._make_room(connection, time.time())

    async def rewrite(self, thread_id: str, body: dict[str, Any]) -> None:
        """Replaces a conversation's body."""
        await self.write(lambda connection: self.complete(connection, thread_id, body, []))

    async def add(self, conversation: str, items: Sequence[Item]) -> None:
        """Adds items to a conversation."""
        rows = rows_of(items)
        await self.write(lambda connection: self.append(connection, conversation, rows))

    def _add(self, connection: Connection, thread: str, rows: Sequence["ItemRow"]) -> None:
        size = sum(_size(text) for _, _, text in rows)
        changes = {"bytes": threads.c.bytes + size, "used_at": time.time()}
        found = connection.execute(update(threads).where(threads.c.id == thread).values(changes))
        self._unswept += size
        if rows and found.rowcount:  # it may have been deleted meanwhile
            added = [
                {"id": name, "thread": thread, "is_output": is_output, "body": text} for name, is_output, text in rows
            ]
            connection.execute(insert(items), added)

    def _make_room(self, connection: Connection, now: float) -> None:
        """Has little to do where little was added since the last time."""
        if self._unswept < self._max_bytes // 256 and 0 <= now - self._swept_at < _SWEEP_S:
            return
        self._swept_at, self._unswept = now, 0
        connection.execute(delete(threads).where(threads.c.used_at <= now - self._ttl_s))
        sums = connection.execute(select(threads.c.owner, func.sum(threads.c.bytes)).group_by(threads.c.owner))
        owners: dict[str, int] = {owner: int(size) for owner, size in sums}
        excess = sum(owners.values()) - self._max_bytes
        while excess > 0:
            most = max(owners, key=lambda owner: owners[owner])
            of_most = select(threads.c.id, threads.c.bytes).where(threads.c.owner == most, threads.c.holder.is_(None))
            oldest = connection.execute(of_most.order_by(threads.c.used_at).limit(1)).first()
            if oldest is None:  # the others are in the making, or another gateway made room meanwhile
                return
            connection.execute(delete(threads).where(threads.c.id == oldest.id))
            owners[most] -= oldest.bytes
            excess -= oldest.bytes

    async def get(self, thread_id: str, owner: str | None) -> Thread | None:
        """None: there is none, or it is another owner's."""
        found = await self.read(lambda connection: connection.execute(self._thread(thread_id, owner)).first())
        return None if found is None else _thread_of(found)

    def _thread(self, thread_id: str, owner: str | None) -> Select[Any]:
        return select(threads).where(threads.c.id == thread_id, self._visible(owner))

    async def size_of_turns(self, response_id: str) -> int:
        """Bytes of a response and its predecessors."""
        columns = select(threads.c.previous, threads.c.bytes)
        chain = columns.where(threads.c.id == response_id).cte("chain", recursive=True)
        chain = chain.union_all(columns.join(chain, threads.c.id == chain.c.previous))
        total = select(func.coalesce(func.sum(chain.c.bytes), 0))
        return int(await self.read(lambda connection: connection.execute(total).scalar_one()))

    async def items(self, thread_id: str, output: bool = False) -> list[Item]:
        """A conversation's items, or a response's input or output."""
        found = select(items.c.body).where(items.c.thread == thread_id, items.c.is_output == int(output))
        return await self._read(found.order_by(items.c.sequence))

    async def page(self, thread_id: str, after: str | None, limit: int, order: str) -> list[Item] | None:
        """At most `limit` of a conversation's items, or of a response's input, in "asc" or "desc" order.

        Args:
            after: id of the item before them.

        Returns:
            None: there is no such item.
        """
        found = select(items.c.body).where(items.c.thread == thread_id, items.c.is_output == 0)
        is_after = None if after is None else items.c.id == after

        def read(connection: Connection) -> list[Item] | None:
            rows = rows_behind(connection, found, items.c.sequence, is_after, limit, order == "desc")
            return None if rows is None else _loaded(row.body for row in rows)

        return await self.read(read)

    async def item_of(self, thread_id: str, item_id: str) -> Item | None:
        """An item of a conversation."""
        found = select(items.c.body).where(items.c.thread == thread_id, items.c.id == item_id).limit(1)
        return next(iter(await self._read(found)), None)

    async def _read(self, found: Select[Any]) -> list[Item]:
        """The items of the rows; megabytes of JSON are read in the database's thread."""
        return await self.read(lambda connection: _loaded(connection.execute(found).scalars()))

    async def turns(self, response_id: str, owner: str | None) -> list[Item] | None:
        """The items of a response and its predecessors, oldest first, which count as used. None: one is missing."""

        def read(connection: Connection) -> list[Item] | None:
            chain: list[str] = []
            at: str | None = response_id
            while at is not None:
                row = connection.execute(self._thread(at, owner).with_only_columns(threads.c.previous)).first()
                if row is None:
                    return None
                chain.append(at)
                at = row.previous
            connection.execute(update(threads).where(threads.c.id.in_(chain)).values(used_at=time.time()))
            found: list[Item] = []
            for thread in reversed(chain):
                of_thread = select(items.c.body).where(items.c.thread == thread).order_by(items.c.sequence)
                found += _loaded(connection.execute(of_thread).scalars())
            return found

        return await self.write(read)

    async def item(self, item_id: str, owner: str | None) -> Item | None:
        """An item of any thread of the owner."""
        found = select(items.c.body).join(threads).where(items.c.id == item_id, self._visible(owner)).limit(1)
        return next(iter(await self._read(found)), None)

    async def remove(self, thread_id: str) -> None:
        await self.erase(lambda connection: connection.execute(delete(threads).where(threads.c.id == thread_id)))

    async def remove_item(self, conversation: str, item_id: str) -> None:
        these = items.c.thread == conversation, items.c.id == item_id

        def remove(connection: Connection) -> None:
            gone = connection.execute(delete(items).where(*these).returning(items.c.body)).scalars()
            freed = sum(map(_size, gone))
            less = update(threads).where(threads.c.id == conversation).values(bytes=threads.c.bytes - freed)
            connection.execute(less)

        await self.erase(remove)

    def _visible(self, owner: str | None) -> ColumnElement[bool]:
        return (threads.c.used_at > time.time() - self._ttl_s) & owned_by(owner, threads.c.owner)


ItemRow = tuple[str, int, str]
"""(id, whether it is output, JSON) of an item."""


def rows_of(given: Iterable[Item], output: Iterable[Item] = ()) -> list[ItemRow]:
    return [(item["id"], 0, text_of(item)) for item in given] + [(item["id"], 1, text_of(item)) for item in output]


def _loaded(bodies: Iterable[str]) -> list[Item]:
    return [json.loads(body) for body in bodies]


def _thread_of(row: Row[Any]) -> Thread:
    return Thread(row.id, row.created_at, row.previous, json.loads(row.body), row.used_at, row.bytes, row.holder)


def text_of(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _size(text: str) -> int:
    """Bytes that a row with `text` counts as."""
    return _ROW_BYTES + len(text.encode())
