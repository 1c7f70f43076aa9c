"""`quartet wyoming` as a process, and the library's client as Home Assistant uses it: a connection for each request."""

import contextlib
import json
import signal
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from wyoming.audio import AudioChunk, AudioStart, AudioStop
from wyoming.client import AsyncClient
from wyoming.event import Event, Eventable
from wyoming.info import Describe, Info

from tests.support.systems.command import start
from tests.support.systems.stack import HANG_GUARD_S, free_port


class WyomingServer:
    """Attributes: uri: of a running `quartet wyoming`."""

    def __init__(self, process: subprocess.Popen[str], uri: str) -> None:
        self.process, self.uri = process, uri

    def logged(self, event: str) -> dict[str, Any]:
        """The next line of the log that has `event`."""
        assert self.process.stderr is not None
        guard = threading.Timer(HANG_GUARD_S, self.process.kill)
        guard.start()
        try:
            for line in self.process.stderr:
                if (said := json.loads(line))["event"] == event:
                    return said
        finally:
            guard.cancel()
        raise AssertionError(f"it ended before it said {event!r}")

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator["Client"]:
        async with AsyncClient.from_uri(self.uri, read_timeout=HANG_GUARD_S) as client:
            yield Client(client)


class Client:
    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def send(self, *events: Eventable) -> None:
        for event in events:
            await self._client.write_event(event.event())

    async def next(self) -> Event:
        event = await self._client.read_event()
        assert event is not None, "the server ended the connection"
        return event

    async def until(self, last: str) -> list[Event]:
        """The events up to one of type `last`, and that."""
        events = [await self.next()]
        while events[-1].type != last:
            events.append(await self.next())
        return events

    async def rest(self) -> AsyncIterator[Event]:
        """The events until the server ends the connection."""
        while (event := await self._client.read_event()) is not None:
            yield event

    async def info(self) -> Info:
        await self.send(Describe())
        return Info.from_event(await self.next())


def types(events: list[Event]) -> list[str]:
    """Without repetitions."""
    return [event.type for number, event in enumerate(events) if not number or events[number - 1].type != event.type]


def pcm(events: list[Event]) -> bytes:
    return b"".join(event.payload or b"" for event in events)


def recorded(rate: int, width: int, channels: int, sound: bytes, block: int = 2048) -> list[Eventable]:
    """The events of a sound, as a satellite sends them."""
    blocks = [sound[begin : begin + block] for begin in range(0, len(sound), block)]
    chunks = [AudioChunk(rate, width, channels, each) for each in blocks]
    return [AudioStart(rate, width, channels), *chunks, AudioStop()]


@contextlib.contextmanager
def wyoming_server(home: Path, url: str, *flags: str, is_up: bool = True) -> Iterator[WyomingServer]:
    """Runs it around a block, and checks that SIGTERM ends it in order.

    Args:
        url: of the gateway.
        is_up: whether to wait until it knows what the gateway offers.
    """
    uri = f"tcp://127.0.0.1:{free_port()}"
    process = start("wyoming", "--url", url, "--uri", uri, *flags, cwd=home)
    server = WyomingServer(process, uri)
    try:
        server.logged("listening")
        if is_up:
            server.logged("gateway")
        yield server
        process.send_signal(signal.SIGTERM)
        server.logged("stopped")
        assert process.wait(HANG_GUARD_S) == 0
    finally:
        process.kill()
        process.communicate()
