"""HTTP/1 by uvicorn and httptools, for clients that they do not understand, and with limits that they do not have."""

import asyncio
from functools import partial
from http import HTTPStatus
from typing import Any

import httptools
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from gateway.http.open_connections import OpenConnections, with_files
from gateway.http.socket_protocol import SocketProtocol
from gateway.settings import GatewaySettings

MAX_TARGET_BYTES = 8 * 1024
MAX_HEAD_BYTES = 64 * 1024  # target and headers
MAX_HEADERS = 200
_MAX_PIPELINED = 16  # requests that wait for the answer to the one before them
_OFFER = (b"upgrade", b"http2-settings")  # headers, and what `Connection` says of them
_LEAST_BYTES_PER_S = 1024  # of a body
_TOO_LONG = HTTPStatus.REQUEST_URI_TOO_LONG, f"The request's target has more than {MAX_TARGET_BYTES} bytes."
_TOO_LARGE = (
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    f"The headers have more than {MAX_HEAD_BYTES} bytes, or are more than {MAX_HEADERS}.",
)
_HEAD_TOO_LATE = HTTPStatus.REQUEST_TIMEOUT, "The request's headers took too long to arrive."
_BODY_TOO_LATE = HTTPStatus.REQUEST_TIMEOUT, "The request's body took too long to arrive; send it faster."
_TOO_MANY_WAIT = HTTPStatus.TOO_MANY_REQUESTS, "Too many requests wait on this connection."
_TOO_MANY = (
    HTTPStatus.SERVICE_UNAVAILABLE,
    "Your address has too many connections with requests here, or the server has; try again later.",
)


def protocols(settings: GatewaySettings) -> dict[str, Any]:
    """uvicorn's options `http` and `ws`."""
    connections = OpenConnections(with_files(settings.max_connections), settings.max_connections_of_address)
    limits = {"head_s": settings.head_timeout_s, "body_s": settings.body_timeout_s}
    return {
        "http": partial(Protocol, connections=connections, stall_s=settings.request_timeout_s, **limits),
        "ws": partial(SocketProtocol, left=connections.leave),
    }


class Protocol(HttpToolsProtocol):
    """Ignores offers of other protocols than WebSocket, which RFC 9110 allows: the JDK's client offers h2c.

    Responses to HTTP/1.0 have no chunks: they end with the connection.

    No head of a request is without end: uvicorn and httptools count neither its bytes nor its time.

    Args:
        head_s: from a request's first byte to the end of its headers.
        body_s: from there to the end of the body, also after its answer; and 1 s for each KiB of it.
        stall_s: how long a client may read nothing of an answer."""

    def __init__(
        self, *args: Any, connections: OpenConnections, head_s: float, body_s: float, stall_s: float, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self._open, self._head_s, self._body_s, self._stall_s = connections, head_s, body_s, stall_s
        self._refusal = HTTPStatus.BAD_REQUEST, "Invalid HTTP request received."
        self._silent_bytes, self._is_silent = 0, False  # no part of a request has ended in them
        self._head_timer: asyncio.TimerHandle | None = None
        self._body_timer: asyncio.TimerHandle | None = None
        self._body_began, self._body_bytes = 0.0, 0
        self._stall_timer: asyncio.TimerHandle | None = None
        self._in_head = self._in_body = self._is_socket = False
        self._running: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.client is not None and not self._open.enter(transport, self.client[0], self._is_idle):
            self._refuse(*_TOO_MANY)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        self._open.leave(self.transport)
        self._unset_keepalive_if_required()
        for timer in (self._head_timer, self._body_timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        if self._running is not None:  # uvicorn tells the last request only, which may wait behind this one
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_timer = self.loop.call_later(self._stall_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        size = len(data)
        self._is_silent = True
        while data:
            try:
                self.parser.feed_data(data)
                break
            except httptools.HttpParserUpgrade as stopped:  # behind the headers
                if self._should_upgrade():
                    self.handle_websocket_upgrade()
                    return
                if self.parser.get_method() == b"CONNECT":
                    self._refuse(HTTPStatus.BAD_REQUEST, "This server is no proxy.")
                    return
                data = self._without_offer() + data[stopped.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
            except httptools.HttpParserError:
                self._refuse(*self._refusal)
                return
        self._count(size)

    def _count(self, size: int) -> None:
        """Counts parsed bytes, if no part of a request ended with them, and begins the time of what follows."""
        self._silent_bytes = self._silent_bytes + size if self._is_silent else 0
        if self._silent_bytes > MAX_HEAD_BYTES:
            self._refuse(*(_TOO_LONG if self._in_head and len(self.url) > MAX_TARGET_BYTES else _TOO_LARGE))
        elif self._in_head and self._head_timer is None:
            self._head_timer = self.loop.call_later(self._head_s, self._refuse, *_HEAD_TOO_LATE)
        elif self._in_body and self._body_timer is None:
            self._body_began = self.loop.time()
            self._body_timer = self.loop.call_later(self._body_s, self._check_body)

    def _check_body(self) -> None:
        left_s = self._body_began + self._body_s + self._body_bytes / _LEAST_BYTES_PER_S - self.loop.time()
        if left_s > 0:
            self._body_timer = self.loop.call_later(left_s, self._check_body)
        else:
            self._refuse(*_BODY_TOO_LATE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._unset_keepalive_if_required()
        self._in_head, self._is_silent = True, False
        if len(self.pipeline) >= _MAX_PIPELINED:
            self._stop(*_TOO_MANY_WAIT)

    def on_headers_complete(self) -> None:
        self._unset_keepalive_if_required()
        self._in_head, self._is_silent, self._in_body, self._body_bytes = False, False, True, 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        if len(self.url) > MAX_TARGET_BYTES:
            self._stop(*_TOO_LONG)
        if (
            len(self.headers) > MAX_HEADERS
            or sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD_BYTES
        ):
            self._stop(*_TOO_LARGE)
        if not self.parser.should_upgrade() or self._should_upgrade():
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._is_silent = False
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_silent, self._in_body = False, False
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def handle_websocket_upgrade(self) -> None:
        self._is_socket = True
        super().handle_websocket_upgrade()

    def _is_idle(self) -> bool:
        return not self._is_socket and not self.pipeline and (self.cycle is None or self.cycle.response_complete)

    def _stop(self, status: HTTPStatus, message: str) -> None:
        """Ends the parsing, in which this runs."""
        self._refusal = status, message
        raise httptools.HttpParserCallbackError(message)

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        """Closes the connection, with an answer unless another one has begun."""
        if self._running is None or self._running.response_complete or not self._running.response_started:
            headers = f"content-type: text/plain\r\ncontent-length: {len(message)}\r\nconnection: close\r\n"
            self.transport.write(STATUS_LINE[status] + f"{headers}\r\n{message}".encode("ascii"))
        self.transport.close()

    def _without_offer(self) -> bytes:
        """The request's line and headers."""
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            if name == b"connection":
                value = b",".join(each for each in value.split(b",") if each.strip().lower() not in _OFFER)
            if name not in _OFFER:
                lines.append(name + b": " + value)
        return b"\r\n".join([*lines, b"", b""])

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        plain: Any = _Unchunked(cycle, app) if cycle.scope["http_version"] == "1.0" else app
        super()._start_asgi_task(cycle, plain)


class _Unchunked:
    """`app`, whose response in `cycle` is sent as it is."""

    def __init__(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._cycle, self._app = cycle, app
        cycle.chunked_encoding = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_plain(message: Message) -> None:
            self._cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, send_plain)
