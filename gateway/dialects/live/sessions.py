"""The Live sessions that are open in this process."""

from collections.abc import Iterator
from contextlib import contextmanager

from starlette.requests import HTTPConnection

from gateway.dialects.live.handler import LiveHandler
from gateway.errors import ApiError
from gateway.http.connection import key_of


class LiveSessions:
    def __init__(self) -> None:
        self._open: dict[str, tuple[str, LiveHandler]] = {}  # (hash of the key, session), by id

    def __len__(self) -> int:
        return len(self._open)

    @property
    def handlers(self) -> list[LiveHandler]:
        return [handler for _, handler in self._open.values()]

    @contextmanager
    def opened(self, handler: LiveHandler, http: HTTPConnection) -> Iterator[None]:
        """The session of the connection's key is open."""
        self._open[handler.id] = _owner(http), handler
        try:
            yield
        finally:
            del self._open[handler.id]

    def find(self, session_id: str, http: HTTPConnection) -> LiveHandler:
        """Raises ApiError: 404, there is no such session of the connection's key."""
        owner, handler = self._open.get(session_id, ("", None))
        if handler is None or owner != _owner(http):
            message = "no session of that id is open; it may have ended, or its gateway is gone"
            raise ApiError(404, message, "session_id", "session_not_found")
        return handler


def _owner(http: HTTPConnection) -> str:
    key = key_of(http)
    return "" if key is None else key.entry.sha256
