"""Microphone and loudspeaker of pipecat's programs, in place of a room's."""

import asyncio
import time

from microphone import RATE_HZ, Microphone
from pipecat.frames.frames import InputAudioRawFrame, OutputAudioRawFrame, StartFrame
from pipecat.transports.base_input import BaseInputTransport
from pipecat.transports.base_output import BaseOutputTransport
from pipecat.transports.base_transport import TransportParams


class Ear(BaseInputTransport):
    """A microphone in place of a room's."""

    def __init__(self, microphone: Microphone) -> None:
        super().__init__(TransportParams(audio_in_enabled=True, audio_in_sample_rate=RATE_HZ))
        self._microphone = microphone

    async def start(self, frame: StartFrame) -> None:
        await super().start(frame)
        await self.set_transport_ready(frame)
        self._listening = self.create_task(self._listen())

    async def cleanup(self) -> None:
        await self.cancel_task(self._listening)
        await super().cleanup()

    async def _listen(self) -> None:
        async for piece in self._microphone.pieces():
            await self.push_audio_frame(InputAudioRawFrame(piece, self.sample_rate, 1))


class Loudspeaker(BaseOutputTransport):
    """Plays in real time, to nobody."""

    def __init__(self) -> None:
        super().__init__(TransportParams(audio_out_enabled=True, audio_out_sample_rate=RATE_HZ))
        self._free = 0.0

    async def start(self, frame: StartFrame) -> None:
        await super().start(frame)
        await self.set_transport_ready(frame)

    async def write_audio_frame(self, frame: OutputAudioRawFrame) -> bool:
        self._free = max(self._free, time.monotonic()) + len(frame.audio) / 2 / frame.sample_rate
        await asyncio.sleep(self._free - time.monotonic())
        return True
