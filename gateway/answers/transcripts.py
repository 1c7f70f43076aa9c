"""What spoken answers said, for the turns that refer to them by audio id."""

import time
import uuid
from contextlib import suppress

from gateway.access.shared import SharedState
from gateway.errors import ApiError

_TTL_S = 3600.0
_MAX_TRANSCRIPTS = 10_000


class Transcripts:
    """Transcripts by audio id, each kept for `ttl_s` seconds; the oldest go first when there are too many."""

    def __init__(self, ttl_s: float = _TTL_S, shared: SharedState | None = None) -> None:
        self._ttl_s, self._shared = ttl_s, shared or SharedState()

    def new_id(self) -> tuple[str, int]:
        """A new audio id, and the Unix time at which it expires."""
        return f"audio_{uuid.uuid4().hex}", int(time.time() + self._ttl_s)

    def put(self, audio_id: str, expires_at: int, transcript: str) -> None:
        with suppress(ApiError), self._shared.change() as database:  # it has been logged, and the answer is complete
            database.execute("INSERT OR REPLACE INTO transcripts VALUES (?, ?, ?)", (audio_id, expires_at, transcript))
            (last,) = database.execute("SELECT max(rowid) FROM transcripts").fetchone()
            too_old = (time.time(), last - _MAX_TRANSCRIPTS)
            database.execute("DELETE FROM transcripts WHERE expires_at <= ? OR rowid <= ?", too_old)

    def get(self, audio_id: str) -> str | None:
        statement = "SELECT transcript FROM transcripts WHERE audio_id = ? AND expires_at > ?"
        found = self._shared.first(statement, audio_id, time.time())
        return None if found is None else found[0]
