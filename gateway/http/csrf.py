"""Keeps other sites' pages away from a server without API keys."""

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

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in _SAFE_METHODS or _is_own(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        origin = Headers(scope=scope).get("origin", "another site")
        message = f"a page of {origin} may not use this server; call it from that site's own server"
        await refuse(ApiError(403, message, None, "foreign_origin"), scope, receive, send)


def _is_own(headers: Headers) -> bool:
    if (site := headers.get("sec-fetch-site")) is not None:  # the browser's own word: proxies do not change it
        return site in _OWN_SITES
    return _is_of_host(headers)  # browsers send no sec-fetch-site without TLS, except to localhost


def _is_of_host(headers: Headers) -> bool:
    origin = headers.get("origin")
    return origin is None or urlsplit(origin).netloc == headers.get("host")


def check_socket(socket: WebSocket) -> None:
    """Raises ApiError: 403, the WebSocket of another site's page, which browsers connect anywhere."""
    if not _is_of_host(socket.headers):
        message = f"a page of {socket.headers['origin']} may not use this server from a browser"
        raise ApiError(403, message, None, "foreign_origin")
