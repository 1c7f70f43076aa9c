"""A call: a peer connection, and the session that it belongs to."""

import asyncio
import base64
import json
import time
from collections.abc import Callable
from typing import Any

import orjson
import structlog
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from gateway.dialects.realtime.events import new_id_at
from gateway.errors import ApiError
from gateway.tasks import cancel
from gateway.webrtc.call_speech import CallSpeech
from gateway.webrtc.live_speech import LiveSpeech
from gateway.webrtc.peer import PeerGone, PeerUnreached, RtcPeer
from gateway.webrtc.port import UdpPort
from gateway.webrtc.sdp import MAX_MESSAGE_BYTES, SdpOffer
from gateway.webrtc.session_socket import Event

_MAX_WAITING = 2000  # texts for the gateway, or for a client whose channel is not open: half a minute of sound
_SESSION_EVENTS = ("session.created", "session.started", "session.updated")

log = structlog.get_logger()
Controller = Callable[[str], None]
"""Takes the text of an event. Must not wait."""


class RtcCall:
    """`answer` is for the client. Ends with its session, its connection, or by `hang_up`.

    Args:
        speech: of the session's kind.
        created: the session's first event.

    Attributes:
        owner: of the API key it was made with; "" without keys.
        outcome: how it ended, once it has: hung_up, left (by the client), unreached (the client never came), session
            (the gateway closed it), failed.
    """

    def __init__(
        self,
        id: str,
        owner: str,
        port: UdpPort,
        offer: SdpOffer,
        socket: ClientConnection,
        created: Event,
        speech: type[CallSpeech | LiveSpeech] = CallSpeech,
    ) -> None:
        self.id, self.owner, self.outcome = id, owner, "failed"
        self._socket, self._created = socket, created
        self._peer = RtcPeer(port, offer, self._hear, self._ask_for, self._open)
        self.answer = self._peer.answer
        self._speech = speech(self._peer.play, self._tell, self._ask)
        self._to_gateway = asyncio.Queue[str](_MAX_WAITING)
        self._is_open, self._before_open = False, list[str]()
        self._controllers = set[Controller]()
        self._hung_up = asyncio.Event()
        self._lost = ""  # why nothing more can be sent
        self._tell(created)
        self._speech.take(created)

    async def run(self) -> None:
        """Returns when the call is over and holds nothing."""
        begun = time.monotonic()
        works = (self._peer.run(), self._read(), self._write(), self._speech.pacer.run(), self._hung_up.wait())
        tasks, why = [asyncio.ensure_future(work) for work in works], "cancelled"
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            self.outcome, why = self._end(done.pop())
        finally:
            await cancel(*tasks)
            await self._socket.close()
            for each in list(self._controllers):
                each("")
            fields = {"outcome": self.outcome, "why": why, "concealed_ms": round(self.concealed_ms)}
            log.info("call", call_id=self.id, duration_ms=round(1000 * (time.monotonic() - begun)), **fields)

    @property
    def concealed_ms(self) -> float:
        """Sound of the client that the network lost."""
        return self._peer.concealed_ms

    @property
    def session_id(self) -> str:
        return self._created["session"]["id"]

    @property
    def controllers(self) -> int:
        return len(self._controllers)

    def _end(self, task: asyncio.Future[Any]) -> tuple[str, str]:
        """The outcome, and what a log says of it."""
        match task.exception():
            case None:
                return ("failed", self._lost) if self._lost else ("hung_up", "hung up")
            case PeerUnreached() as error:
                return "unreached", str(error)
            case PeerGone() as error:
                return "left", str(error)
            case ConnectionClosed():
                return "session", "the gateway has closed the session"
            case error:
                log.error("call failed", call_id=self.id, exc_info=error)
                return "failed", "a fault of Quartet"

    def hang_up(self, why: str = "") -> None:
        self._lost = self._lost or why
        self._hung_up.set()

    def join(self, controller: Controller) -> None:
        """Another program hears the session's events, and may send its own by `ask_for`. It gets "" when it ends."""
        self._controllers.add(controller)
        controller(_text(self._created))

    def leave(self, controller: Controller) -> None:
        self._controllers.discard(controller)

    async def _read(self) -> None:
        """Raises ConnectionClosed."""
        while True:
            text = await self._socket.recv()
            event = orjson.loads(text)
            if event["type"] in _SESSION_EVENTS:
                self._created = {**self._created, "session": event["session"]}
            if self._speech.take(event):
                self._send(text if isinstance(text, str) else text.decode())

    async def _write(self) -> None:
        """Raises ConnectionClosed."""
        while True:
            await self._socket.send(await self._to_gateway.get())

    def _hear(self, pcm16: bytes) -> None:
        audio = base64.b64encode(pcm16).decode()
        self._put(f'{{"type":"{self._speech.append}","audio":"{audio}"}}', droppable=True)

    def ask_for(self, text: str | bytes) -> None:
        """Takes an event of the client, or of a controller."""
        if isinstance(text, bytes):
            refusal = ApiError(400, "events of a client are JSON texts", "type", "invalid_value")
            self._tell(self._speech.error_event(refusal))
            return
        if len(text) > MAX_MESSAGE_BYTES or not any(kind in text for kind in self._speech.read_alone):
            self._put(text)
            return
        try:
            event = json.loads(text)
        except (ValueError, RecursionError):
            event = None
        if not isinstance(event, dict) or event.get("type") not in self._speech.read_alone:
            self._put(text)  # the gateway says what is wrong
        elif (asked := self._speech.asked(event)) is not None:
            self._ask(asked)

    _ask_for = ask_for

    def _ask(self, event: Event) -> None:
        self._put(_text(event))

    def _put(self, text: str, droppable: bool = False) -> None:
        if not self._to_gateway.full():
            self._to_gateway.put_nowait(text)
        elif not droppable:
            self.hang_up("the gateway does not take the client's events")

    def _open(self) -> None:
        waiting, self._is_open = self._before_open, True
        self._before_open = []
        for text in waiting:
            self._send_to_peer(text)

    def _tell(self, event: Event) -> None:
        self._send(_text(event))

    def _send(self, text: str) -> None:
        for each in list(self._controllers):
            each(text)
        if self._is_open:
            self._send_to_peer(text)
        elif self._peer.has_channel and len(self._before_open) < _MAX_WAITING:
            self._before_open.append(text)

    def _send_to_peer(self, text: str) -> None:
        try:
            self._peer.tell(text)
        except PeerGone as error:
            self.hang_up(str(error))
        except ValueError:  # longer than the client's channel takes
            kind = orjson.loads(text)["type"]
            message = f"the event {kind} has {len(text)} characters, more than the connection's channel takes"
            self._peer.tell(_text(self._speech.error_event(ApiError(400, message, None, "event_too_large"))))


def _text(event: Event) -> str:
    return orjson.dumps(event).decode()


def new_call_id(node: str) -> str:
    """`node`: of the gateway that asks for the call; "": no other gateway finds it."""
    return new_id_at("rtc", node)
