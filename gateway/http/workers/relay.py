"""Relays a WebSocket to another process."""

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from starlette import status
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.asyncio.client import ClientConnection, unix_connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from gateway.tasks import first

_OPEN_S = 60.0  # a handshake of a process that is busy
_OF_HANDSHAKE = (b"host", b"sec-websocket-")  # headers that a client makes itself


async def relay(
    to: Path, target: str, headers: Sequence[tuple[bytes, bytes]], scope: Scope, receive: Receive, send: Send
) -> None:
    """Passes messages on between the client and the process behind the socket `to` until one of both closes.

    Args:
        target: path and query.
        headers: of the client.
    """
    client = WebSocket(scope, receive, send)
    texts = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers if _is_passed_on(name)]
    offered, host = scope.get("subprotocols") or None, client.headers.get("host", "worker")
    opening = unix_connect(
        str(to),
        f"ws://{host}{target}",
        additional_headers=texts,
        subprotocols=offered,
        user_agent_header=None,
        compression=None,
        open_timeout=_OPEN_S,
        ping_interval=None,
        max_size=None,
    )
    try:
        async with opening as sibling:
            await exchange(client, sibling)
    except InvalidStatus:  # e.g. an unknown API key
        await client.close()
    except OSError:
        await client.accept()
        await client.close(status.WS_1013_TRY_AGAIN_LATER, "the gateway's process that keeps this is starting anew")


async def exchange(client: WebSocket, other: ClientConnection) -> None:
    """Accepts the client and passes messages on between both until one closes. The client is then told why; who has
    opened `other` closes it."""
    assert other.response is not None, "an open connection was answered"
    own_id = other.response.headers.get("x-request-id", "")
    try:
        await client.accept(other.subprotocol, [(b"x-request-id", own_id.encode())])
        await first(_from_client(client, other), _to_client(client, other))
    except ConnectionClosed as closed:
        if closed.rcvd is None:
            await client.close(status.WS_1011_INTERNAL_ERROR, "the process that had this is gone")
        else:
            await client.close(closed.rcvd.code, closed.rcvd.reason)
    except WebSocketDisconnect:
        pass


def _is_passed_on(name: bytes) -> bool:
    return not name.startswith(_OF_HANDSHAKE)


async def _from_client(client: WebSocket, sibling: ClientConnection) -> NoReturn:
    """Raises WebSocketDisconnect; ConnectionClosed."""
    while True:
        message = await client.receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code", status.WS_1001_GOING_AWAY))
        text = message.get("text")
        await sibling.send(message["bytes"] if text is None else text)


async def _to_client(client: WebSocket, sibling: ClientConnection) -> NoReturn:
    """Raises WebSocketDisconnect; ConnectionClosed."""
    while True:
        message = await sibling.recv()
        await (client.send_text(message) if isinstance(message, str) else client.send_bytes(message))
