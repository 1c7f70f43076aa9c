"""The WebSockets of the Live API: `/v1/live/sessions`, and `/v1/live/sessions/{id}/attach` for a sideband."""

import asyncio
import time
from typing import Any

import structlog
from fastapi import APIRouter, WebSocket
from starlette import status

from gateway.access.api_key import ApiKey
from gateway.access.client_secrets import LIVE_PATHS
from gateway.answers.gateway import Gateway
from gateway.dialects.live import events
from gateway.dialects.live.events import LiveStart, acknowledged
from gateway.dialects.live.handler import LiveHandler
from gateway.dialects.live.readers import MAX_SIDEBANDS
from gateway.dialects.live.session_config import parse_config
from gateway.dialects.realtime.events import RealtimeError, in_thread_if_long, server_event
from gateway.dialects.realtime.lifetime import Lifetime
from gateway.dialects.realtime.output.outbox import Outbox
from gateway.dialects.realtime.output.tools import check_tools
from gateway.dialects.realtime.secrets import new_session
from gateway.errors import ApiError, gateway_fault
from gateway.http.connection import key_of
from gateway.http.csrf import check_socket
from gateway.http.sockets import counted_session, receive_text, serve, transport_of
from gateway.tasks import cancel

log = structlog.get_logger()
router = APIRouter(tags=["realtime"])
_START_S = 30.0  # for the first event
_USAGE_S = 15.0  # between events of usage


@router.websocket(LIVE_PATHS[0])
@router.websocket(LIVE_PATHS[1])
async def live(socket: WebSocket) -> None:
    """Serves a session until the client leaves or closes it, the gateway drains, or the session expires."""
    await serve(socket, _serve, events.error_event)


@router.websocket(f"{LIVE_PATHS[0]}/{{session_id}}/attach")
@router.websocket(f"{LIVE_PATHS[1]}/{{session_id}}/attach")
async def attach(socket: WebSocket) -> None:
    """A sideband: reads a session's events, and sends all but its sound, until one of the two ends."""
    await serve(socket, _attach, events.error_event)


async def _serve(socket: WebSocket) -> int:
    """Returns the close code. Raises ApiError; WebSocketDisconnect: the client left; SlowReader: it reads nothing."""
    gateway: Gateway = socket.app.state.gateway
    key = key_of(socket)
    if key is None:  # pages of other sites cannot send a key
        check_socket(socket)
    with counted_session(gateway, key):
        start = await _first(socket)
        handler = _handler(gateway, start, key, socket.state.log, transport_of(socket, "live"))
        with socket.app.state.live_sessions.opened(handler, socket):
            return await _Connection(gateway, socket, handler).run(start)


async def _first(socket: WebSocket) -> LiveStart:
    """session.start. Raises ApiError: it did not come, or is wrong."""
    try:
        async with asyncio.timeout(_START_S):
            text = await receive_text(socket)
    except TimeoutError:
        raise RealtimeError("session_not_started", f"no session.start came within {_START_S:g} s") from None
    event = _parsed(text)
    if not isinstance(event, LiveStart):
        raise RealtimeError("session_not_started", "the first event must be session.start", "type", event.event_id)
    return event


def _parsed(text: str | None) -> events.LiveEvent:
    if text is None:
        raise RealtimeError("invalid_value", "events of a client are JSON texts", "type")
    return events.parse(text)


def _handler(
    gateway: Gateway, start: LiveStart, key: ApiKey | None, fields: dict[str, Any], transport: str
) -> LiveHandler:
    """Raises ApiError, which names the event."""
    try:
        config = parse_config(start.session)
        model = gateway.catalog.meant(config.model, "realtime")
        stage = gateway.catalog.stage_for("text", model, takes_loras=True)
        ends = int(time.time() + gateway.settings.realtime_session_s)
        session = new_session(gateway, expires_at=ends, lora=gateway.catalog.lora_of(model))
        if not session.speaks:
            raise events.unsupported("session.model", "this model has no speech; use /v1/realtime, which takes text")
        calls_tools = stage.info is not None and stage.info.thinker.calls_tools
        session = session.updated(config.realtime(gateway.turn_model is not None, calls_tools))
        check_tools(gateway, session)
        return LiveHandler(gateway, config, session, key, fields, transport=transport, calls_tools=calls_tools)
    except ApiError as error:
        code = error.code or "invalid_value"
        refusal = RealtimeError(code, error.message, error.param, start.event_id, error.kind)
        refusal.status = error.status
        raise refusal from None


class _Connection:
    def __init__(self, gateway: Gateway, socket: WebSocket, handler: LiveHandler) -> None:
        self._socket, self._handler, self._outbox = socket, handler, handler.readers.client
        self._lifetime = Lifetime(socket, gateway.settings, lambda: handler.is_busy)

    async def run(self, start: LiveStart) -> int:
        handler = self._handler
        handler.readers.put(acknowledged("session.started", start, session=handler.public()))
        writing = asyncio.create_task(self._outbox.send(self._socket))
        reading = asyncio.create_task(self._read())
        work = [asyncio.create_task(each) for each in (handler.run(), self._count())]
        closing = asyncio.create_task(handler.closing.wait())
        try:
            why = await self._lifetime.until_over(closing, writing, reading, *work)
            for task in (writing, reading, *work):
                if task.done():
                    task.result()
            reason, code = "expired", status.WS_1001_GOING_AWAY
            if closing.done():
                reason, code = handler.ended_by, status.WS_1000_NORMAL_CLOSURE
            elif why is None:
                reason, code = "connection_lost", status.WS_1012_SERVICE_RESTART
                await cancel(reading)  # nothing new begins
                why = await self._lifetime.finish(handler.finish(), writing)
            if why is not None:
                handler.readers.put(events.error_event(why))
            handler.readers.put(server_event("session.closed", reason=reason, **self._now()))
            handler.readers.finish()
            await writing
            return code
        finally:
            await cancel(closing, reading, *work)
            await handler.close()
            handler.readers.finish()
            await cancel(writing)

    def _now(self) -> dict[str, Any]:
        return {"session": self._handler.public(), "usage": {"seconds": round(self._handler.elapsed_s, 3)}}

    async def _read(self) -> None:
        """Handles the client's events. Never returns. Raises WebSocketDisconnect."""
        while True:
            text = await receive_text(self._socket)
            self._lifetime.hear()
            await self._outbox.room.wait()  # a client that does not read is not answered
            await handle(self._handler, text, self._outbox)

    async def _count(self) -> None:
        while True:
            await asyncio.sleep(_USAGE_S)
            self._handler.readers.put(server_event("session.usage.updated", usage=self._now()["usage"]))


async def handle(handler: LiveHandler, text: str | None, outbox: Outbox, *refused: type) -> None:
    """Handles an event of a client, which learns by `outbox` what is wrong with it. `refused`: types of events that it
    may not send."""
    event = None
    try:
        event = await in_thread_if_long(len(text or ""), lambda: _parsed(text))
        if isinstance(event, refused):
            raise events.unsupported("type", f"a sideband sends no {event.type}")
        await handler.handle(event)
        return
    except ApiError as error:
        refusal = error
    except Exception as error:  # a bug: the session goes on
        log.exception("live event failed", kind=event and event.type, exc_info=error)
        refusal = gateway_fault()
    outbox.put(events.error_event(refusal, event and event.event_id))


async def _attach(socket: WebSocket) -> int:
    """Returns the close code. Raises ApiError; WebSocketDisconnect: the sideband left."""
    if key_of(socket) is None:
        check_socket(socket)
    handler: LiveHandler = socket.app.state.live_sessions.find(socket.path_params["session_id"], socket)
    if len(handler.readers.sidebands) >= MAX_SIDEBANDS:
        reason = f"a session has {MAX_SIDEBANDS} sidebands at most"
        raise ApiError(429, reason, None, "sideband_limit", "rate_limit_error")
    outbox = Outbox()
    handler.readers.sidebands.append(outbox)
    outbox.put(server_event("session.started", session=handler.public()))
    reading = asyncio.create_task(_read_sideband(socket, handler, outbox))
    writing = asyncio.create_task(outbox.send(socket))
    try:
        await asyncio.wait([reading, writing], return_when=asyncio.FIRST_COMPLETED)
        for task in (reading, writing):
            if task.done():
                task.result()
        return status.WS_1000_NORMAL_CLOSURE
    finally:
        if outbox in handler.readers.sidebands:
            handler.readers.sidebands.remove(outbox)
        await cancel(reading)
        await cancel(writing)


async def _read_sideband(socket: WebSocket, handler: LiveHandler, outbox: Outbox) -> None:
    while True:
        text = await receive_text(socket)
        await outbox.room.wait()
        await handle(handler, text, outbox, LiveStart, events.LiveAudioAppend)
