"""When a user said what is heard at some moment of the session's sound."""

import time

_PAUSE_S = 0.5  # without sound from the client, after which its time begins anew: it was muted
_DRIFT = 0.001  # a client's clock may be so much slower


class SoundClock:
    """Maps milliseconds of the sound to `time.monotonic()`.

    The client sends in real time, so no moment is later than its piece came with the least delay so far. Delays since,
    of the network or of a gateway that is behind with reading, are not taken for the user's own.
    """

    def __init__(self) -> None:
        self._zero_at: float | None = None  # the sound's first moment
        self._ready_at = 0.0

    def came(self, end_ms: float) -> None:
        """A piece is here that ends at `end_ms`."""
        now = time.monotonic()
        waited_s, zero_at = now - self._ready_at, now - end_ms / 1000
        if self._zero_at is None or waited_s > _PAUSE_S:
            self._zero_at = zero_at
        else:
            self._zero_at = min(zero_at, self._zero_at + _DRIFT * waited_s)

    def ready(self) -> None:
        """The next piece is waited for."""
        self._ready_at = time.monotonic()

    def at(self, ms: float) -> float:
        """When the moment was; `came` was called before."""
        assert self._zero_at is not None
        return self._zero_at + ms / 1000
