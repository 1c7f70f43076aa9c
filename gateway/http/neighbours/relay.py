"""Relays a WebSocket to another process."""

from typing import NoReturn

from starlette import status
from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from gateway.tasks import first


async def relay(client: WebSocket, other: ClientConnection) -> None:
    """Accepts the client and passes messages on between both until one closes. The client then gets the reason; who has
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


async def _from_client(client: WebSocket, other: ClientConnection) -> NoReturn:
    """Raises WebSocketDisconnect; ConnectionClosed."""
    while True:
        message = await client.receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code", status.WS_1001_GOING_AWAY))
        text = message.get("text")
        await other.send(message["bytes"] if text is None else text)


async def _to_client(client: WebSocket, other: ClientConnection) -> NoReturn:
    """Raises WebSocketDisconnect; ConnectionClosed."""
    while True:
        message = await other.recv()
        await (client.send_text(message) if isinstance(message, str) else client.send_bytes(message))
