"""WebSockets: their beginning, their end and their number."""

import json
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from starlette import status
from starlette.types import Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from gateway import metrics
from gateway.access.api_key import ApiKey
from gateway.access.client_secrets import LIVE_PATHS, subprotocol_of
from gateway.errors import ApiError
from gateway.http.connection import ClientGone

_UNKNOWN_KEY = "no API key that is known here came; send `Authorization: Bearer KEY` with one of this server's"


TRANSPORT_HEADER = "x-quartet-transport"  # of the process that has the calls of WebRTC
WEBRTC = "webrtc"


def transport_of(socket: WebSocket, own: str) -> str:
    """By what the user of a session is connected, for metrics: `own`, or a call of WebRTC."""
    return WEBRTC if socket.headers.get(TRANSPORT_HEADER) == WEBRTC else own


async def serve(
    socket: WebSocket, work: Callable[[WebSocket], Awaitable[int]], error_event: Callable[[ApiError], dict[str, Any]]
) -> None:
    """Accepts a connection and closes it with the code that `work` returns.

    Args:
        error_event: the event for an ApiError of `work`, which ends the connection.

    Raises:
        ClientGone: the client left first.
    """
    await socket.accept(subprotocol_of(socket))
    try:
        try:
            code = await work(socket)
        except ApiError as error:
            socket.state.log.update(error.log)
            await socket.send_json(error_event(error))
            code = _close_code(error)
        if socket.client_state is WebSocketState.CONNECTED:
            await socket.close(code)
    except WebSocketDisconnect:
        raise ClientGone from None


async def refuse_socket(scope: Scope, send: Send) -> None:
    """Refuses a connection without a known key: to clients of the Live API, a handshake that fails is one to repeat."""
    if scope["path"] in LIVE_PATHS:
        error = {"type": "invalid_request_error", "code": "invalid_api_key", "message": _UNKNOWN_KEY, "param": None}
        event = {"type": "error", "event_id": f"event_{uuid.uuid4().hex}", "error": {**error, "client_event_id": None}}
        await send({"type": "websocket.accept", "subprotocol": None})
        await send({"type": "websocket.send", "text": json.dumps(event)})
    await send({"type": "websocket.close", "code": status.WS_1008_POLICY_VIOLATION})


def _close_code(error: ApiError) -> int:
    if error.status in (429, 503):
        return status.WS_1013_TRY_AGAIN_LATER
    return status.WS_1011_INTERNAL_ERROR if error.status >= 500 else status.WS_1008_POLICY_VIOLATION


async def receive_text(socket: WebSocket) -> str | None:
    """The next message; None: it is no text. Raises WebSocketDisconnect."""
    message = await socket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code", status.WS_1001_GOING_AWAY))
    return message.get("text")


async def stopped(socket: WebSocket) -> None:
    """Returns when the gateway stops. Who awaits it ends the connection within `drain_timeout_s`, with 1012."""
    await socket.state.stop.wait()


@contextmanager
def counted_session(gateway: Any, key: ApiKey | None) -> Iterator[None]:
    """Counts a connection that may stay open for long. Raises ApiError: there are too many, of all or of `key`."""
    of_key = max(1, gateway.settings.max_realtime_sessions * gateway.settings.workers // 4)
    most = gateway.settings.max_realtime_sessions
    if gateway.realtime_sessions >= most:
        reason = f"this server has {most} realtime sessions, its most; try again later"
        raise ApiError(429, reason, None, "session_limit", "rate_limit_error")
    gateway.realtime_sessions += 1
    try:
        with nullcontext() if key is None else key.session(of_key), metrics.REALTIME_SESSIONS.track_inprogress():
            yield
    finally:
        gateway.realtime_sessions -= 1
