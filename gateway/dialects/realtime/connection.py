"""The WebSocket `/v1/realtime`: OpenAI's GA dialect, and vLLM's for transcriptions."""

import asyncio
import time
from typing import Any

import structlog
from fastapi import APIRouter, WebSocket
from starlette import status

from gateway.access.client_secrets import AZURE_PATH, PATH
from gateway.answers.gateway import Gateway
from gateway.dialects.realtime import calls, events
from gateway.dialects.realtime.events import RealtimeError
from gateway.dialects.realtime.lifetime import Lifetime
from gateway.dialects.realtime.output.outbox import Outbox
from gateway.dialects.realtime.secrets import new_session, secret_of
from gateway.dialects.realtime.session_handler import SessionHandler
from gateway.dialects.realtime.settings.session import Session
from gateway.dialects.realtime.vllm_dialect import VllmDialect
from gateway.errors import ApiError, gateway_fault
from gateway.http.connection import key_of
from gateway.http.csrf import check_socket
from gateway.http.sockets import counted_session, receive_text, serve, transport_of
from gateway.tasks import cancel

log = structlog.get_logger()
router = APIRouter(tags=["realtime"])


@router.websocket(PATH)
@router.websocket(AZURE_PATH)
async def realtime(socket: WebSocket) -> None:
    """Serves a session until the client leaves, the gateway drains, or the session expires."""
    if "call_id" in socket.query_params:
        await calls.control(socket)
        return
    await serve(socket, _serve, events.error_event)


async def _serve(socket: WebSocket) -> int:
    """Returns the close code. Raises ApiError; WebSocketDisconnect: the client left; SlowReader: it reads nothing."""
    gateway: Gateway = socket.app.state.gateway
    if key_of(socket) is None:  # pages of other sites cannot send a key
        check_socket(socket)
    session = _session(gateway, socket)
    with counted_session(gateway, key_of(socket)):
        return await _Connection(gateway, socket, session).run()


def _session(gateway: Gateway, socket: WebSocket) -> Session:
    """Raises ApiError: no such model answers here, or the client secret's session is invalid by now."""
    secret, query = secret_of(socket), socket.query_params
    model = gateway.catalog.meant(query.get("model") or query.get("deployment"), "realtime")
    ends = int(time.time() + gateway.settings.realtime_session_s)
    session = new_session(gateway, expires_at=ends, lora=gateway.catalog.lora_of(model))
    gateway.catalog.stage_for("text", model, takes_loras=True)
    patch: dict[str, Any] = {} if secret is None else secret.session
    if query.get("intent") == "transcription":
        patch |= {"type": "transcription"}
    return session.updated(patch) if patch else session


class _Connection:
    def __init__(self, gateway: Gateway, socket: WebSocket, session: Session) -> None:
        self._socket, self._outbox = socket, Outbox()
        self._gateway, self._key, self._is_first = gateway, key_of(socket), True
        transport, fields = transport_of(socket, "websocket"), socket.state.log
        self._handler = SessionHandler(gateway, session, self._outbox, self._key, fields, transport=transport)
        self._dialect: SessionHandler | VllmDialect = self._handler
        self._lifetime = Lifetime(socket, gateway.settings, lambda: self._dialect.is_busy)

    async def run(self) -> int:
        writing = asyncio.create_task(self._outbox.send(self._socket))
        reading = asyncio.create_task(self._read())
        try:
            why = await self._lifetime.until_over(writing, reading)
            for task in (reading, writing):
                if task.done():
                    task.result()
            code = status.WS_1001_GOING_AWAY
            if why is None:
                code = status.WS_1012_SERVICE_RESTART
                await cancel(reading)  # nothing new begins
                why = await self._lifetime.finish(self._dialect.finish(), writing)
            self._outbox.put(self._dialect.error_event(why))
            self._outbox.finish()
            await writing
            return code
        finally:
            await cancel(reading)
            await self._dialect.close()
            await cancel(writing)

    async def _read(self) -> None:
        """Handles the client's events. Never returns. Raises WebSocketDisconnect."""
        self._handler.send("session.created", session=self._handler.session.public())
        while True:
            text = await receive_text(self._socket)
            self._lifetime.hear()
            await self._outbox.room.wait()  # a client that does not read is not answered
            await self._handle(text)

    async def _handle(self, text: str | None) -> None:
        event = None
        try:
            if text is None:
                raise RealtimeError("invalid_value", "events of a client are JSON texts", "type")
            event = await events.in_thread_if_long(len(text), lambda: events.parse(text))
            await self._choose_dialect(event)
            await self._dialect.handle(event)
            return
        except ApiError as error:
            refusal = error
        except Exception as error:  # a bug: the session goes on
            log.exception("realtime event failed", kind=event and event.type, exc_info=error)
            refusal = gateway_fault()
        self._outbox.put(self._dialect.error_event(refusal, event and event.event_id))

    async def _choose_dialect(self, event: events.ClientEvent) -> None:
        """Raises RealtimeError: vLLM's dialect is chosen by the first event only."""
        if isinstance(event, events.ModelUpdate) and self._dialect is self._handler:
            if not self._is_first:
                raise events.wrong("session", "is missing", "missing_required_parameter")
            await self._handler.close()
            self._dialect = VllmDialect(self._gateway, self._outbox, self._key)
        self._is_first = False
