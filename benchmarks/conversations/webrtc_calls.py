"""A user's session by WebRTC, and the process of calls beside a gateway."""

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import aioice.ice
import av
import httpx
import numpy as np
from aiortc import MediaStreamTrack, RTCConfiguration, RTCPeerConnection, RTCSessionDescription
from aiortc.mediastreams import MediaStreamError

from benchmarks.conversations.microphone import Came, Lost
from benchmarks.conversations.transports import Heard, Quiet, UserSession
from benchmarks.conversations.utterances import RATE_HZ, silence

_FRAME_S, _LOUDEST_SILENCE = 0.02, 100  # of 32768
_GUARD_S, _READY_S = 120.0, 60.0
_NOISE_SEED = 7
# aioice leaves out the only address that every machine has
aioice.ice.get_host_addresses = lambda use_ipv4, use_ipv6: ["127.0.0.1"]


@dataclass(frozen=True)
class HeardFrames(Heard):
    """An answer as a loudspeaker gets it: (`time.perf_counter`, seconds) of each frame that is not silent."""

    frames: tuple[tuple[float, float], ...] = ()

    def pieces(self) -> list[tuple[float, float]]:
        return list(self.frames)

    @property
    def plays_s(self) -> float:
        return 0.0  # it has been played already


class _Microphone(MediaStreamTrack):
    kind = "audio"

    def __init__(self, background: np.ndarray | None) -> None:
        super().__init__()
        self._background = background
        self._began_s, self._frames, self._sound = 0.0, 0, np.empty(0, np.int16)

    def say(self, samples: np.ndarray) -> float:
        begins_s = max(time.perf_counter(), self._began_s + self._frames * _FRAME_S) + len(self._sound) / RATE_HZ
        self._sound = np.concatenate([self._sound, samples])
        return begins_s

    async def recv(self) -> av.AudioFrame:
        self._began_s = self._began_s or time.perf_counter()
        await asyncio.sleep(max(0.0, self._began_s + self._frames * _FRAME_S - time.perf_counter()))
        size = round(_FRAME_S * RATE_HZ)
        piece, self._sound = self._sound[:size], self._sound[size:]
        quiet = np.zeros(size, np.int16) if self._background is None else self._background[:size]
        samples = np.concatenate([piece, quiet[len(piece) :]]).reshape(1, -1)
        frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = RATE_HZ, self._frames * size, Fraction(1, RATE_HZ)
        self._frames += 1
        return frame


class RtcSession:
    """One of `/v1/realtime/calls`."""

    def __init__(self, background: np.ndarray | None) -> None:
        self.connection = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        self._microphone = _Microphone(background)
        self.connection.addTrack(self._microphone)
        self._channel = self.connection.createDataChannel("oai-events")
        self._channel.on("message", self._take)
        self.connection.on("track", self._listen)
        self._events, self._came = list[Came](), asyncio.Event()
        self._frames, self._seen = list[tuple[float, float]](), 0
        self._listening: asyncio.Task[None] | None = None

    @property
    def is_lost(self) -> bool:
        return self.connection.connectionState in ("closed", "failed", "disconnected")

    def say(self, samples: np.ndarray) -> float:
        self._seen, self._frames = len(self._events), []
        return self._microphone.say(samples)

    async def answer(self) -> Heard:
        end = await self.until("output_audio_buffer.stopped", "error")
        return HeardFrames([Came(at_s, "", "") for at_s, _ in self._frames], end, tuple(self._frames))

    async def until(self, *kinds: str) -> Came:
        """The first event of one of `kinds` since the last turn began. Raises Lost."""
        try:
            async with asyncio.timeout(_GUARD_S):
                while True:
                    self._came.clear()
                    found = next((each for each in self._events[self._seen :] if each.kind in kinds), None)
                    if found is not None:
                        return found
                    await self._came.wait()
        except TimeoutError:
            raise Lost(f"no {kinds[0]} within {_GUARD_S:g} s") from None

    async def close(self) -> None:
        if self._listening is not None:
            self._listening.cancel()
        await self.connection.close()

    def _take(self, text: str) -> None:
        came = Came(time.perf_counter(), "", text)
        self._events.append(Came(came.at_s, came.members["type"], text))
        self._came.set()

    def _listen(self, track: MediaStreamTrack) -> None:
        async def listen() -> None:
            with contextlib.suppress(MediaStreamError):
                while True:
                    frame = await track.recv()
                    assert isinstance(frame, av.AudioFrame)
                    if np.abs(frame.to_ndarray().astype(int)).max() > _LOUDEST_SILENCE:
                        self._frames.append((time.perf_counter(), frame.samples / frame.sample_rate))

        self._listening = asyncio.create_task(listen())


@contextlib.asynccontextmanager
async def call(url: str, append_s: float, quiet: Quiet) -> AsyncIterator[UserSession]:
    """A call. A microphone always sends: `quiet` "nothing" is zeros. Raises Lost."""
    session = RtcSession(silence(append_s, _NOISE_SEED) if quiet == "noise" else None)
    try:
        await session.connection.setLocalDescription(await session.connection.createOffer())
        offer, headers = session.connection.localDescription.sdp, {"content-type": "application/sdp"}
        async with httpx.AsyncClient(verify=False, timeout=_GUARD_S) as http:  # certificates take 20 ms
            answer = await http.post(f"{url}/v1/realtime/calls", content=offer, headers=headers)
        if answer.status_code != 201:
            raise Lost(answer.text)
        await session.connection.setRemoteDescription(RTCSessionDescription(answer.text, "answer"))
        await session.until("session.created")
        yield session
    finally:
        await session.close()


@contextlib.contextmanager
def call_process(gateway_url: str, port: int, log: Path, max_calls: int) -> Iterator[None]:
    """The process of calls of a gateway whose `--webrtc` names `port`. Raises RuntimeError: it is not ready."""
    flags = [f"--gateway={gateway_url}", f"--port={port}", "--udp-host=127.0.0.1", "--udp-port=0"]
    command = [sys.executable, "-m", "gateway.webrtc", *flags, f"--max-calls={max_calls}"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, process_group=0)
    try:
        end = time.monotonic() + _READY_S
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the process of calls is not ready: {log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait()


def _answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", verify=False).is_success
    except httpx.HTTPError:
        return False
