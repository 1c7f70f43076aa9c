"""Microphone and loudspeaker of LiveKit's programs, in place of a room's."""

import asyncio
import time
from collections.abc import AsyncIterator

from livekit import rtc
from livekit.agents import io
from microphone import RATE_HZ, Microphone


class Ear(io.AudioInput):
    """A microphone in place of a room's."""

    def __init__(self, microphone: Microphone) -> None:
        super().__init__(label="microphone")
        self._pieces = microphone.pieces()

    def __aiter__(self) -> AsyncIterator[rtc.AudioFrame]:
        return self

    async def __anext__(self) -> rtc.AudioFrame:
        piece = await anext(self._pieces)
        return rtc.AudioFrame(piece, RATE_HZ, num_channels=1, samples_per_channel=len(piece) // 2)


class Loudspeaker(io.AudioOutput):
    """Plays in real time, to nobody."""

    def __init__(self) -> None:
        super().__init__(label="loudspeaker", capabilities=io.AudioOutputCapabilities(pause=False))
        self._begun, self._length_s = 0.0, 0.0
        self._playing: asyncio.Task[None] | None = None

    async def capture_frame(self, frame: rtc.AudioFrame) -> None:
        await super().capture_frame(frame)
        if not self._length_s:
            self._begun = time.monotonic()
            self.on_playback_started(created_at=time.time())
        self._length_s += frame.duration

    def flush(self) -> None:
        super().flush()
        if self._length_s and self._playing is None:
            self._playing = asyncio.create_task(self._play())

    async def _play(self) -> None:
        await asyncio.sleep(self._begun + self._length_s - time.monotonic())
        self._finish(interrupted=False)

    def clear_buffer(self) -> None:
        if self._playing is not None:
            self._playing.cancel()
        if self._length_s:
            self._finish(interrupted=True)

    def _finish(self, *, interrupted: bool) -> None:
        position_s = min(time.monotonic() - self._begun, self._length_s)
        self._playing, self._length_s = None, 0.0
        self.on_playback_finished(playback_position=position_s, interrupted=interrupted)
