"""Keeps other sites' pages away from a server without API keys, but those that its settings allow."""

from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from gateway.errors import ApiError
from gateway.http.json_writer import refuse

_SAFE_METHODS = {"GET", "HEAD", "OPTIONS"}  # they change nothing, and browsers hide the answers from such pages
_OWN_SITES = {"same-origin", "none"}  # none: the user's own doing, e.g. a bookmark


class OwnPagesOnly:
    """Refuses a browser's request for a page of another origin with 403.

    Needless with API keys, which such pages do not have."""

    def __init__(self, app: ASGIApp, allowed: Collection[str]) -> None:
        self._app, self._allowed = app, allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in _SAFE_METHODS or _is_own(Headers(scope=scope), self._allowed):
            await self._app(scope, receive, send)
            return
        origin = Headers(scope=scope).get("origin", "another site")
        message = f"a page of {origin} may not use this server; {_mend(origin)}"
        await refuse(ApiError(403, message, None, "foreign_origin"), scope, receive, send)


def _mend(origin: str) -> str:
    return f"call it from that site's own server, or start this one with --allowed-origins={origin}"


def _is_own(headers: Headers, allowed: Collection[str]) -> bool:
    if _is_allowed(headers, allowed):
        return True
    if (site := headers.get("sec-fetch-site")) is not None:  # the browser's own word: proxies do not change it
        return site in _OWN_SITES
    return _is_of_host(headers)  # browsers send no sec-fetch-site without TLS, except to localhost


def _is_allowed(headers: Headers, allowed: Collection[str]) -> bool:
    return headers.get("origin") in allowed or "*" in allowed


def _is_of_host(headers: Headers) -> bool:
    origin = headers.get("origin")
    return origin is None or urlsplit(origin).netloc == headers.get("host")


def check_socket(socket: WebSocket) -> None:
    """Raises ApiError: 403, the WebSocket of another site's page, which browsers connect anywhere."""
    allowed = socket.app.state.gateway.settings.allowed_origins
    if not _is_of_host(socket.headers) and not _is_allowed(socket.headers, allowed):
        origin = socket.headers["origin"]
        message = f"a page of {origin} may not use this server from a browser; {_mend(origin)}"
        raise ApiError(403, message, None, "foreign_origin")
