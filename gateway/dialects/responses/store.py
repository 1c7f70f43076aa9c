"""Stores responses and conversations for their owners, in memory or on disk."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.dialects.responses.parts import Item
from gateway.store import ClientStore

# Directories keep this schema: a change needs a new version and a migration.
_SCHEMA = """
BEGIN;
CREATE TABLE threads (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, created_at INTEGER NOT NULL, used_at REAL NOT NULL,
    bytes INTEGER NOT NULL, previous TEXT, body TEXT NOT NULL
);
CREATE INDEX threads_by_use ON threads (used_at);
CREATE TABLE items (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL,
    thread TEXT NOT NULL REFERENCES threads (id) ON DELETE CASCADE, is_output INTEGER NOT NULL, body TEXT NOT NULL
);
CREATE INDEX items_by_thread ON items (thread);
CREATE INDEX items_by_id ON items (id);
PRAGMA user_version = 1;
COMMIT;
"""
_ROW_BYTES = 512  # that a row takes beside its text
_SWEEP_S = 1.0  # sums of all threads take 0.2 s where they are small
_FOUND = "id = ? AND used_at > ? AND (owner = ? OR ? IS NULL)"


@dataclass(frozen=True)
class Thread:
    """A stored response or conversation.

    Attributes:
        created_at: Unix seconds.
        previous: id of the response before.
        body: the response's object, or the conversation's metadata.
        used_at: Unix seconds of the last creation, change or answer.
        size: in bytes, items included.
    """

    id: str
    created_at: int
    previous: str | None
    body: dict[str, Any]
    used_at: float = 0.0
    size: int = 0


class ResponseStore(ClientStore):
    """Stores responses and conversations. Owners see their own only; owner None sees all. Several gateways may share a
    directory.

    Args:
        directory: as of `Store`.
        ttl_s: how long unused threads stay.
        max_bytes: of all threads. Beyond, the largest owner's longest unused thread goes first.

    Raises:
        ApiError: 500, from every method: the directory cannot be used.
    """

    name, setting, fault = "responses", "responses_dir", "responses cannot be stored or read"
    version, schema = 1, _SCHEMA
    pragmas = ("journal_mode = WAL", "foreign_keys = ON", "busy_timeout = 5000")

    def __init__(self, directory: Path | None, ttl_s: float, max_bytes: int) -> None:
        super().__init__(directory)
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

        def put() -> None:
            rows = [(item["id"], 0, _text(item)) for item in items] + [(item["id"], 1, _text(item)) for item in output]
            body, now = _text(thread.body), time.time()
            with self.database:
                self.database.execute("DELETE FROM threads WHERE id = ?", (thread.id,))
                values = (thread.id, owner or "", thread.created_at, now, _size(body), thread.previous, body)
                self.database.execute("INSERT INTO threads VALUES (?, ?, ?, ?, ?, ?, ?)", values)
                self._unswept += _size(body)
                self._add(thread.id, rows)
                if conversation is not None:
                    self._add(conversation, [(name, 0, text) for name, _, text in rows])
                self._make_room(now)

        await self.run(put)

    async def rewrite(self, thread_id: str, body: dict[str, Any]) -> None:
        """Replaces a conversation's body."""
        text = _text(body)
        change = "bytes = bytes - length(CAST(body AS BLOB)) + ?, body = ?, used_at = ?"
        values = len(text.encode()), text, time.time(), thread_id
        await self.write(f"UPDATE threads SET {change} WHERE id = ?", values)

    async def touch(self, thread_id: str) -> None:
        """Marks a thread as used."""
        await self.write("UPDATE threads SET used_at = ? WHERE id = ?", (time.time(), thread_id))

    async def add(self, conversation: str, items: Sequence[Item]) -> None:
        """Adds items to a conversation."""

        def add() -> None:
            rows = [(item["id"], 0, _text(item)) for item in items]
            with self.database:
                self._add(conversation, rows)
                self._make_room(time.time())

        await self.run(add)

    def _add(self, thread: str, rows: list[tuple[str, int, str]]) -> None:
        size = sum(_size(text) for _, _, text in rows)
        update = "UPDATE threads SET bytes = bytes + ?, used_at = ? WHERE id = ?"
        found = self.database.execute(update, (size, time.time(), thread))
        self._unswept += size
        if found.rowcount:  # it may have been deleted meanwhile
            insert = "INSERT INTO items (id, thread, is_output, body) VALUES (?, ?, ?, ?)"
            self.database.executemany(insert, [(name, thread, is_output, text) for name, is_output, text in rows])

    def _make_room(self, now: float) -> None:
        """Has little to do where little was added since the last time."""
        if self._unswept < self._max_bytes // 256 and 0 <= now - self._swept_at < _SWEEP_S:
            return
        self._swept_at, self._unswept = now, 0
        self.database.execute("DELETE FROM threads WHERE used_at <= ?", (now - self._ttl_s,))
        owners = dict(self.database.execute("SELECT owner, sum(bytes) FROM threads GROUP BY owner").fetchall())
        excess = sum(owners.values()) - self._max_bytes
        while excess > 0:
            most = max(owners, key=lambda owner: owners[owner])
            oldest = "SELECT id, bytes FROM threads WHERE owner = ? ORDER BY used_at LIMIT 1"
            thread, freed = self.database.execute(oldest, (most,)).fetchone()
            self.database.execute("DELETE FROM threads WHERE id = ?", (thread,))
            owners[most] -= freed
            excess -= freed

    async def get(self, thread_id: str, owner: str | None) -> Thread | None:
        """None: there is none, or it is another owner's."""
        columns = "SELECT id, created_at, previous, body, used_at, bytes FROM threads WHERE"
        rows = await self.rows(f"{columns} {_FOUND}", (thread_id, *self._visible(owner)))
        for name, created_at, previous, body, used_at, size in rows:
            return Thread(name, created_at, previous, json.loads(body), used_at, size)
        return None

    async def size_of_turns(self, response_id: str) -> int:
        """Bytes of a response and its predecessors."""
        before = "SELECT threads.previous, threads.bytes FROM threads JOIN chain ON threads.id = chain.previous"
        chain = f"WITH RECURSIVE chain AS (SELECT previous, bytes FROM threads WHERE id = ? UNION ALL {before})"
        return (await self.rows(f"{chain} SELECT coalesce(sum(bytes), 0) FROM chain", (response_id,)))[0][0]

    async def items(self, thread_id: str, output: bool = False) -> list[Item]:
        """A conversation's items, or a response's input or output."""
        found = "SELECT body FROM items WHERE thread = ? AND is_output = ? ORDER BY sequence"
        return await self._read(found, (thread_id, output))

    async def page(self, thread_id: str, after: str | None, limit: int, order: str) -> list[Item] | None:
        """At most `limit` of a conversation's items, or of a response's input, in "asc" or "desc" order.

        Args:
            after: id of the item before them.

        Returns:
            None: there is no such item.
        """
        begin, sign = "", ">" if order == "asc" else "<"
        values: tuple[Any, ...] = (thread_id,)
        if after is not None:
            known = "SELECT sequence FROM items WHERE thread = ? AND is_output = 0 AND id = ? LIMIT 1"
            if not (found := await self.rows(known, (thread_id, after))):
                return None
            begin, values = f"AND sequence {sign} ?", (thread_id, found[0][0])
        these = f"thread = ? AND is_output = 0 {begin} ORDER BY sequence {order} LIMIT ?"
        return await self._read(f"SELECT body FROM items WHERE {these}", (*values, limit))

    async def item_of(self, thread_id: str, item_id: str) -> Item | None:
        """An item of a conversation."""
        found = "SELECT body FROM items WHERE thread = ? AND id = ? LIMIT 1"
        return next(iter(await self._read(found, (thread_id, item_id))), None)

    async def _read(self, statement: str, values: tuple[Any, ...]) -> list[Item]:
        """The items of the rows; megabytes of JSON are read in the database's thread."""
        return await self.run(lambda: [json.loads(body) for (body,) in self.database.execute(statement, values)])

    async def turns(self, response_id: str, owner: str | None) -> list[Item] | None:
        """The items of a response and its predecessors, oldest first, which count as used. None: one is missing."""

        def read() -> list[Item] | None:
            chain: list[str] = []
            at: str | None = response_id
            while at is not None:
                found = f"SELECT previous FROM threads WHERE {_FOUND}"
                row = self.database.execute(found, (at, *self._visible(owner))).fetchone()
                if row is None:
                    return None
                chain.append(at)
                at = row[0]
            bodies: list[str] = []
            with self.database:
                for thread in reversed(chain):
                    self.database.execute("UPDATE threads SET used_at = ? WHERE id = ?", (time.time(), thread))
                    found = "SELECT body FROM items WHERE thread = ? ORDER BY sequence"
                    bodies += [body for (body,) in self.database.execute(found, (thread,))]
            return [json.loads(body) for body in bodies]

        return await self.run(read)

    async def item(self, item_id: str, owner: str | None) -> Item | None:
        """An item of any thread of the owner."""
        found = (
            "SELECT items.body FROM items JOIN threads ON threads.id = items.thread "
            "WHERE items.id = ? AND used_at > ? AND (owner = ? OR ? IS NULL) LIMIT 1"
        )
        return next(iter(await self._read(found, (item_id, *self._visible(owner)))), None)

    async def remove(self, thread_id: str) -> None:
        await self.delete("DELETE FROM threads WHERE id = ?", (thread_id,))

    async def remove_item(self, conversation: str, item_id: str) -> None:
        size = f"coalesce(sum(length(CAST(body AS BLOB)) + {_ROW_BYTES}), 0)"
        freed = f"SELECT {size} FROM items WHERE thread = :thread AND id = :id"
        values = {"thread": conversation, "id": item_id}
        await self.delete(
            f"UPDATE threads SET bytes = bytes - ({freed}) WHERE id = :thread",
            values,
            ("DELETE FROM items WHERE thread = :thread AND id = :id", values),
        )

    def _visible(self, owner: str | None) -> tuple[float, str | None, str | None]:
        return time.time() - self._ttl_s, owner, owner


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _size(text: str) -> int:
    """Bytes that a row with `text` counts as."""
    return _ROW_BYTES + len(text.encode())
