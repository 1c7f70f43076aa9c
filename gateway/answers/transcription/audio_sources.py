"""Audio to be transcribed: a file, or a live stream, cut into windows of speech."""

import asyncio
import math
import os
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from gateway.listening.silero import RATE_HZ
from gateway.listening.speech_windows import Pauses, SpeechWindow, WindowFinder
from gateway.media.encode import BYTES_PER_SAMPLE, to_pcm16
from gateway.media.long_sounds import SoundFile, SoundFiles
from services.common.engine.process import lower_priority
from services.common.errors import DeadlineExceeded
from services.common.media.calls import refuse_longer

Result = TypeVar("Result")
_BYTES_PER_S = BYTES_PER_SAMPLE * RATE_HZ
_ROUND_S = 10.0  # of sound, searched at a time: 0.1 s of a thread
_ROUND_BYTES = round(_ROUND_S * _BYTES_PER_S)
# Hours of silence take minutes of a thread: they must not take those that everything else is done in.
_LISTENERS = ThreadPoolExecutor(os.cpu_count(), "listening", lower_priority)
_TURNS: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by owner


async def _listen(owner: str | None, call: Callable[..., Result], *arguments: Any) -> Result:
    """Calls `call`, a round, in a thread. An owner has one round at a time, and owners take turns."""
    turn = nullcontext() if owner is None else _TURNS.setdefault(owner, asyncio.Lock())
    async with turn:
        return await asyncio.get_running_loop().run_in_executor(_LISTENERS, call, *arguments)


class FileSound:
    """An audio file.

    Args:
        files: reads it.
        limit_s: its time from now on.
        most_s: longest sound.
        owner: whose rounds wait for each other; None: they need not.

    Attributes:
        field: of the request, for errors.
        duration_s: of the audio read so far.
    """

    field = "file"

    def __init__(
        self,
        files: SoundFiles,
        content: bytes,
        pauses: Pauses,
        limit_s: float,
        most_s: float = math.inf,
        owner: str | None = None,
    ) -> None:
        self._file = SoundFile(files, content, RATE_HZ, most_s)
        self._pauses, self._limit_s, self._most_s, self._owner = pauses, limit_s, most_s, owner
        self._deadline = time.monotonic() + limit_s

    @property
    def duration_s(self) -> float:
        return self._file.position / RATE_HZ

    async def windows(self) -> AsyncGenerator[SpeechWindow, None]:
        """Raises MediaError; InternalError; DeadlineExceeded."""
        finder, is_done = WindowFinder(self._pauses), False
        try:
            while not is_done:
                found, is_done = await _listen(self._owner, self._search, finder)
                for window in found:
                    yield window
        finally:
            self._file.close()

    def left_s(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _search(self, finder: WindowFinder) -> tuple[list[SpeechWindow], bool]:
        """A round: (windows, whether the file has ended). Hours of silence may precede a window."""
        found, end_s = list[SpeechWindow](), self.duration_s + _ROUND_S
        with closing(self._file.pieces()) as pieces:
            for piece in pieces:
                if self.left_s() <= 0:
                    raise DeadlineExceeded(f"the sound is too long to be listened to in {self._limit_s:g} s")
                refuse_longer("audio", self.duration_s, self._most_s)
                found += finder.add(to_pcm16(piece))
                if self.duration_s >= end_s:
                    return found, False
        return [*found, *finder.close()], True


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
