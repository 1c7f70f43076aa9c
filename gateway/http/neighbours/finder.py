"""Passes requests about a call, or a Live session, on to the process that has it."""

import asyncio
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket
from websockets.asyncio.client import connect, unix_connect
from websockets.exceptions import InvalidStatus, WebSocketException

from gateway.errors import ApiError
from gateway.http.connection import key_of
from gateway.http.csrf import check_socket
from gateway.http.json_writer import error_response, refuse
from gateway.http.neighbours.neighbours import NeighbourGateways
from gateway.http.neighbours.node import Held, Node, call_gone, held_of
from gateway.http.neighbours.relay import relay
from gateway.http.sockets import counted_session
from gateway.store.clock import LEASE_S
from gateway.workers.worker import Worker

PASSED_ON = "x-quartet-passed-on"
"""A request that has it goes to no further gateway. A client that sends it gets what the gateway itself has."""

_CONNECT_S = 2.0  # a gateway of the same network that does not take a connection is gone
_ANSWER_S = LEASE_S  # one that stands still for longer has lost what it had
# The caller's own key: the gateway that has the call checks it, and whose the call is.
_KEYS = ("authorization", "api-key", "x-api-key")
_ANSWERED = ("content-type", "retry-after", "www-authenticate")


class HolderFinder:
    """Asks the process that an id names, if it is not this one. One that is not reached has nothing any more, and the
    request is served here: the process of calls may be one for several gateways.

    Args:
        own: this process.
        neighbours: other gateways; None: there are none.
        worker: this process among those of its gateway; None: it is the only one.
        has_calls: whether this gateway has a process of calls to ask.
    """

    def __init__(
        self, app: ASGIApp, own: Node, neighbours: NeighbourGateways | None, worker: Worker | None, has_calls: bool
    ) -> None:
        self._app, self._own, self._neighbours, self._worker = app, own, neighbours, worker
        self._has_calls = has_calls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_known = scope["type"] != "lifespan" and scope["client"] is not None  # None: a sibling has passed it on
        held = held_of(scope) if is_known else None
        if held is not None:
            scope["route"] = held  # its path is that of the log line
        try:
            at = None if held is None else await self._place_of(held, Headers(scope=scope))
            if at is not None and await self._pass_on(at, scope, receive, send):
                return
            if held is not None and held.is_call and not self._has_calls:
                raise call_gone(held.id)
        except ApiError as error:
            if scope["type"] == "http":
                await refuse(error, scope, receive, send)
            else:
                scope["state"]["log"].update(error.log)
                await WebSocket(scope, receive, send).send_denial_response(error_response(error))
            return
        await self._app(scope, receive, send)

    async def _place_of(self, held: Held, headers: Headers) -> str | Path | None:
        """URL of a gateway, or socket of a sibling; None: this process, or one that is gone. Raises ApiError."""
        if held.node.gateway == self._own.gateway:
            if held.is_call or held.node == self._own or self._worker is None:
                return None
            return self._worker.socket_of(held.node.worker) if held.node.worker < self._worker.count else None
        if self._neighbours is None or PASSED_ON in headers:
            return None
        try:
            return await self._neighbours.url_of(held.node.gateway)
        except ApiError:
            if held.is_call and self._has_calls:
                return None
            raise

    async def _pass_on(self, at: str | Path, scope: Scope, receive: Receive, send: Send) -> bool:
        """False: nobody is there, and the client has got nothing. Raises ApiError."""
        headers = _named(_KEYS, Headers(scope=scope))
        headers |= {PASSED_ON: "1", "x-request-id": scope["state"]["request_id"]}
        if scope["type"] == "websocket":
            return await _pass_socket_on(at, headers, WebSocket(scope, receive, send))
        answer = await _ask(at, scope["path"], headers)
        if answer is None:
            return False
        await Response(answer.content, answer.status_code, _named(_ANSWERED, answer.headers))(scope, receive, send)
        return True


async def _ask(at: str | Path, path: str, headers: dict[str, str]) -> httpx.Response | None:
    """None: nobody is there, or it has gone meanwhile."""
    transport = httpx.AsyncHTTPTransport(verify=False, uds=None if isinstance(at, str) else str(at))  # http alone
    timeout = httpx.Timeout(_ANSWER_S, connect=_CONNECT_S)
    try:
        async with httpx.AsyncClient(transport=transport, timeout=timeout, trust_env=False) as client:
            return await client.post(f"{_base(at)}{path}", headers=headers)
    except httpx.TransportError:
        return None


async def _pass_socket_on(at: str | Path, headers: dict[str, str], client: WebSocket) -> bool:
    """False: nobody is there. Raises ApiError: the client is refused here."""
    if key_of(client) is None:  # pages of other sites cannot send a key
        check_socket(client)
    query = client.scope["query_string"].decode("latin-1")
    address = f"{_base(at).replace('http', 'ws', 1)}{client.scope['path']}{'?' if query else ''}{query}"
    options: dict[str, Any] = {
        "additional_headers": headers,
        "subprotocols": client.scope.get("subprotocols") or None,  # a browser's has its key
        "user_agent_header": None,
        "compression": None,
        "open_timeout": _ANSWER_S,
        "ping_timeout": 60.0,
        "max_size": None,
    }
    with counted_session(client.app.state.gateway, None):  # its key's sessions are counted where the call is
        try:
            if isinstance(at, str):
                holder = await connect(address, sock=await _connected(at), **options)
            else:
                holder = await unix_connect(str(at), address, **options)
        except InvalidStatus as refused:
            answer = refused.response
            kept = _named(_ANSWERED, answer.headers)
            await client.send_denial_response(Response(bytes(answer.body or b""), answer.status_code, kept))
            return True
        except (OSError, WebSocketException):  # a TimeoutError is an OSError
            return False
        async with holder:
            await relay(client, holder)
    return True


async def _connected(url: str) -> socket.socket:
    """Raises OSError: nobody is there."""
    parts = urlsplit(url)
    place = (parts.hostname or "", parts.port or 80)
    connection = await asyncio.to_thread(socket.create_connection, place, _CONNECT_S)
    connection.setblocking(False)
    return connection


def _named(names: Iterable[str], headers: Mapping[str, str]) -> dict[str, str]:
    """Those of `headers` that have such a name."""
    return {name: headers[name] for name in names if name in headers}


def _base(at: str | Path) -> str:
    return at.rstrip("/") if isinstance(at, str) else "http://worker"
