"""A client of `/v1/live/sessions` that checks each event of the server by OpenAI's own types, and the texts' times."""

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from openai.types.live.connect_server_event import ConnectServerEvent
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter
from websockets.asyncio.client import ClientConnection, connect

from tests.support.clients.realtime_client import Gateway, base64_of

_EVENTS, _WRAPPED = TypeAdapter(ConnectServerEvent), TypeAdapter(ResponseStreamEvent)
_GUARD_S = 300.0
RATE_HZ = 24_000


class LiveClient:
    """One session, or a sideband of one.

    Attributes:
        events: all that came; sound without its samples.
        sound: PCM of all answers, as it came.
        times: when each piece of it came, in `time.monotonic()`.
    """

    def __init__(self, socket: ClientConnection) -> None:
        self.socket, self.events = socket, list[dict[str, Any]]()
        self.sound, self.times = bytearray(), list[float]()
        self.started: dict[str, Any] = {}
        self._last_ms = 0

    async def send(self, kind: str, **members: Any) -> None:
        await self.socket.send(json.dumps({"type": kind, **members}))

    async def event(self) -> dict[str, Any]:
        """The next event."""
        async with asyncio.timeout(_GUARD_S):
            text = await self.socket.recv()
        assert len(text) < 2**20  # what pipecat's client takes
        members = json.loads(text)
        _EVENTS.validate_python(members)
        kind = members["type"]
        if kind == "session.output_audio.delta":
            self.sound += base64.b64decode(members.pop("delta"))
            self.times.append(time.monotonic())
        elif kind.endswith("_transcript.delta"):
            assert self._last_ms <= members["start_ms"] <= members["end_ms"]
            self._last_ms = members["start_ms"]
        elif kind == "response.event" and members["event"].get("item", {}).get("type") != "image_generation_call":
            _WRAPPED.validate_python(members["event"])
        self.events.append(members)
        return members

    async def until(self, kind: str, **members: Any) -> dict[str, Any]:
        """The next event of `kind`, with `members`."""
        while True:
            event = await self.event()
            if event["type"] == kind and members.items() <= event.items():
                return event

    async def wrapped(self, kind: str) -> dict[str, Any]:
        """The next event of Responses of `kind`, in its envelope."""
        while True:
            envelope = await self.until("response.event")
            if envelope["event"]["type"] == kind:
                return envelope

    async def ask(self, kind: str, answer: str, **members: Any) -> dict[str, Any]:
        await self.send(kind, **members)
        return await self.until(answer)

    async def refusal(self, kind: str, **members: Any) -> dict[str, Any]:
        """The error that an event is answered with."""
        error = (await self.ask(kind, "error", event_id="mine", **members))["error"]
        assert error["client_event_id"] == "mine"
        return error

    async def hear(self, seconds: float, level: int) -> None:
        """Sends a tone, or silence, in pieces of 100 ms, at once."""
        for _ in range(round(seconds * 10)):
            await self.send("session.input_audio.append", audio=base64_of(tone(0.1, level)))

    async def answer(self, text: str) -> None:
        """Returns when all of `text` has been said since the last answer."""
        said = ""
        while said != text:
            said += (await self.until("session.output_transcript.delta"))["delta"]
            assert text.startswith(said)

    def said(self, side: str) -> str:
        """What the user ("input") or the model ("output") has said, by the transcripts."""
        kind = f"session.{side}_transcript.delta"
        return "".join(event["delta"] for event in self.events if event["type"] == kind)

    def kinds(self) -> list[str]:
        """Types of all events, of successive same ones the first."""
        kinds = [event["type"] for event in self.events]
        return [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]


def tone(seconds: float, level: int, rate_hz: int = RATE_HZ) -> bytes:
    """PCM16 of 440 Hz."""
    samples = level * np.sin(np.arange(round(seconds * rate_hz)) * 2 * np.pi * 440 / rate_hz)
    return samples.astype("<i2").tobytes()


@asynccontextmanager
async def connected(gateway: Gateway, path: str = "/v1/live/sessions", **options: Any) -> AsyncIterator[LiveClient]:
    url = f"{gateway.url.replace('http', 'ws')}{path}"
    async with connect(url, open_timeout=60, compression=None, max_size=None, **options) as socket:
        yield LiveClient(socket)


@asynccontextmanager
async def live(gateway: Gateway, *, options: Any = None, **members: Any) -> AsyncIterator[LiveClient]:
    """A session that has started, of the `session` of `members`."""
    async with connected(gateway, **(options or {})) as client:
        started = await client.ask("session.start", "session.started", session={"model": "gpt-live-1", **members})
        client.started = started["session"]
        yield client
