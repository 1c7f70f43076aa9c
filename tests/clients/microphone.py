"""A microphone of a program: it hears speech when it is told to and silence else, in real time, mono PCM16."""

import asyncio
import time
import wave
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path

RATE_HZ = 24_000  # of the WAV files


class Microphone:
    """Hears the WAV files of a directory.

    Args:
        directory: has first.wav, second.wav and third.wav.
        piece_ms: length of what is heard at a time.
    """

    def __init__(self, directory: Path, piece_ms: int = 100) -> None:
        self._directory, self._piece_s = directory, piece_ms / 1000
        self._piece_bytes = 2 * RATE_HZ * piece_ms // 1000
        self._speech: deque[bytes] = deque()
        self._is_silent = asyncio.Event()

    def say(self, name: str) -> None:
        """Somebody speaks from now on."""
        with wave.open(str(self._directory / f"{name}.wav")) as file:
            assert file.getframerate() == RATE_HZ
            sound = file.readframes(file.getnframes())
        self._is_silent.clear()
        for begin in range(0, len(sound), self._piece_bytes):
            self._speech.append(sound[begin : begin + self._piece_bytes].ljust(self._piece_bytes, b"\0"))

    async def silence(self) -> None:
        """Returns when all has been said."""
        await self._is_silent.wait()

    async def pieces(self) -> AsyncIterator[bytes]:
        """What is heard, without end."""
        due = time.monotonic()
        while True:
            due += self._piece_s
            await asyncio.sleep(due - time.monotonic())
            if not self._speech:
                self._is_silent.set()
            yield self._speech.popleft() if self._speech else bytes(self._piece_bytes)
