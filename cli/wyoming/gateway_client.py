"""The gateway, asked by HTTP. What an iterator still waits for ends at the gateway when the iterator is closed."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from typing import Any

import httpx
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

from cli.http import TIMEOUT, address, message, socket_of

_OPEN_TIMEOUT_S = 10.0
Piece = tuple[int, bytes]
"""Samples a second, and mono PCM16 in whole samples."""


class RequestError(Exception):
    """A request fails. The text is for people.

    Attributes:
        code: the gateway's, or one of this program's: "unreachable", "invalid", "too_large", "unsupported".
    """

    def __init__(self, text: str, code: str) -> None:
        super().__init__(text)
        self.code = code


class GatewayClient:
    """To be closed by `close`."""

    def __init__(self, url: str, api_key: str | None) -> None:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.AsyncClient(base_url=url, timeout=TIMEOUT, headers=headers)
        self.url = address(self._http)

    async def close(self) -> None:
        await self._http.aclose()

    async def ready(self) -> bool:
        """Whether all stages are reached. Raises RequestError: the gateway is not."""
        with _reaching(self.url):
            return (await self._http.get("/ready")).is_success

    async def get(self, path: str) -> dict[str, Any]:
        """Raises RequestError."""
        async with self._answer("GET", path) as response:
            return json.loads(await response.aread())

    async def transcript(self, form: dict[str, str], wav: bytes) -> AsyncGenerator[dict[str, Any], None]:
        """Yields the events of POST /v1/audio/transcriptions. Raises RequestError."""
        request = {"data": {**form, "stream": "true"}, "files": {"file": ("sound.wav", wav)}}
        async with self._answer("POST", "/v1/audio/transcriptions", **request) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise _error(event)
                    yield event

    async def speech(self, body: dict[str, Any]) -> AsyncGenerator[Piece, None]:
        """Yields the sound of POST /v1/audio/speech. Raises RequestError."""
        body = {**body, "response_format": "pcm"}
        async with self._answer("POST", "/v1/audio/speech", json=body) as response:
            rate_hz = int(response.headers["x-quartet-sample-rate-hz"])
            async with aclosing(_whole_samples(response.aiter_bytes())) as blocks:
                async for block in blocks:
                    yield rate_hz, block

    async def speech_of(self, settings: dict[str, Any], texts: AsyncIterator[str]) -> AsyncGenerator[Piece, None]:
        """Yields the sound of texts that come meanwhile, by /v1/audio/speech/stream. Raises RequestError, and what
        `texts` raises."""
        url, headers = socket_of(self._http, "/v1/audio/speech/stream")
        config = {"type": "session.config", **settings, "response_format": "pcm"}
        try:
            async with connect(url, open_timeout=_OPEN_TIMEOUT_S, additional_headers=headers) as socket:
                await socket.send(json.dumps(config))
                sending = asyncio.create_task(_send(socket, texts))
                try:
                    rate_hz = (await _event(socket, "audio.start"))["sample_rate_hz"]
                    async with aclosing(_whole_samples(_sound(socket))) as blocks:
                        async for block in blocks:
                            yield rate_hz, block
                except ConnectionClosed:
                    if sending.done() and (error := sending.exception()):
                        raise error from None
                    raise
                finally:
                    sending.cancel()
                    await asyncio.wait([sending])
        except InvalidStatus as error:
            raise _refused(
                bytes(error.response.body or b""), f"{self.url}: status {error.response.status_code}"
            ) from None
        except (OSError, WebSocketException) as error:  # a TimeoutError is an OSError
            raise RequestError(f"{self.url}: {error or type(error).__name__}", "unreachable") from None

    @asynccontextmanager
    async def _answer(self, method: str, path: str, **request: Any) -> AsyncIterator[httpx.Response]:
        """A successful response, its body still to be read. Raises RequestError, also in the block."""
        with _reaching(self.url):
            async with self._http.stream(method, path, **request) as response:
                if not response.is_success:
                    raise _refused(await response.aread(), f"{self.url}{path}: status {response.status_code}")
                yield response


@contextmanager
def _reaching(url: str) -> Iterator[None]:
    try:
        yield
    except httpx.HTTPError as error:
        raise RequestError(f"{url}: {error or type(error).__name__}", "unreachable") from None


def _error(body: dict[str, Any]) -> RequestError:
    return RequestError(message(body), body["error"].get("code") or body["error"].get("type") or "refused")


def _refused(body: bytes, otherwise: str) -> RequestError:
    """`otherwise`: the text if the body is not this gateway's but a proxy's, or another program's."""
    try:
        return _error(json.loads(body))
    except (ValueError, KeyError, TypeError, AttributeError):
        return RequestError(otherwise, "refused")


async def _send(socket: ClientConnection, texts: AsyncIterator[str]) -> None:
    """Ends the connection if `texts` fails, and raises that."""
    try:
        with suppress(ConnectionClosed):
            async for text in texts:
                await socket.send(json.dumps({"type": "input.text", "text": text}))
            await socket.send(json.dumps({"type": "input.done"}))
    except RequestError:
        await socket.close()
        raise


async def _event(socket: ClientConnection, kind: str) -> dict[str, Any]:
    """The next event, which is a `kind`. Raises RequestError, ConnectionClosed."""
    event = json.loads(await socket.recv())
    if event["type"] == "error":
        raise _error(event)
    if event["type"] != kind:
        raise RequestError(f"the gateway sent {event['type']}, where {kind} comes", "refused")
    return event


async def _sound(socket: ClientConnection) -> AsyncGenerator[bytes, None]:
    """Binary messages until session.done. Raises RequestError, ConnectionClosed."""
    while True:
        received = await socket.recv()
        if isinstance(received, bytes):
            yield received
            continue
        event = json.loads(received)
        if event["type"] == "error":
            raise _error(event)
        if event["type"] == "session.done":
            return


async def _whole_samples(blocks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """PCM16 as it comes; half a sample waits for its other half."""
    rest = b""
    async for block in blocks:
        block = rest + block
        whole = len(block) // 2 * 2
        rest = block[whole:]
        if whole:
            yield block[:whole]
