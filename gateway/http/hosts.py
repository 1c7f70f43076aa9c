"""Answers to the names by which this server is known. A page of another site may have a name that leads here (DNS
rebinding): its browser takes this server for that site's own, and only `Host` says otherwise."""

import ipaddress
import re
import socket
from collections.abc import Collection, Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.errors import ApiError
from gateway.http.json_writer import refuse

# Nobody can register a name below these, nor one without a dot: they are of this machine, compose or a cluster.
_PRIVATE = (".localhost", ".local", ".internal", ".svc")
_OF_OPERATORS = frozenset({"/ready", "/metrics"})  # they need no key, and have addresses
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^:\[\]]*))(?::[0-9]*)?")


class KnownHosts:
    """Refuses requests whose `Host` is none of this server's with 421.

    Args:
        names: beyond those that no foreign page can have.
        everywhere: whether all paths are guarded, or those only that need no key and tell of this server."""

    def __init__(self, app: ASGIApp, names: Iterable[str], everywhere: bool) -> None:
        self._app, self._everywhere = app, everywhere
        self._names = {name.lower() for name in (*names, socket.gethostname())}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_guarded = scope["type"] != "lifespan" and (self._everywhere or scope["path"] in _OF_OPERATORS)
        hosts = Headers(scope=scope).getlist("host") if is_guarded else ()
        unknown = next((host for host in hosts if not is_known(host, self._names)), None)
        if unknown is None:
            await self._app(scope, receive, send)
            return
        name = unknown[:100]
        mend = "if it does, start it with --allowed-hosts=NAME (QUARTET_GATEWAY_ALLOWED_HOSTS)"
        message = f"this server does not know that it has the name {name!r}; {mend}"
        await refuse(ApiError(421, message, None, "unknown_host"), scope, receive, send)


def is_known(host: str, names: Collection[str]) -> bool:
    """Whether `host`, with a port or without, is one of `names`, or none that a page of another site can have."""
    match = _HOST.fullmatch(host.strip())
    if match is None:
        return False
    name = (match[1] or match[2]).lower().removesuffix(".")
    if name in names or "*" in names or "." not in name or name.endswith(_PRIVATE):
        return True
    try:
        ipaddress.ip_address(name)
        return True
    except ValueError:
        return any(parent.startswith("*.") and name.endswith(parent[1:]) for parent in names)
