"""Leases of responses in the background: which gateway makes one, and that it ends exactly once.

A lease is renewed as long as its gateway lives. When it is over, any other gateway ends the response as failed. A
gateway that stood still meanwhile finds its lease gone, and changes nothing.
"""

import json
import time
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, delete, func, insert, select, update

from gateway.dialects.responses.output import ResponseEvent
from gateway.dialects.responses.parts import Item
from gateway.dialects.responses.store import ResponseStore, Thread, rows_of, text_of
from gateway.dialects.responses.tables import events, threads
from gateway.store import clock

RENEWAL_S = 4.0
REPLAY_S = 600.0  # how long events are kept after the end
_EVENTS_AT_ONCE = 500
_LAST = tuple(f"response.{end}" for end in ("completed", "incomplete", "failed", "cancelled"))  # types of last events
LOST = {"code": "server_error", "message": "the server stopped before the response was finished"}


class Leases:
    """The responses that the gateway `name` makes; methods raise what those of `store` raise."""

    def __init__(self, store: ResponseStore, name: str) -> None:
        self._store, self.name = store, name
        self._renewed_s = -float("inf")

    async def begin(self, thread: Thread, owner: str | None, given: Sequence[Item]) -> None:
        """Stores a response that this gateway makes."""
        rows = rows_of(given)

        def begin(connection: Connection) -> None:
            self._store.insert(connection, thread, owner, rows)
            lease = {"holder": self.name, "held_until": clock.lease_end(connection)}
            connection.execute(update(threads).where(threads.c.id == thread.id).values(lease))

        await self._store.write(begin)

    async def finish(
        self, thread: Thread, given: Sequence[Item], output: Sequence[Item], conversation: str | None
    ) -> bool:
        """Stores its end. False: another gateway has ended it, or it was removed; then nothing changes."""
        added, of_conversation = rows_of([], output), rows_of([*given, *output])

        def finish(connection: Connection) -> bool:
            mine = (threads.c.id == thread.id) & (threads.c.holder == self.name)
            if not connection.execute(update(threads).where(mine).values(holder=None)).rowcount:
                return False
            self._store.complete(connection, thread.id, thread.body, added)
            if conversation is not None:
                self._store.append(connection, conversation, of_conversation)
            return True

        return await self._store.write(finish)

    async def renew(self, ids: Sequence[str]) -> dict[str, bool]:
        """Renews the leases of `ids`, if it is time. Returns those that this gateway still has: whether each is to be
        cancelled, by id."""
        mine = (threads.c.holder == self.name) & threads.c.id.in_(ids)
        is_time = time.monotonic() - self._renewed_s >= RENEWAL_S
        found = select(threads.c.id, threads.c.cancels).where(mine)

        def look(connection: Connection) -> dict[str, bool]:
            return {row.id: row.cancels for row in connection.execute(found)}

        def renew(connection: Connection) -> dict[str, bool]:
            changes = {"held_until": clock.lease_end(connection), "used_at": time.time()}
            connection.execute(update(threads).where(mine).values(changes))
            return look(connection)

        if not is_time:
            return await self._store.read(look)
        held = await self._store.write(renew)
        self._renewed_s = time.monotonic()
        return held

    async def request_cancel(self, response_id: str) -> None:
        """Its gateway, whichever it is, sees it within a second."""
        held = threads.c.id == response_id, threads.c.holder.is_not(None)
        await self._store.write(
            lambda connection: connection.execute(update(threads).where(*held).values(cancels=True))
        )

    async def end_lost(self) -> int:
        """Ends as failed what no gateway makes any more, and removes events that are not kept any longer. Returns how
        many it ended."""

        def end(connection: Connection) -> int:
            self._store.database.lock(connection, "responses.end_lost")
            over = clock.now(connection)
            lost = select(threads.c.id, threads.c.body).where(
                threads.c.holder.is_not(None), threads.c.held_until < over
            )
            found = connection.execute(lost.with_for_update()).all()
            for row in found:
                body = json.loads(row.body) | {"status": "failed", "error": LOST}
                connection.execute(update(threads).where(threads.c.id == row.id).values(holder=None, held_until=over))
                self._store.complete(connection, row.id, body, [])
                last = select(func.max(events.c.number)).where(events.c.thread == row.id)
                number = connection.execute(last).scalar()
                number = 0 if number is None else number + 1
                failed = {"type": "response.failed", "response": body | {"output": []}, "sequence_number": number}
                values = {"thread": row.id, "number": number, "body": text_of(failed)}
                connection.execute(insert(events).values(values))
            old = threads.c.held_until < over - REPLAY_S
            connection.execute(delete(events).where(events.c.thread.in_(select(threads.c.id).where(old))))
            connection.execute(update(threads).where(old).values(held_until=None))
            return len(found)

        return await self._store.write(end)

    async def publish(self, response_id: str, body: dict[str, Any], added: Sequence[ResponseEvent]) -> bool:
        """Keeps events of a response that this gateway makes, and its object as it is, for other gateways. False: its
        end is stored already; then nothing changes."""

        def publish(connection: Connection) -> bool:
            mine = (threads.c.id == response_id) & (threads.c.holder == self.name)
            if connection.execute(select(threads.c.id).where(mine).with_for_update()).first() is None:
                return False
            self._store.complete(connection, response_id, body, [])
            _keep(connection, response_id, added)
            return True

        return await self._store.write(publish)

    async def publish_end(self, response_id: str, added: Sequence[ResponseEvent]) -> None:
        """Keeps the last events of a response that this gateway has finished: no more follow."""
        mine = threads.c.id == response_id

        def publish(connection: Connection) -> None:
            over = {"held_until": clock.now(connection)}
            if connection.execute(update(threads).where(mine).values(over)).rowcount:
                _keep(connection, response_id, added)

        await self._store.write(publish)

    async def events_after(self, response_id: str, number: int) -> tuple[list[ResponseEvent], bool]:
        """(events after `number`, whether more may come)."""
        thread = select(threads.c.holder, threads.c.held_until).where(threads.c.id == response_id)
        after = select(events.c.body).where(events.c.thread == response_id, events.c.number > number)
        some = after.order_by(events.c.number).limit(_EVENTS_AT_ONCE)

        def read(connection: Connection) -> tuple[list[ResponseEvent], bool]:
            # before the events: what is published after it is read later
            row = connection.execute(thread).first()
            is_made = row is not None and row.holder is not None  # if not by its gateway, another one ends it
            is_held = row is not None and row.held_until is not None and row.held_until > clock.now(connection)
            bodies = connection.execute(some).scalars().all()
            return [json.loads(body) for body in bodies], is_made or is_held or len(bodies) == _EVENTS_AT_ONCE

        return await self._store.read(read)


def _keep(connection: Connection, response_id: str, added: Sequence[ResponseEvent]) -> None:
    """Keeps what is not kept yet: a try whose answer was lost may have done it. Behind the last event of a response,
    which may be that of another gateway that has ended it, comes nothing."""
    kept = select(events.c.number, events.c.body).where(events.c.thread == response_id)
    last = connection.execute(kept.order_by(events.c.number.desc()).limit(1)).first()
    if last is not None and json.loads(last.body)["type"] in _LAST:
        return
    rows = [
        {"thread": response_id, "number": each["sequence_number"], "body": text_of(each)}
        for each in added
        if last is None or each["sequence_number"] > last.number
    ]
    if rows:
        connection.execute(insert(events), rows)
