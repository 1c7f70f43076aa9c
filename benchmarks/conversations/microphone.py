"""A client of `/v1/realtime`, or of another such WebSocket, with a microphone: it sends sound in real time, and notes
when each event comes.

Events are parsed only after the load is over, as in client.py: until then no more is read than their type.
"""

import asyncio
import base64
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from benchmarks.conversations.utterances import RATE_HZ, silence

_TYPE_BEGINS = len('{"type":"')  # our events begin with their type
_GUARD_S = 300.0  # against hanging


@dataclass(frozen=True)
class Wire:
    """A WebSocket for spoken conversations.

    Attributes:
        path: where it is.
        append: type of the client's events with sound, in `audio`.
        started: type of the server's event from which the client may send.
        start: what the client says before.
    """

    path: str
    append: str
    started: str
    start: dict[str, Any] | None = None


REALTIME = Wire("/v1/realtime", "input_audio_buffer.append", "session.created")


class Lost(Exception):
    """The session has ended, or does not go on."""


@dataclass(frozen=True)
class Came:
    """An event.

    Attributes:
        at_s: `time.perf_counter` when it was there.
        kind: its type.
        text: all of it.
    """

    at_s: float
    kind: str
    text: str

    @property
    def members(self) -> dict[str, Any]:
        """What it says."""
        return json.loads(self.text)


class Caller:
    """One session. Made by `call`.

    Attributes:
        events: all that came, in order.
    """

    def __init__(self, socket: ClientConnection, append_s: float, wire: Wire, background: np.ndarray | None) -> None:
        self._socket, self._append_s, self._kind = socket, append_s, wire.append
        self._samples = round(append_s * RATE_HZ)
        self._track: np.ndarray = np.empty(0, np.int16)
        self._began_s = self._tick = 0.0
        self._silence = self._append(silence(append_s) if background is None else background)
        self.events: list[Came] = []
        self._changed = asyncio.Condition()

    async def send(self, kind: str, **members: Any) -> None:
        """Sends an event."""
        await self._socket.send(json.dumps({"type": kind, **members}))

    def say(self, samples: np.ndarray) -> float:
        """Speaks (n,) int16 after all earlier sound. Returns the first sample's `time.perf_counter`.

        Between two such calls it records silence.
        """
        begins_s = self._began_s + self._tick * self._append_s + len(self._track) / RATE_HZ
        self._track = np.concatenate([self._track, samples])
        return begins_s

    async def until(self, *kinds: str, since: int = 0) -> Came:
        """The first event of one of `kinds` from number `since` on. Raises Lost."""
        async with self._changed:
            while True:
                found = next((event for event in self.events[since:] if event.kind in kinds), None)
                if found is not None:
                    return found
                since = len(self.events)
                if self.events and self.events[-1].kind == "closed":
                    raise Lost(f"the session ended before a {kinds[0]}")
                try:
                    await asyncio.wait_for(self._changed.wait(), _GUARD_S)
                except TimeoutError:
                    raise Lost(f"no {kinds[0]} within {_GUARD_S:g} s") from None

    async def listen(self) -> None:
        """Notes what comes, until the session ends."""
        with contextlib.suppress(OSError, ConnectionClosed):
            async for text in self._socket:
                at_s = time.perf_counter()
                assert isinstance(text, str)
                await self._note(Came(at_s, text[_TYPE_BEGINS : text.index('"', _TYPE_BEGINS)], text))
        await self._note(Came(time.perf_counter(), "closed", "{}"))

    async def _note(self, event: Came) -> None:
        async with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    async def record(self) -> None:
        """Sends what is recorded, each piece when its last sample is."""
        self._began_s = time.perf_counter()
        while True:
            piece, self._track = self._track[: self._samples], self._track[self._samples :]
            self._tick += 1
            await asyncio.sleep(self._began_s + self._tick * self._append_s - time.perf_counter())
            if len(piece) < self._samples:
                piece = np.concatenate([piece, np.zeros(self._samples - len(piece), np.int16)])
            await self._socket.send(self._append(piece) if piece.any() else self._silence)

    def _append(self, samples: np.ndarray) -> str:
        audio = base64.b64encode(samples.astype("<i2").tobytes()).decode()
        return json.dumps({"type": self._kind, "audio": audio})


@contextlib.asynccontextmanager
async def call(
    url: str,
    append_s: float,
    session: dict[str, Any] | None = None,
    *,
    records: bool = True,
    background: np.ndarray | None = None,
    wire: Wire = REALTIME,
) -> AsyncIterator[Caller]:
    """A session whose microphone is on.

    Args:
        url: of a gateway.
        append_s: of sound in each append.
        session: for session.update.
        records: False: the microphone is off, and nothing is sent.
        background: (append_s * RATE_HZ,) int16, what it hears while nobody speaks; None: zeros.
        wire: how it speaks with the gateway.

    Raises:
        Lost: it was refused, or ended too soon.
    """
    try:
        socket = await connect(
            url.replace("http", "ws", 1) + wire.path, open_timeout=_GUARD_S, compression=None, max_size=None
        )
    except OSError as error:
        raise Lost(f"no session: {error}") from None
    async with socket:
        caller = Caller(socket, append_s, wire, background)
        tasks = [asyncio.create_task(caller.listen())]
        try:
            if wire.start is not None:
                await socket.send(json.dumps(wire.start))
            await caller.until(wire.started)
            if session is not None:
                await caller.send("session.update", session={"type": "realtime", **session})
                await caller.until("session.updated")
            if records:
                tasks.append(asyncio.create_task(caller.record()))
            await asyncio.sleep(0)
            yield caller
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
