"""WebSockets by uvicorn and websockets, with limits that they do not have."""

from asyncio import Event, Transport
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame

_MAX_FRAMES = 16_384  # of a message: each is an object, and empty ones have no bytes to count


class Stop:
    """The stop of the server, for a connection whose application ends it itself.

    Attributes:
        is_awaited: it does; others end at once, with 1012.
    """

    def __init__(self) -> None:
        self.is_awaited, self._event = False, Event()

    async def wait(self) -> None:
        self.is_awaited = True
        await self._event.wait()

    def begin(self) -> None:
        self._event.set()


class SocketProtocol(WebSocketsSansIOProtocol):
    """`left` is called when a connection is lost. The application finds a `Stop` in the state of its scope."""

    def __init__(self, *args: Any, left: Callable[[Transport], None], **options: Any) -> None:
        super().__init__(*args, **options)
        self._left, self._stop = left, Stop()

    async def run_asgi(self) -> None:
        self.scope.setdefault("state", {})["stop"] = self._stop
        await super().run_asgi()

    def shutdown(self) -> None:
        if self._stop.is_awaited and self.handshake_complete and not self.close_sent:
            self._stop.begin()
        else:
            super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        self._left(self.transport)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            # a line too long: websockets has its answer, and uvicorn waits for more
            self.handshake_initiated = self.handshake_complete = self.close_sent = True
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.transport.close()

    def handle_cont(self, event: Frame) -> None:
        if len(self.frames) >= _MAX_FRAMES:
            self.conn.fail(CloseCode.MESSAGE_TOO_BIG, f"more than {_MAX_FRAMES} frames")
            self.handle_parser_exception()
        else:
            super().handle_cont(event)
