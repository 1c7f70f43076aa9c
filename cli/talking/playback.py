"""Plays the model's answers and counts how much of each was played."""

import threading
from collections import deque
from dataclasses import dataclass, field

from cli.talking.sound import BYTES_PER_SAMPLE, RATE_HZ


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
