"""The WebSocket `/v1/responses`, OpenAI's WebSocket mode: one response after another on one connection.

The client sends `response.create` with the members of POST /v1/responses. The server sends the events of the stream,
or `error`. Source: `responses.connect()` of OpenAI's client."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import structlog
from fastapi import APIRouter, WebSocket, WebSocketDisconnect
from pydantic import BaseModel, Field
from starlette.status import WS_1001_GOING_AWAY

from gateway import metrics
from gateway.dialects.responses.endpoint import responses_of
from gateway.dialects.responses.parts import Item
from gateway.dialects.responses.responses import without_sound
from gateway.dialects.responses.run import ResponseRun
from gateway.dialects.responses.schema import ResponseRequest
from gateway.errors import ApiError, gateway_fault, invalid
from gateway.http.answer_span import with_firsts
from gateway.http.connection import LAST_WORD_S, ClientGone, admitted, key_of, owner_of
from gateway.http.csrf import check_socket
from gateway.http.forms import parsed
from gateway.http.json_writer import error_headers, to_json
from gateway.http.sockets import counted_session, receive_text, serve
from gateway.tasks import first, limited
from gateway.validation import Strict
from services.common.telemetry.spans import Span

_PATH = "/v1/responses"
_MOST_WAITING = 8  # messages of a connection
_MOST_WAITING_CHARACTERS = 1024 * 1024  # of those behind the first

router = APIRouter(tags=["responses"])
log = structlog.get_logger()


class SocketRequest(ResponseRequest):
    """`background` is refused here; `stream` has no effect."""

    type: Literal["response.create"]
    generate: bool | None = Field(default=None, description="false: the items are kept, and nothing is written")
    stream_id: str | None = Field(default=None, description="is in the events, too")


class ResponseSteer(Strict):
    """More input for a running response; refused."""

    type: Literal["response.steer"]
    input: Any
    previous_response_id: str


class _Message(BaseModel):
    type: Literal["response.create", "response.steer"]
    stream_id: Any = None


@dataclass(frozen=True)
class _Held:
    """The last response of a connection and `stream_id`, which no store has.

    Attributes:
        items: of all turns up to its own.
        size: of the items, in bytes of JSON.
    """

    stream_id: str | None
    items: Sequence[Item]
    size: int


@router.websocket(_PATH)
async def respond_in_turn(socket: WebSocket) -> None:
    """Answers until the client leaves, or the connection's time is over."""
    await serve(socket, _serve, _error_event)


async def _serve(socket: WebSocket) -> int:
    """The code to close with. Raises ApiError; WebSocketDisconnect."""
    if key_of(socket) is None:  # pages of other sites cannot send a key
        check_socket(socket)
    with counted_session(socket.app.state.gateway, key_of(socket)):
        return await _Connection(socket).run()


class _Connection:
    def __init__(self, socket: WebSocket) -> None:
        self._socket, self._responses = socket, responses_of(socket)
        self._settings = self._responses.gateway.settings
        self._waiting = asyncio.Queue[str | None](_MOST_WAITING)
        self._characters = 0  # that wait
        self._is_busy = False
        self._held: dict[str, _Held] = {}  # by the response's id, the oldest first

    async def run(self) -> int:
        """The code to close with. Raises WebSocketDisconnect or ClientGone, which end what runs."""
        limit_s = self._settings.realtime_session_s
        reason = f"the connection has lasted the {limit_s:g} s that one may; connect again"
        try:
            async with limited(limit_s, ApiError(400, reason, None, "websocket_connection_limit_reached")):
                await first(self._read(), self._answer_all())
        except ApiError as error:
            await self._send(_error_event(error))
        except WebSocketDisconnect:
            if self._is_busy:
                raise
        return WS_1001_GOING_AWAY

    async def _read(self) -> NoReturn:
        """Reads while a response runs: a disconnection ends it."""
        while True:
            text = await receive_text(self._socket)
            size = len(text or "")
            is_large = not self._waiting.empty() and self._characters + size > _MOST_WAITING_CHARACTERS
            if self._waiting.full() or is_large:
                reason = "as many messages wait as may, or as large ones; send the next one after an answer"
                await self._send(_error_event(ApiError(429, reason, None, "too_many_messages", "rate_limit_error")))
            else:
                self._waiting.put_nowait(text)
                self._characters += size

    async def _answer_all(self) -> NoReturn:
        idle_s = self._settings.realtime_idle_s
        reason = f"nothing came for {idle_s:g} s; connect again when there is something to ask"
        while True:
            async with limited(idle_s, ApiError(400, reason, None, "session_idle")):
                text = await self._waiting.get()
            self._characters -= len(text or "")
            self._is_busy = True
            async with limited(self._settings.request_timeout_s + LAST_WORD_S, ClientGone()):  # it does not read
                await self._answer(text)
            self._is_busy = not self._waiting.empty()

    async def _send(self, event: dict[str, Any]) -> None:
        await self._socket.send_text(to_json(event).decode())

    async def _answer(self, text: str | None) -> None:
        """Sends a response's events, or a refusal, and logs it. Raises WebSocketDisconnect."""
        fields, started, lane = {**self._socket.state.log, "status": "cancelled"}, time.monotonic(), dict[str, str]()
        try:
            if text is None:
                raise invalid("type", "messages of a client are JSON texts")
            message = await parsed(_Message, text)
            if isinstance(message.stream_id, str):
                lane["stream_id"] = message.stream_id
            if message.type == "response.steer":
                fields["status"] = "failed"
                await self._send(_not_steered(await parsed(ResponseSteer, text)))
            else:
                with self._socket.app.state.bodies.request(owner_of(self._socket) or "") as body:
                    body.arrives = False
                    await self._respond(text, fields, lane, body.hold)
        except ApiError as error:
            fields |= {"status": "failed", **error.log}
            await self._send(_error_event(error) | lane)
        except WebSocketDisconnect:
            raise
        except Exception:  # a bug: the connection goes on
            log.exception("response failed", request_id=self._socket.state.request_id)
            fields["status"] = "failed"
            await self._send(_error_event(gateway_fault()) | lane)
        finally:
            log.info("response", duration_ms=round((time.monotonic() - started) * 1000, 1), **fields)

    async def _respond(
        self, text: str, fields: dict[str, Any], lane: dict[str, str], hold: Callable[[int], None]
    ) -> None:
        """Sends a response's events. `hold` counts what it holds. Raises ApiError; WebSocketDisconnect."""
        ignored = set[str]()
        async with asynccontextmanager(admitted)(self._socket):
            create = await parsed(SocketRequest, text, ignored)
            for member in ignored:
                metrics.IGNORED.labels(_PATH, member).inc()
            if create.background:
                raise invalid("background", f"not on a WebSocket; send it to POST {_PATH}")
            create.stream = True
            items = {name: each.items for name, each in self._held.items()}
            run = await self._responses.ask(create, None, key_of(self._socket), fields, hold, items)
            run.generates = create.generate is not False
            try:
                async with aclosing(run.events()) as events:
                    async for event in events:
                        await self._send(event | lane)
            finally:
                self._record(run, fields)
        if run.status in ("completed", "incomplete"):
            await self._hold(run, create)

    def _record(self, run: ResponseRun, fields: dict[str, Any]) -> None:
        """Adds a response's span, as an HTTP request has one."""
        status = fields["status"] = "cancelled" if run.status == "in_progress" else run.status
        span = Span(run.spec.id, "gateway", run.spec.arrived, time.monotonic(), status, owner=owner_of(self._socket))
        self._responses.gateway.spans.add(with_firsts(span, fields))

    async def _hold(self, run: ResponseRun, create: SocketRequest) -> None:
        """Keeps what the next response may continue, as far as it is not stored."""
        spec, is_stored = run.spec, create.is_stored and create.previous_response_id not in self._held
        self._held = {name: held for name, held in self._held.items() if held.stream_id != create.stream_id}
        if is_stored:
            return
        items = [*(item for _, item in spec.earlier), *spec.items, *map(without_sound, run.output)]
        size = await asyncio.to_thread(lambda: len(to_json(items)))
        self._held[spec.id] = _Held(create.stream_id, items, size)
        while sum(held.size for held in self._held.values()) > self._settings.max_realtime_bytes:
            del self._held[next(iter(self._held))]


def _error_event(error: ApiError) -> dict[str, Any]:
    headers = error_headers(error)
    body = error.body()["error"] | ({"headers": headers} if headers else {})
    return {"type": "error", "status": error.status, "error": body}


def _not_steered(steer: ResponseSteer) -> dict[str, Any]:
    reason = "a response takes no more input here; send it by response.create when the response has ended"
    error = {"type": "invalid_request_error", "code": "steering_not_supported", "message": reason}
    sent = {"input": steer.input, "previous_response_id": steer.previous_response_id}
    return {"type": "response.steer.failed", "sequence_number": 0, "error": error, "steer": sent}
