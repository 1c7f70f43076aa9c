"""What the user of one session hears of it, in metrics: how soon answers sound, and where they run dry."""

import time

from gateway import metrics


class SoundQuality:
    """Counts for one session; `transport` is the label of its metrics."""

    def __init__(self, transport: str) -> None:
        self._first_sound = metrics.FIRST_SOUND.labels(transport)
        self._underruns, self._underrun_s = metrics.UNDERRUNS.labels(transport), metrics.UNDERRUN_S.labels(transport)
        self._speaking, self._speaks = metrics.USERS_SPEAKING.labels(transport), False
        self._last_word_at: float | None = None

    def user_speaks(self, speaks: bool) -> None:
        """Whether the user is within a turn."""
        if speaks != self._speaks:
            self._speaking.inc(1 if speaks else -1)
            self._speaks = speaks

    def turn_ended(self, last_word_at: float) -> None:
        """The user waits for an answer since `last_word_at`, in `time.monotonic()`."""
        self._last_word_at = last_word_at

    def answer_ended(self) -> None:
        """Sound that comes now is of another answer, for which the user has not been waiting."""
        self._last_word_at = None

    def sounded(self) -> None:
        """The first sound of a message is sent."""
        if self._last_word_at is not None:
            self._first_sound.observe(max(0.0, time.monotonic() - self._last_word_at))
            self._last_word_at = None

    def ran_dry(self, silence_s: float) -> None:
        """A piece is sent so long after the end of the sound before it."""
        self._underruns.inc()
        self._underrun_s.inc(silence_s)
