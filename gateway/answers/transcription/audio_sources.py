"""Audio to be transcribed: a file, or a live stream, cut into windows of speech."""

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from gateway.listening.speech_windows import RATE_HZ, Pauses, SpeechWindow, WindowFinder, decoded, windows
from gateway.media.encode import BYTES_PER_SAMPLE
from services.common.errors import DeadlineExceeded

_BYTES_PER_S = BYTES_PER_SAMPLE * RATE_HZ
_SEARCHED_BYTES = 10 * _BYTES_PER_S  # at a time: 0.1 s of a thread
# Hours of silence take minutes of a thread: they must not take those that everything else is done in.
_LISTENERS = ThreadPoolExecutor(os.cpu_count(), "listening")


class FileSound:
    """An audio file. `limit_s` is its time from now on.

    Attributes:
        field: of the request, for errors.
        duration_s: of the audio read so far.
    """

    field = "file"

    def __init__(self, content: bytes, pauses: Pauses, limit_s: float) -> None:
        self.duration_s = 0.0
        self._content, self._pauses, self._limit_s = content, pauses, limit_s
        self._deadline, self._given_up = time.monotonic() + limit_s, False

    async def windows(self) -> AsyncGenerator[SpeechWindow, None]:
        """Raises MediaError; DeadlineExceeded."""
        found, loop = windows(self._counted(decoded(self._content)), self._pauses), asyncio.get_running_loop()
        try:
            while (window := await loop.run_in_executor(_LISTENERS, next, found, None)) is not None:
                yield window
        finally:
            self._given_up = True

    def left_s(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _counted(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        """Counts and bounds the pieces: hours of silence may precede a window."""
        for piece in pieces:
            if self._given_up:
                return
            if self.left_s() <= 0:
                raise DeadlineExceeded(f"the sound is too long to be listened to in {self._limit_s:g} s")
            self.duration_s += len(piece) / _BYTES_PER_S
            yield piece


class LiveSound:
    """Live mono PCM16 at RATE_HZ. `limit_s` is the time of each window; attributes as FileSound's."""

    field = "audio"

    def __init__(self, pauses: Pauses, limit_s: float) -> None:
        self.duration_s = 0.0
        self._pauses, self._limit_s = pauses, limit_s
        self._waiting, self._ended, self._came = bytearray(), False, asyncio.Event()

    @property
    def waiting_s(self) -> float:
        """Seconds of audio not searched yet."""
        return len(self._waiting) / _BYTES_PER_S

    def add(self, pcm16: bytes) -> None:
        self._waiting += pcm16
        self._came.set()

    def end(self) -> None:
        self._ended = True
        self._came.set()

    async def windows(self) -> AsyncGenerator[SpeechWindow, None]:
        """Yields each window when its speech has paused."""
        finder, loop = WindowFinder(self._pauses), asyncio.get_running_loop()
        while self._waiting or not self._ended:
            if not self._waiting:
                self._came.clear()
                await self._came.wait()
            piece = bytes(self._waiting[:_SEARCHED_BYTES])
            del self._waiting[:_SEARCHED_BYTES]
            self.duration_s += len(piece) / _BYTES_PER_S
            for window in await loop.run_in_executor(_LISTENERS, list, finder.add(piece)):
                yield window
        for window in await loop.run_in_executor(_LISTENERS, list, finder.close()):
            yield window

    def left_s(self) -> float:
        return self._limit_s
