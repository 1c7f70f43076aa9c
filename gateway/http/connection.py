"""Admission of requests, their owners, and streamed responses."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import ExitStack, aclosing, nullcontext
from types import MappingProxyType
from typing import Any, NoReturn, Protocol, Self, TypeVar

from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway import metrics
from gateway.access.api_key import ApiKey
from gateway.errors import ApiError, from_error
from gateway.http.json_writer import refuse, to_json
from gateway.tasks import cancel, first, limited
from services.common.errors import QueueFull

Result = TypeVar("Result")
CLIENT_CLOSED_REQUEST = 499  # nginx's status, for the log
DONE = b"data: [DONE]\n\n"  # ends a stream of a chat
SILENCE_S = 15.0  # of a stream at most; proxies end one after 60 s of it
_TICKS = 3  # in them; two without a piece are a silence. A time taken at each piece would cost each token
LAST_WORD_S = 5.0  # beyond the request's time, for a client to read the error that ends its stream


async def admitted(http: HTTPConnection) -> AsyncIterator[Any]:
    """Yields the gateway and holds a slot of it, and of the API key, until the response is sent.

    Sets `request.state.deadline`, in `time.monotonic()`, and `request.state.place`, the key's slot, for a job that
    outlives the request."""
    gateway = http.app.state.gateway
    http.state.deadline = time.monotonic() + gateway.settings.request_timeout_s
    key = key_of(http)
    place = nullcontext(ExitStack()) if key is None else key.request()
    try:
        # count the key's rate last: a request that the gateway refuses must not use it up
        with gateway.admission.admit(), place as http.state.place, metrics.RUNNING.track_inprogress():
            yield gateway
    except QueueFull as error:
        raise from_error("gateway", error) from None


def counted(http: HTTPConnection) -> None:
    """Counts a request that ends others for its key's rate: it needs no place, since the others may have all."""
    if (key := key_of(http)) is not None:
        key.count()


def key_of(http: HTTPConnection) -> ApiKey | None:
    """None: the gateway has no keys."""
    return getattr(http.state, "key", None)


def require_admin(http: HTTPConnection, what: str) -> Any:
    """The gateway. `what` begins the refusal, e.g. "adapters are". Raises ApiError: 403, no administrator."""
    gateway = http.app.state.gateway
    key = key_of(http)
    if key.entry.admin if key else gateway.settings.anonymous_admin:
        return gateway
    how = "a key whose entry has `admin: true`" if key else "API keys, or the gateway's --anonymous-admin=true"
    raise ApiError(403, f"{what} for administrators: this needs {how}", None, "admin_required")


def owner_of(http: HTTPConnection) -> str | None:
    """The API key's name; None without keys."""
    key = key_of(http)
    return key and key.name


def sse(data: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % to_json(data)  # one copy: an audio event has 80 KB


def named_sse(event: dict[str, Any]) -> bytes:
    """A server-sent event named by its type."""
    return b"event: " + event["type"].encode() + b"\n" + sse(event)


class ClientGone(Exception):
    """The client disconnected before its response was complete."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`. The body must have been read. Raises ClientGone: the client disconnected first."""
    return await first(work, _disconnect(receive))


async def _disconnect(receive: Receive) -> NoReturn:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientGone


class StreamedResponse(Response):
    """Sends a body piece by piece.

    The status line waits for the first piece, or for the first filler: a failure before it has its own status. A later
    one breaks the body off.

    Args:
        pieces: may raise ApiError.
        limit_s: of the work; the body is cut off a little later.
        status: of the answer, if no piece fails before it.
    """

    filler = b""  # is sent in a silence

    def __init__(
        self,
        pieces: AsyncGenerator[bytes, None],
        limit_s: float,
        media_type: str,
        headers: Mapping[str, str],
        status: int = 200,
    ) -> None:
        super().__init__(status_code=status, media_type=media_type, headers=headers)
        del self.headers["content-length"]
        self._pieces, self._limit_s = pieces, limit_s + LAST_WORD_S

    def last_word(self, error: ApiError) -> bytes | None:
        """The last piece of a failed body."""
        return None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._pieces), limited(self._limit_s, ClientGone()):
            await while_connected(receive, self._send(scope, receive, send))

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with _Body(send, self.status_code, self.raw_headers, self.filler) as body:
            try:
                async for piece in self._pieces:
                    body.pieces += 1  # what each piece costs is kept small: this is the path of a token
                    if body.filling or not body.started:
                        await body.begin()
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            except ApiError as error:
                if not body.started:
                    await refuse(error, scope, receive, send)
                    return
                scope.get("state", {}).get("log", {}).update(error.log)
                if (last := self.last_word(error)) is None:
                    return
                await body.begin()
                await send({"type": "http.response.body", "body": last, "more_body": True})
            await body.begin()
            await send({"type": "http.response.body", "body": b""})


class _Body:
    """Sends `filler` before a silence lasts `SILENCE_S`, and the status line before it.

    Attributes:
        pieces: that were there so far.
        filling: what sends the filler, until the next piece.
        is_awaited: whether a piece is there, and waits for `filling`: no other filler goes before it.
    """

    def __init__(self, send: Send, status: int, headers: Sequence[tuple[bytes, bytes]], filler: bytes) -> None:
        self.started, self.pieces, self.filling = False, 0, list[asyncio.Task[None]]()
        self.is_awaited = False
        self._send, self._status, self._headers, self._filler = send, status, headers, filler
        self._loop = asyncio.get_running_loop()

    async def __aenter__(self) -> Self:
        self._timer = self._next(0, 0) if self._filler else None
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
            await cancel(*self.filling)

    async def begin(self) -> None:
        """Waits until the next piece may be sent."""
        if self.filling:
            self.is_awaited = True
            await asyncio.gather(*self.filling, return_exceptions=True)
            self.filling, self.is_awaited = [], False
        if not self.started:
            await self._start()

    async def _start(self) -> None:
        self.started = True
        await self._send({"type": "http.response.start", "status": self._status, "headers": self._headers})

    async def _fill(self) -> None:
        if not self.started:
            await self._start()
        await self._send({"type": "http.response.body", "body": self._filler, "more_body": True})

    def _tick(self, pieces: int, silent_ticks: int) -> None:
        silent_ticks = silent_ticks + 1 if pieces == self.pieces else 0
        is_read = not self.is_awaited and all(task.done() for task in self.filling)
        if silent_ticks >= _TICKS - 1 and is_read:
            self.filling, silent_ticks = [asyncio.create_task(self._fill())], 0
        self._timer = self._next(self.pieces, silent_ticks)

    def _next(self, pieces: int, silent_ticks: int) -> asyncio.TimerHandle:
        return self._loop.call_later(SILENCE_S / _TICKS, self._tick, pieces, silent_ticks)


async def drain(events: AsyncGenerator[Any, None]) -> None:
    """Waits for the end of what is sent in one piece."""
    async with aclosing(events):
        async for _ in events:
            pass


class Run(Protocol):
    """The work on a request. Raises ApiError."""

    def stream(self) -> AsyncGenerator[bytes, None]:
        """Yields server-sent events."""
        ...

    async def whole(self) -> Response: ...


async def respond(http: Request, run: Run, streams: bool | None) -> Response:
    """The response of an `admitted` request, whose body was read. Raises ApiError; ClientGone."""
    http.state.log["stream"] = bool(streams)
    if streams:
        return EventStream(run.stream(), max(0.0, http.state.deadline - time.monotonic()))
    return await while_connected(http.receive, run.whole())


class EventStream(StreamedResponse):
    """Sends server-sent events, and comments in a silence. A late failure becomes the last event."""

    filler = b": waiting\n\n"

    def __init__(
        self, events: AsyncGenerator[bytes, None], limit_s: float, headers: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no", **headers}
        super().__init__(events, limit_s, "text/event-stream", headers)

    def last_word(self, error: ApiError) -> bytes:
        return sse(error.body())
