"""Remembers what was said under an audio id, so that a later request can refer to it."""

import time
import uuid
from collections import OrderedDict

_MAX_TRANSCRIPTS = 10_000


class Transcripts:
    """Transcripts by audio id, each for `ttl_s` seconds; the oldest go first when there are too many."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._by_id: OrderedDict[str, tuple[float, str]] = OrderedDict()

    def new_id(self) -> tuple[str, int]:
        """A new audio id, and the Unix time, in seconds, at which it expires."""
        return f"audio_{uuid.uuid4().hex}", int(time.time() + self._ttl_s)

    def put(self, audio_id: str, expires_at: int, transcript: str) -> None:
        """Remembers `transcript` until `expires_at`."""
        now = time.time()
        self._by_id[audio_id] = (expires_at, transcript)
        while self._by_id:
            oldest_expires_at, _ = next(iter(self._by_id.values()))
            if oldest_expires_at > now and len(self._by_id) <= _MAX_TRANSCRIPTS:
                return
            self._by_id.popitem(last=False)

    def get(self, audio_id: str) -> str | None:
        """The transcript; None for an unknown or expired id."""
        expires_at, transcript = self._by_id.get(audio_id, (0.0, None))
        return transcript if expires_at > time.time() else None
