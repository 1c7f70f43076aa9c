"""A client connection of /v1/realtime."""

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

from cli.http import ServerError, address, message, model_that, socket_of

_OPEN_TIMEOUT_S = 10.0


class Connection:
    def __init__(self, socket: ClientConnection, url: str) -> None:
        self._socket, self._url = socket, url
        self._error = ""

    async def send(self, event: dict[str, Any]) -> None:
        """A closed connection drops the event, and `event` raises."""
        with contextlib.suppress(ConnectionClosed):
            await self._socket.send(json.dumps(event))

    async def event(self) -> dict[str, Any]:
        """Raises ServerError: the server ended the session."""
        try:
            event = json.loads(await self._socket.recv())
        except ConnectionClosed as error:
            code = error.rcvd.code if error.rcvd else 1006
            raise ServerError(self._error or f"{self._url}: the server broke off (close code {code})") from None
        self._error = message(event) if event["type"] == "error" else ""
        return event

    async def begin(self, session: dict[str, Any]) -> dict[str, Any]:
        """Returns the effective session. Raises ServerError."""
        await self.send({"type": "session.update", "session": session})
        while True:
            event = await self.event()
            if event["type"] == "error":
                raise ServerError(message(event))
            if event["type"] == "session.updated":
                return event["session"]


@contextlib.asynccontextmanager
async def opened(client: httpx.Client, model: str) -> AsyncIterator[Connection]:
    """Raises ServerError."""
    url, headers = socket_of(client, "/v1/realtime")
    try:
        async with connect(
            f"{url}?{httpx.QueryParams(model=model)}",
            open_timeout=_OPEN_TIMEOUT_S,
            additional_headers=headers,
            compression=None,  # sound in base64: costs much, saves little
            max_size=None,
        ) as socket:
            yield Connection(socket, address(client))
    except InvalidStatus as error:
        status = error.response.status_code
        raise ServerError(f"{address(client)} has no /v1/realtime: status {status}") from None
    except (TimeoutError, OSError, WebSocketException) as error:
        raise ServerError(f"{address(client)}: {error or type(error).__name__}") from None


def model_that_converses(client: httpx.Client, *, speaks: bool) -> str:
    """Raises ServerError: there is none."""
    output, does = ("audio", "hears and speaks") if speaks else ("text", "hears and writes")

    def fits(facts: dict[str, Any]) -> bool:
        return "audio" in (facts.get("input_modalities") or ()) and output in (facts.get("output_modalities") or ())

    return model_that(client, does, fits)
