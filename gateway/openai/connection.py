"""The places that requests take, their connections and streams; work ends when the client is gone."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import ExitStack, aclosing, nullcontext
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway import metrics
from gateway.api_keys import ApiKey
from gateway.errors import ApiError, from_error
from gateway.gateway import Gateway
from services.common.rpc.errors import QueueFull

Result = TypeVar("Result")
CLIENT_CLOSED_REQUEST = 499  # nginx's status, for the log
DONE = b"data: [DONE]\n\n"  # ends a stream of a chat
LAST_WORD_S = 5.0  # beyond the request's time, for a client to read the error that ends its stream


async def admitted(http: Request) -> AsyncIterator[Gateway]:
    """Holds one of the gateway's places, and one of the API key's, until the response is sent or the client is gone.

    `request.state.deadline` is the `time.monotonic()` at which the request's time is over. `request.state.place` is the
    key's, for what the request starts and leaves running to take along; without keys it holds nothing.
    """
    gateway: Gateway = http.app.state.gateway
    http.state.deadline = time.monotonic() + gateway.settings.request_timeout_s
    key = key_of(http)
    place = nullcontext(ExitStack()) if key is None else key.request()
    try:
        # the key's rate is counted last: what the gateway refuses does not use it up
        with gateway.admission.admit(), place as http.state.place, metrics.RUNNING.track_inprogress():
            yield gateway
    except QueueFull as error:
        raise from_error("gateway", error) from None


def key_of(http: Request) -> ApiKey | None:
    """The API key that the request came with; None where there are no keys."""
    return getattr(http.state, "key", None)


def sse(data: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class ClientGone(Exception):
    """The client closed the connection before its response was complete."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled as soon as the client disconnects. The body must have been read.

    Raises:
        ClientGone: the client disconnected first.
    """
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.shield(asyncio.gather(working, gone, return_exceptions=True))


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A stream of server-sent events. The status line waits for the first of them, so that a request which fails before
    it gets a proper error status; a later failure is sent as an event of its own, and ends the stream.

    Args:
        events: yields encoded events; may raise ApiError.
        limit_s: a client that has not read the stream to its end by then counts as gone.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], limit_s: float) -> None:
        super().__init__(
            media_type="text/event-stream", headers={"cache-control": "no-cache", "x-accel-buffering": "no"}
        )
        del self.headers["content-length"]
        self._events, self._limit_s = events, limit_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            try:
                async with asyncio.timeout(self._limit_s) as limit:
                    await while_connected(receive, self._send(scope, receive, send))
            except TimeoutError:
                if not limit.expired():
                    raise
                raise ClientGone from None

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        try:
            async for event in self._events:
                if not started:
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    started = True
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except ApiError as error:
            scope.get("state", {}).get("log", {}).update(error.log)
            if not started:
                await error.response()(scope, receive, send)
                return
            await send({"type": "http.response.body", "body": sse(error.body()), "more_body": True})
        await send({"type": "http.response.body", "body": b""})
