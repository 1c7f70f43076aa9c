"""A client of `/v1/realtime` that checks each event of the server by OpenAI's own types, and their order."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

import numpy as np
from openai.types.realtime import RealtimeServerEvent
from pydantic import TypeAdapter
from websockets.asyncio.client import ClientConnection, connect

from gateway.answers.tools.registry import TOOLS
from tests.support.clients.realtime_order import Order

_EVENTS = TypeAdapter(RealtimeServerEvent)
TONE = (8000 * np.sin(np.arange(24_000) * 2 * np.pi * 440 / 24_000)).astype("<i2").tobytes()  # 1 s of PCM


_GUARD_S = 300.0  # for an event that never comes: ten conversations on a busy machine have been waiting for a minute


class Gateway(Protocol):
    """Where sessions are."""

    @property
    def url(self) -> str: ...


class RealtimeClient:
    """One session.

    Attributes:
        socket: its connection.
        order: checks that of its events.
        created: its first event.
    """

    def __init__(self, socket: ClientConnection) -> None:
        self.socket, self.order = socket, Order()
        self.created: dict[str, Any] = {}

    async def send(self, kind: str, **members: Any) -> None:
        await self.socket.send(json.dumps({"type": kind, **members}))

    async def event(self) -> dict[str, Any]:
        """The next event."""
        async with asyncio.timeout(_GUARD_S):
            members = json.loads(await self.socket.recv())
        if not any(name in json.dumps(members) for name in TOOLS):  # OpenAI's API of sessions has none
            _EVENTS.validate_python(members)
        self.order.see(members)
        return members

    async def until(self, kind: str) -> list[dict[str, Any]]:
        """All events up to the first of `kind`."""
        events = []
        while not events or events[-1]["type"] != kind:
            events.append(await self.event())
        return events

    async def ask(self, kind: str, answer: str, **members: Any) -> dict[str, Any]:
        """Sends an event, and returns the first of type `answer`."""
        await self.send(kind, **members)
        return (await self.until(answer))[-1]

    async def say(self, text: str, **members: Any) -> dict[str, Any]:
        """The user's message, as conversation.item.added has it."""
        content = [{"type": "input_text", "text": text}]
        item = {"type": "message", "role": "user", "content": content, **members}
        added = await self.ask("conversation.item.create", "conversation.item.added", item=item)
        await self.until("conversation.item.done")
        return added

    async def respond(self, **response: Any) -> list[dict[str, Any]]:
        """All events of a response."""
        await self.send("response.create", response=response)
        return await self.until("response.done")

    async def refusal(self, kind: str, **members: Any) -> dict[str, Any]:
        """The error that an event is answered with."""
        error = (await self.ask(kind, "error", event_id="mine", **members))["error"]
        assert error["event_id"] == "mine"
        return error


@asynccontextmanager
async def session(
    gateway: Gateway, model: str | None = "scripted", path: str = "/v1/realtime", query: str = "", **options: Any
) -> AsyncIterator[RealtimeClient]:
    """A session that has begun."""
    query = query if model is None else f"model={model}&{query}"
    url = f"{gateway.url.replace('http', 'ws')}{path}?{query}"
    async with connect(url, open_timeout=60, compression=None, max_size=None, **options) as socket:
        client = RealtimeClient(socket)
        client.created = await client.event()
        assert client.created["type"] == "session.created", client.created
        yield client


def base64_of(sound: bytes) -> str:
    return base64.b64encode(sound).decode()


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """Their types, of successive same ones the first."""
    told = [event["type"] for event in events]
    return [kind for i, kind in enumerate(told) if i == 0 or told[i - 1] != kind]


def sound_of(events: list[dict[str, Any]]) -> bytes:
    return b"".join(
        base64.b64decode(event["delta"]) for event in events if event["type"] == "response.output_audio.delta"
    )
