"""The time of a Live session: whole milliseconds since it began, for both directions."""

import time
from collections.abc import Callable


class SessionClock:
    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._began = now, now()
        self._received_ms, self._offset_ms = 0.0, 0.0

    @property
    def now_ms(self) -> int:
        return self.at_ms(self._now())

    def at_ms(self, time_s: float) -> int:
        """`time_s`: of the clock `now`."""
        return max(0, round(1000 * (time_s - self._began)))

    def hear(self, piece_ms: float) -> None:
        """The user's next sound has come, whose end is now, or as much later as it came early."""
        self._received_ms += piece_ms
        self._offset_ms = max(self._offset_ms, 1000 * (self._now() - self._began) - self._received_ms)

    def heard_ms(self, sound_ms: float) -> int:
        """When the place `sound_ms` of the user's sound was."""
        return round(self._offset_ms + sound_ms)
