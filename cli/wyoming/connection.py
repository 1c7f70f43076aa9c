"""One client of the Wyoming server."""

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import cast

import structlog
from wyoming.asr import Transcribe
from wyoming.error import Error
from wyoming.event import Event, async_read_event
from wyoming.ping import Ping, Pong
from wyoming.server import AsyncEventHandler
from wyoming.tts import Synthesize, SynthesizeChunk, SynthesizeStart

from cli.wyoming.answers import Answer, Transcription, TypedSpeech, WholeSpeech
from cli.wyoming.gateway_client import GatewayClient, RequestError
from cli.wyoming.known_offer import KnownOffer
from cli.wyoming.sound import Recording

MAX_CONNECTIONS = 64
MAX_EVENT_BYTES = 4 * 1024 * 1024
MAX_WAITING = 4  # requests of a connection
log = structlog.get_logger()


@dataclass
class WyomingService:
    """What all connections share. `languages`: ISO 639-1 codes to offer; none: all."""

    gateway: GatewayClient
    known: KnownOffer
    languages: list[str]
    connections: set[asyncio.Task[None]] = field(default_factory=set)


class _Bounded:
    """A stream that refuses to read much at once: the library reads as many bytes as a client names."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader

    async def readline(self) -> bytes:
        return await self._reader.readline()

    async def readexactly(self, count: int) -> bytes:
        """Raises ValueError."""
        if count > MAX_EVENT_BYTES:
            raise ValueError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        return await self._reader.readexactly(count)


class WyomingConnection(AsyncEventHandler):
    """Reads on while it answers, so that a client that leaves is noticed: its requests end at the gateway, too. Answers
    come one after another."""

    def __init__(self, service: WyomingService, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        super().__init__(reader, writer)
        self._service = service
        self._bounded = cast(asyncio.StreamReader, _Bounded(reader))
        self._waiting: asyncio.Queue[Answer] = asyncio.Queue(MAX_WAITING)
        self._transcribe = Transcribe()
        self._sound: Recording | None = None
        self._drops_sound = False  # of a recording that was refused
        self._typed: TypedSpeech | None = None

    async def run(self) -> None:
        connections, task = self._service.connections, asyncio.current_task()
        assert task is not None
        answering = asyncio.create_task(self._answer_all())
        connections.add(task)
        try:
            if len(connections) > MAX_CONNECTIONS:
                await self._fail(RequestError(f"more than {MAX_CONNECTIONS} connections; try again later", "full"))
                return
            while (event := await self._read()) is not None and await self.handle_event(event):
                pass
        except ConnectionError:
            pass
        finally:
            answering.cancel()
            await asyncio.wait([answering])
            connections.discard(task)
            self.writer.close()

    async def _read(self) -> Event | None:
        """None: the client left, or it sent what is no event."""
        try:
            event = await async_read_event(self._bounded)
        except (asyncio.IncompleteReadError, LookupError, TypeError, AttributeError, RecursionError):
            return None
        return event if event is None or isinstance(event.data, dict) else None

    async def handle_event(self, event: Event) -> bool:
        """False: the connection ends. Raises ConnectionError."""
        try:
            return await self._take(event)
        except RequestError as error:
            await self._fail(error)
        except (LookupError, TypeError, AttributeError, ValueError):
            await self._fail(RequestError(f"{event.type}: a member is missing, or of another type", "invalid"))
        return True

    async def _take(self, event: Event) -> bool:
        """Raises RequestError, and what the library raises at malformed events. Events that it does not know, and
        `select-program`, as there is one of a kind, have no effect."""
        match event.type:
            case "describe":
                return await self._describe()
            case "ping":
                await self.write_event(Pong(Ping.from_event(event).text).event())
            case "transcribe":
                self._transcribe = Transcribe.from_event(event)
            case "audio-start" | "audio-chunk" | "audio-stop":
                self._hear(event)
            case "synthesize" if self._typed is None:
                self._wait_for(WholeSpeech(Synthesize.from_event(event)))
            case "synthesize-start":
                self._finish_typed()
                typed = TypedSpeech(SynthesizeStart.from_event(event))
                self._wait_for(typed)
                self._typed = typed
            case "synthesize-chunk" if self._typed is not None:
                self._typed.add(SynthesizeChunk.from_event(event).text)
            case "synthesize-stop":
                self._finish_typed()
        return True

    async def _describe(self) -> bool:
        """Ends the connection if nothing is known yet: Home Assistant then asks again, and would keep an empty list."""
        try:
            offer = await self._service.known.offer()
        except RequestError as error:
            await self._fail(error)
            return False
        await self.write_event(offer.info(self._service.languages).event())
        return True

    def _hear(self, event: Event) -> None:
        """Raises RequestError."""
        if event.type == "audio-start":
            self._drops_sound, self._sound = False, None
        try:
            if event.type == "audio-stop":
                sound, asked, self._sound, self._transcribe = self._sound, self._transcribe, None, Transcribe()
                if sound is not None:
                    self._wait_for(Transcription(asked, sound))
                elif not self._drops_sound:
                    raise RequestError("audio-stop: no sound came before it", "invalid")
                self._drops_sound = False
            elif not self._drops_sound:
                self._sound = self._sound or Recording(event.data)
                if event.type == "audio-chunk":
                    self._sound.add(event.data, event.payload or b"")
        except RequestError:
            self._drops_sound, self._sound = event.type != "audio-stop", None
            raise

    def _finish_typed(self) -> None:
        if self._typed is not None:
            self._typed.finish()
            self._typed = None

    def _wait_for(self, answer: Answer) -> None:
        """Raises RequestError."""
        try:
            self._waiting.put_nowait(answer)
        except asyncio.QueueFull:
            raise RequestError(f"more than {MAX_WAITING} requests wait on this connection", "full") from None

    async def _answer_all(self) -> None:
        with suppress(ConnectionError):
            while True:
                await self._answer(await self._waiting.get())

    async def _answer(self, answer: Answer) -> None:
        """Raises ConnectionError: the client left."""
        began, outcome = time.monotonic(), "cancelled"
        try:
            try:
                offer = await self._service.known.offer()
                await answer.run(self._service.gateway, offer, self.write_event)
                outcome = "ok"
            except RequestError as error:
                outcome = error.code
                await self._fail(error)
            except ConnectionError:
                raise
            except Exception:
                outcome = "internal_error"
                log.exception("internal error", kind=answer.kind)
                await self._fail(RequestError("an internal error; the log has more", outcome))
            for event in answer.end():
                await self.write_event(event)
        finally:
            took_ms = round((time.monotonic() - began) * 1000)
            log.info("request", kind=answer.kind, outcome=outcome, took_ms=took_ms, seconds=round(answer.seconds, 2))

    async def _fail(self, error: RequestError) -> None:
        await self.write_event(Error(text=str(error), code=error.code).event())
