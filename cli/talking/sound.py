"""Sound of a conversation: mono PCM16, 24 kHz."""

import math
from array import array
from collections import deque

RATE_HZ = 24_000
BYTES_PER_SAMPLE = 2
PIECE_MS = 40  # of what is sent at a time
PIECE_BYTES = RATE_HZ * PIECE_MS // 1000 * BYTES_PER_SAMPLE
SILENCE_DB = -96.0
_LOUD_DB = 20.0  # below a turn's loudest piece: no speech
_KEPT_PIECES = 10 * 60 * 1000 // PIECE_MS  # a turn's last word is looked for in so many


def level_db(pcm16: bytes) -> float:
    """Level in dB from SILENCE_DB to 0."""
    samples = array("h", pcm16)
    power = sum(sample * sample for sample in samples) / max(1, len(samples))
    return max(SILENCE_DB, 10 * math.log10(power / 32768**2)) if power else SILENCE_DB


class InputMeter:
    """`ms`: sent in all; `level_db`: of the last piece."""

    def __init__(self) -> None:
        self.ms, self.level_db = 0.0, SILENCE_DB
        self._pieces: deque[tuple[float, float, float]] = deque(maxlen=_KEPT_PIECES)

    def add(self, pcm16: bytes, now_s: float) -> None:
        """`now_s`: when the last sample had been spoken."""
        self.ms += len(pcm16) * 1000 / (BYTES_PER_SAMPLE * RATE_HZ)
        self.level_db = level_db(pcm16)
        self._pieces.append((self.ms, self.level_db, now_s))

    def last_word_s(self, begin_ms: float, end_ms: float) -> float | None:
        """Returns when the last loud piece between two times of the sound was sent."""
        turn = [(level, now_s) for ms, level, now_s in self._pieces if begin_ms < ms <= end_ms + PIECE_MS]
        loudest = max((level for level, _ in turn), default=SILENCE_DB)
        return next((now_s for level, now_s in reversed(turn) if level > loudest - _LOUD_DB), None)
