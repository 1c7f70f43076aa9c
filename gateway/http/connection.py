"""The places that requests take, their connections and streams; work ends when the client is gone."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping
from contextlib import ExitStack, aclosing, nullcontext
from typing import Any, TypeVar

from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway import metrics
from gateway.access.api_keys import ApiKey
from gateway.errors import ApiError, from_error
from gateway.http.json_writer import error_response, to_json
from services.common.rpc.errors import QueueFull

Result = TypeVar("Result")
CLIENT_CLOSED_REQUEST = 499  # nginx's status, for the log
DONE = b"data: [DONE]\n\n"  # ends a stream of a chat
LAST_WORD_S = 5.0  # beyond the request's time, for a client to read the error that ends its stream


async def admitted(http: HTTPConnection) -> AsyncIterator[Any]:
    """The gateway. Holds one of its places, and one of the API key's, until the response is sent or the client is gone.

    `request.state.deadline` is the `time.monotonic()` at which the request's time is over. `request.state.place` is the
    key's, for what the request starts and leaves running to take along; without keys it holds nothing.
    """
    gateway = http.app.state.gateway
    http.state.deadline = time.monotonic() + gateway.settings.request_timeout_s
    key = key_of(http)
    place = nullcontext(ExitStack()) if key is None else key.request()
    try:
        # the key's rate is counted last: what the gateway refuses does not use it up
        with gateway.admission.admit(), place as http.state.place, metrics.RUNNING.track_inprogress():
            yield gateway
    except QueueFull as error:
        raise from_error("gateway", error) from None


def key_of(http: HTTPConnection) -> ApiKey | None:
    """The API key that the request came with; None where there are no keys."""
    return getattr(http.state, "key", None)


def require_admin(http: HTTPConnection, what: str) -> Any:
    """The gateway, for an administrator.

    Args:
        what: is for administrators alone, e.g. "adapters are".

    Raises:
        ApiError: 403, the request is no administrator's.
    """
    gateway = http.app.state.gateway
    key = key_of(http)
    if key.entry.admin if key else gateway.settings.anonymous_admin:
        return gateway
    how = "a key whose entry has `admin: true`" if key else "API keys, or the gateway's --anonymous-admin=true"
    raise ApiError(403, f"{what} for administrators: this needs {how}", None, "admin_required")


def owner_of(http: HTTPConnection) -> str | None:
    """Whose videos and voices the request is about: those made with its API key; all, where there are no keys."""
    key = key_of(http)
    return key and key.name


def sse(data: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: %b\n\n" % to_json(data)  # one copy: an event of sound has 80 KB


def named_sse(event: dict[str, Any]) -> bytes:
    """A server-sent event that is named by its type, as most of OpenAI's are."""
    return b"event: " + event["type"].encode() + b"\n" + sse(event)


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


class StreamedResponse(Response):
    """A body that is sent as it is made. The status line waits for its first bytes, so that a request which fails
    before them gets a proper error status; after them the body breaks off.

    Args:
        pieces: yields the body; may raise ApiError.
        limit_s: a client that has not read the body to its end by then counts as gone.
        media_type: of the body.
        headers: beside it.
    """

    def __init__(
        self, pieces: AsyncGenerator[bytes, None], limit_s: float, media_type: str, headers: Mapping[str, str]
    ) -> None:
        super().__init__(media_type=media_type, headers=headers)
        del self.headers["content-length"]
        self._pieces, self._limit_s = pieces, limit_s

    def last_word(self, error: ApiError) -> bytes | None:
        """What ends a body that fails after its first bytes; None: nothing, the client sees that it is cut short."""
        return None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._pieces):
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
            async for piece in self._pieces:
                if not started:
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    started = True
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except ApiError as error:
            scope.get("state", {}).get("log", {}).update(error.log)
            if not started:
                await error_response(error)(scope, receive, send)
                return
            if (last := self.last_word(error)) is None:
                return
            await send({"type": "http.response.body", "body": last, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class EventStream(StreamedResponse):
    """A stream of server-sent events. A failure after the first of them is sent as an event of its own, and ends it."""

    def __init__(self, events: AsyncGenerator[bytes, None], limit_s: float) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(events, limit_s, "text/event-stream", headers)

    def last_word(self, error: ApiError) -> bytes:
        """The error's event."""
        return sse(error.body())
