"""Audio to be transcribed: a file, or a live stream, cut into windows of speech."""

import asyncio
import math
import os
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from gateway.listening.speech_windows import RATE_HZ, Pauses, SpeechWindow, WindowFinder, claimed_length_s, decoded
from gateway.media.encode import BYTES_PER_SAMPLE
from services.common.errors import DeadlineExceeded
from services.common.media import MediaError

Result = TypeVar("Result")
_BYTES_PER_S = BYTES_PER_SAMPLE * RATE_HZ
_ROUND_S = 10.0  # of sound, searched at a time: 0.1 s of a thread
_ROUND_BYTES = round(_ROUND_S * _BYTES_PER_S)
# Hours of silence take minutes of a thread: they must not take those that everything else is done in.
_LISTENERS = ThreadPoolExecutor(os.cpu_count(), "listening")
_TURNS: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by owner


async def _listen(owner: str | None, call: Callable[..., Result], *arguments: Any) -> Result:
    """Calls `call`, a round, in a thread. An owner has one round at a time, and owners take turns."""
    turn = nullcontext() if owner is None else _TURNS.setdefault(owner, asyncio.Lock())
    async with turn:
        return await asyncio.get_running_loop().run_in_executor(_LISTENERS, call, *arguments)


class FileSound:
    """An audio file.

    Args:
        limit_s: its time from now on.
        most_s: longest sound.
        owner: whose rounds wait for each other; None: they need not.

    Attributes:
        field: of the request, for errors.
        duration_s: of the audio read so far.
    """

    field = "file"

    def __init__(
        self, content: bytes, pauses: Pauses, limit_s: float, most_s: float = math.inf, owner: str | None = None
    ) -> None:
        self.duration_s = 0.0
        self._content, self._pauses, self._limit_s, self._most_s, self._owner = content, pauses, limit_s, most_s, owner
        self._deadline, self._given_up = time.monotonic() + limit_s, False

    async def windows(self) -> AsyncGenerator[SpeechWindow, None]:
        """Raises MediaError; DeadlineExceeded."""
        finder, pieces, is_done = WindowFinder(self._pauses), self._pieces(), False
        try:
            while not is_done:
                found, is_done = await _listen(self._owner, self._search, finder, pieces)
                for window in found:
                    yield window
        finally:
            self._given_up = True

    def left_s(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _search(self, finder: WindowFinder, pieces: Iterator[bytes]) -> tuple[list[SpeechWindow], bool]:
        """A round: (windows, whether the file has ended)."""
        found, end_s = list[SpeechWindow](), self.duration_s + _ROUND_S
        for piece in pieces:
            found += finder.add(piece)
            if self.duration_s >= end_s:
                return found, False
        return [*found, *finder.close()], True

    def _pieces(self) -> Iterator[bytes]:
        """Counts and bounds the pieces: hours of silence may precede a window."""
        self._check_length(claimed_length_s(self._content))
        for piece in decoded(self._content):
            if self._given_up:
                return
            if self.left_s() <= 0:
                raise DeadlineExceeded(f"the sound is too long to be listened to in {self._limit_s:g} s")
            self.duration_s += len(piece) / _BYTES_PER_S
            self._check_length(self.duration_s)
            yield piece

    def _check_length(self, length_s: float) -> None:
        if length_s > self._most_s:
            raise MediaError(f"the audio is longer than the {self._most_s:g} s allowed; send it in parts")


class LiveSound:
    """Live mono PCM16 at RATE_HZ. `limit_s` is the time of each window; the rest as FileSound's."""

    field = "audio"

    def __init__(self, pauses: Pauses, limit_s: float, owner: str | None = None) -> None:
        self.duration_s = 0.0
        self._pauses, self._limit_s, self._owner = pauses, limit_s, owner
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
        finder = WindowFinder(self._pauses)
        while self._waiting or not self._ended:
            if not self._waiting:
                self._came.clear()
                await self._came.wait()
            piece = bytes(self._waiting[:_ROUND_BYTES])
            del self._waiting[:_ROUND_BYTES]
            self.duration_s += len(piece) / _BYTES_PER_S
            for window in await _listen(self._owner, list, finder.add(piece)):
                yield window
        for window in await _listen(self._owner, list, finder.close()):
            yield window

    def left_s(self) -> float:
        return self._limit_s
