"""A call's session at the gateway."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import orjson
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

from gateway.access.client_secrets import LIVE_PATHS
from gateway.dialects.realtime.events import new_id
from gateway.errors import ApiError
from gateway.http.sockets import TRANSPORT_HEADER, WEBRTC

_OPEN_S = 10.0
_MAX_MESSAGE_BYTES = 128 * 1024 * 1024  # an image or a video in an event
_PCM = {"format": {"type": "audio/pcm", "rate": 24_000}}  # of both directions, between gateway and call
_STATUSES = {"invalid_api_key": 401, "foreign_origin": 403, "model_not_found": 404, "unknown_model": 404}

OWN_EVENT = "call"  # begins the ids of events that the call itself sends to the gateway

Event = dict[str, Any]


async def open_session(
    url: str, key: str, query: dict[str, str], patch: Event, call_id: str
) -> tuple[ClientConnection, Event]:
    """A WebSocket whose session has the members of `patch`, and its `session.created`.

    Args:
        url: of the gateway.
        key: the caller's, "" without keys.
        query: the caller's `model`, for one.
        patch: members of the session, "type" perhaps among them.

    Raises:
        ApiError: the gateway's own refusal; 503, it is not reached.
    """
    async with _connected(url, f"/v1/realtime?{urlencode(query)}", key, call_id) as opening:
        created = await _configured(opening.socket, patch)
    return opening.socket, created


async def open_live(url: str, key: str, session: Event, call_id: str) -> tuple[ClientConnection, Event]:
    """A WebSocket of the Live API, and its `session.started`. `session`: of its session.start; other arguments and
    errors as of `open_session`."""
    audio = session.get("audio")
    if audio is None or isinstance(audio, dict):  # else the gateway says what is wrong
        session = {**session, "audio": {**(audio or {}), **_PCM}}
    async with _connected(url, LIVE_PATHS[0], key, call_id) as opening:
        start = {"type": "session.start", "event_id": new_id(OWN_EVENT), "session": session}
        await opening.socket.send(orjson.dumps(start).decode())
        started = await _event(opening.socket, "session.started")
    return opening.socket, started


@dataclass
class _Opening:
    socket: ClientConnection


@asynccontextmanager
async def _connected(url: str, path: str, key: str, call_id: str) -> AsyncIterator[_Opening]:
    """A connection, which is closed if what follows fails. Raises ApiError."""
    address = f"{url.rstrip('/').replace('http', 'ws', 1)}{path}"
    headers = {"x-request-id": call_id, TRANSPORT_HEADER: WEBRTC} | ({"authorization": f"Bearer {key}"} if key else {})
    options = {"compression": None, "max_size": _MAX_MESSAGE_BYTES, "open_timeout": _OPEN_S, "proxy": None}
    try:
        socket = await connect(address, additional_headers=headers, **options)
    except InvalidStatus as error:
        if error.response.status_code in (401, 403):
            raise ApiError(401, "the API key is not known to the gateway", None, "invalid_api_key") from None
        raise _unreached() from None
    except (OSError, WebSocketException):  # a TimeoutError is an OSError
        raise _unreached() from None
    try:
        yield _Opening(socket)
    except ConnectionClosed:
        raise _unreached() from None
    except BaseException:
        await socket.close()
        raise


async def _configured(socket: ClientConnection, patch: Event) -> Event:
    created = await _event(socket, "session.created")
    kind = patch.get("type") or created["session"]["type"]
    session = with_pcm({**patch, "type": kind}, speaks=kind == "realtime", always=True)
    await socket.send(
        orjson.dumps({"type": "session.update", "event_id": new_id(OWN_EVENT), "session": session}).decode()
    )
    updated = await _event(socket, "session.updated")
    return {**created, "session": updated["session"]}


def with_pcm(session: Event, *, speaks: bool = True, always: bool = False) -> Event:
    """The session with sound as it goes between gateway and call: the client's formats are those of its connection.

    Args:
        session: members of a session.
        speaks: whether the session has an output.
        always: names the formats even where `session` has none.
    """
    audio = session.get("audio")
    if not isinstance(audio, dict):
        if not always or audio is not None:
            return session
        audio = {}
    changed = dict(audio)
    for name in ("input", "output") if speaks else ("input",):
        part = audio.get(name)
        if isinstance(part, dict):
            changed[name] = {**part, **_PCM} if always or "format" in part else part
        elif always and part is None:
            changed[name] = _PCM
    return {**session, "audio": changed}


async def _event(socket: ClientConnection, kind: str) -> Event:
    """The next event, which is a `kind`. Raises ApiError: the gateway refuses; ConnectionClosed."""
    event = json.loads(await socket.recv())
    if event["type"] == kind:
        return event
    if event["type"] != "error":
        raise _unreached()
    error = event["error"]
    fault, code = error.get("type"), error.get("code")
    status = {"rate_limit_error": 429, "service_unavailable_error": 503, "server_error": 500}.get(fault, 400)
    raise ApiError(_STATUSES.get(code, status), error["message"], error.get("param"), code, fault)


def _unreached() -> ApiError:
    message = "the process of calls does not reach the gateway's sessions; try again later"
    return ApiError(503, message, None, "gateway_unavailable", "service_unavailable_error", 1.0)
