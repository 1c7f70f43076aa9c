"""Sound of a conversation, mono PCM16 of 24 kHz: how loud the user's is, and how much of the model's was played."""

import math
import threading
from array import array
from collections import deque
from dataclasses import dataclass, field

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


@dataclass
class _ItemAudio:
    id: str
    left: bytearray = field(default_factory=bytearray)
    played_bytes: int = 0
    is_complete: bool = False


class PlaybackBuffer:
    """Sound to be played. Speakers pull from it in their own thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: deque[_ItemAudio] = deque()

    def add(self, id: str, pcm16: bytes) -> None:
        with self._lock:
            if not self._answers or self._answers[-1].id != id:
                self._answers.append(_ItemAudio(id))
            self._answers[-1].left += pcm16

    def complete(self, id: str) -> None:
        """Marks the item as having no more sound."""
        with self._lock:
            for answer in self._answers:
                answer.is_complete = answer.is_complete or answer.id == id
            self._forget_played()

    def pull(self, samples: int) -> bytes:
        """Takes the next samples, padded with silence."""
        wanted = samples * BYTES_PER_SAMPLE
        pulled = bytearray()
        with self._lock:
            for answer in self._answers:
                piece = answer.left[: wanted - len(pulled)]
                del answer.left[: len(piece)]
                answer.played_bytes += len(piece)
                pulled += piece
                if len(pulled) == wanted or not answer.is_complete:  # what comes late is waited for
                    break
            self._forget_played()
        return bytes(pulled.ljust(wanted, b"\0"))

    def stop(self) -> list[tuple[str, int]]:
        """Drops all; returns (id, milliseconds played) of each unfinished item."""
        with self._lock:
            cuts = [(answer.id, answer.played_bytes * 1000 // (BYTES_PER_SAMPLE * RATE_HZ)) for answer in self._answers]
            self._answers.clear()
        return cuts

    @property
    def is_speaking(self) -> bool:
        return bool(self._answers)

    def has(self, id: str) -> bool:
        with self._lock:
            return any(answer.id == id for answer in self._answers)

    def _forget_played(self) -> None:
        while self._answers and self._answers[0].is_complete and not self._answers[0].left:
            self._answers.popleft()
