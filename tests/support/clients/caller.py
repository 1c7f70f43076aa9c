"""A client of `/v1/realtime/calls` by aiortc, with a microphone that hears what it is told."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from fractions import Fraction
from typing import Any

import aioice.ice
import av
import httpx
import numpy as np
from aiortc import (
    MediaStreamTrack,
    RTCConfiguration,
    RTCDataChannel,
    RTCPeerConnection,
    RTCSessionDescription,
)
from aiortc.mediastreams import MediaStreamError

CALLS = "/v1/realtime/calls"
SDP = {"content-type": "application/sdp"}
_RATE_HZ, _FRAME = 48_000, 960
# aioice leaves out the only address that every machine has
aioice.ice.get_host_addresses = lambda use_ipv4, use_ipv6: ["127.0.0.1"]


class Microphone(MediaStreamTrack):
    """Silence, and each sound that is put into it, mono int16 at 48 kHz, in real time. What a busy machine is late with
    is late from then on: who catches up makes it busier, and ten calls never do."""

    kind = "audio"

    def __init__(self) -> None:
        super().__init__()
        self._begun, self._frames, self._sound = 0.0, 0, np.empty(0, np.int16)

    def say(self, samples: np.ndarray) -> None:
        self._sound = np.concatenate([self._sound, samples])

    async def recv(self) -> av.AudioFrame:
        self._begun = self._begun or time.monotonic()
        early_s = self._begun + self._frames * _FRAME / _RATE_HZ - time.monotonic()
        self._begun += max(0.0, -early_s)
        await asyncio.sleep(max(0.0, early_s))
        piece, self._sound = self._sound[:_FRAME], self._sound[_FRAME:]
        samples = np.pad(piece, (0, _FRAME - len(piece))).reshape(1, -1)
        frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = _RATE_HZ, self._frames * _FRAME, Fraction(1, _RATE_HZ)
        self._frames += 1
        return frame


class Caller:
    """A call that is being made, or goes on.

    Attributes:
        location: path of the call.
        events: of the session, as they come.
        heard: peaks of the frames that were received, of 32768.
    """

    def __init__(self) -> None:
        self.connection = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        self.microphone = Microphone()
        self.connection.addTrack(self.microphone)
        self.channel: RTCDataChannel = self.connection.createDataChannel("oai-events")
        self.location, self.events, self.heard = "", list[dict[str, Any]](), list[int]()
        self._opened, self._came = asyncio.Event(), asyncio.Event()
        self._seen = 0
        self.channel.on("open", self._opened.set)
        self.channel.on("message", self._take)
        self.connection.on("track", self._listen)
        self._listening = set[asyncio.Task[None]]()

    async def offer(self) -> str:
        await self.connection.setLocalDescription(await self.connection.createOffer())
        return self.connection.localDescription.sdp

    async def dial(self, http: httpx.AsyncClient, path: str = CALLS, **headers: str) -> httpx.Response:
        """The answer to its offer."""
        answer = await http.post(path, content=await self.offer(), headers=SDP | headers)
        self.location = answer.headers.get("location", "")
        return answer

    async def begin(self, answer: str) -> None:
        """Returns when events can be sent."""
        await self.connection.setRemoteDescription(RTCSessionDescription(answer, "answer"))
        async with asyncio.timeout(240):
            await self._opened.wait()

    def send(self, kind: str, **members: Any) -> None:
        self.channel.send(json.dumps({"type": kind, **members}))

    async def until(self, kind: str) -> dict[str, Any]:
        """The next event of a kind."""
        async with asyncio.timeout(240):
            while True:
                self._came.clear()
                while self._seen < len(self.events):
                    self._seen += 1
                    if self.events[self._seen - 1]["type"] == kind:
                        return self.events[self._seen - 1]
                await self._came.wait()

    async def close(self) -> None:
        await self.connection.close()
        for task in self._listening:
            task.cancel()

    def _take(self, text: str) -> None:
        self.events.append(json.loads(text))
        self._came.set()

    def _listen(self, track: MediaStreamTrack) -> None:
        async def listen() -> None:
            with suppress(MediaStreamError):
                while True:
                    frame = await track.recv()
                    assert isinstance(frame, av.AudioFrame)
                    self.heard.append(int(np.abs(frame.to_ndarray().astype(int)).max()))

        self._listening.add(asyncio.create_task(listen()))


@asynccontextmanager
async def calling(http: httpx.AsyncClient, **headers: str) -> AsyncIterator[Caller]:
    """A call that goes on, and that its client ends at the end."""
    caller = Caller()
    try:
        answer = await caller.dial(http, **headers)
        assert answer.status_code == 201, answer.text
        await caller.begin(answer.text)
        await caller.until("session.created")
        yield caller
    finally:
        await caller.close()
