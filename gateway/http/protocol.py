"""HTTP/1 by uvicorn and httptools, for clients that they do not understand."""

from typing import Any

import httptools
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

_OFFER = (b"upgrade", b"http2-settings")  # headers, and what `Connection` says of them


class Protocol(HttpToolsProtocol):
    """Ignores offers of other protocols than WebSocket, which RFC 9110 allows: the JDK's client offers h2c.

    Responses to HTTP/1.0 have no chunks: they end with the connection."""

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as stopped:  # behind the headers
                if self._should_upgrade():
                    self.handle_websocket_upgrade()
                    return
                if self.parser.get_method() == b"CONNECT":
                    self.send_400_response("This server is no proxy.")
                    return
                data = self._without_offer() + data[stopped.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
            except httptools.HttpParserError:
                self.send_400_response("Invalid HTTP request received.")
                return

    def on_headers_complete(self) -> None:
        if not self.parser.should_upgrade() or self._should_upgrade():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

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
