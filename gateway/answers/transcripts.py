"""What spoken answers said, for the turns that refer to them by audio id."""

import asyncio
import time
import uuid
from collections.abc import Iterable
from contextlib import suppress

from gateway.access.shared import SharedState
from gateway.answers.conversation import AssistantMessage, Message
from gateway.answers.transcript_store import TranscriptStore
from gateway.errors import ApiError

_TTL_S = 3600.0
_MAX_TRANSCRIPTS = 10_000


class Transcripts:
    """Transcripts by audio id, each kept for `ttl_s` seconds; the oldest go first when there are too many.

    Args:
        shared: of this gateway's processes.
        store: of all gateways; None: this is the only one.
    """

    def __init__(
        self, ttl_s: float = _TTL_S, shared: SharedState | None = None, store: TranscriptStore | None = None
    ) -> None:
        self._ttl_s, self._shared, self._store = ttl_s, shared or SharedState(), store
        self._storing = set[asyncio.Task[None]]()

    def new_id(self) -> tuple[str, int]:
        """A new audio id, and the Unix time at which it expires."""
        return f"audio_{uuid.uuid4().hex}", int(time.time() + self._ttl_s)

    def put(self, audio_id: str, expires_at: int, transcript: str) -> None:
        """Other gateways know it a moment later: no answer waits for the database."""
        self._keep(audio_id, expires_at, transcript)
        if self._store is not None:
            task = asyncio.create_task(self._put(self._store, audio_id, expires_at, transcript))
            self._storing.add(task)
            task.add_done_callback(self._storing.discard)

    async def load(self, messages: Iterable[Message]) -> None:
        """Has what earlier answers said at other gateways, if any of `messages` refers to one. Raises ApiError: 503."""
        if self._store is None:
            return
        audio = [message.audio for message in messages if isinstance(message, AssistantMessage)]
        missing = {each.id for each in audio if each is not None and self.get(each.id) is None}
        if missing:
            for found in await self._store.find(missing):
                self._keep(*found)

    def get(self, audio_id: str) -> str | None:
        statement = "SELECT transcript FROM transcripts WHERE audio_id = ? AND expires_at > ?"
        found = self._shared.first(statement, audio_id, time.time())
        return None if found is None else found[0]

    async def close(self) -> None:
        """Waits for what is being stored."""
        await asyncio.gather(*self._storing)

    def _keep(self, audio_id: str, expires_at: int, transcript: str) -> None:
        with suppress(ApiError), self._shared.change() as database:  # it has been logged, and the answer is complete
            database.execute("INSERT OR REPLACE INTO transcripts VALUES (?, ?, ?)", (audio_id, expires_at, transcript))
            (last,) = database.execute("SELECT max(rowid) FROM transcripts").fetchone()
            too_old = (time.time(), last - _MAX_TRANSCRIPTS)
            database.execute("DELETE FROM transcripts WHERE expires_at <= ? OR rowid <= ?", too_old)

    @staticmethod
    async def _put(store: TranscriptStore, audio_id: str, expires_at: int, transcript: str) -> None:
        with suppress(ApiError):  # it has been logged; this gateway knows it all the same
            await store.put(audio_id, expires_at, transcript)
