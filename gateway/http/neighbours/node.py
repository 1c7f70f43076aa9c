"""Which process holds a call or a Live session: its id says so."""

import re
from dataclasses import dataclass
from typing import Self

from starlette.requests import HTTPConnection
from starlette.types import Scope

from gateway.access.client_secrets import AZURE_CALLS_PATH, AZURE_PATH, CALLS_PATH, LIVE_PATHS, PATH
from gateway.errors import ApiError

_NAME_DIGITS = 12  # of a gateway; nobody needs to guess it, and two do not have the same
_HELD = re.compile(rf"(rtc|live)_([0-9a-f]{{{_NAME_DIGITS}}})([0-9a-f]{{2}})_[0-9a-f]+")
_CALLS = "|".join((CALLS_PATH, AZURE_CALLS_PATH, *LIVE_PATHS))
_ENDS = re.compile(rf"(?:{_CALLS})/([^/]+)/hangup")
_ATTACHES = re.compile(rf"(?:{'|'.join(LIVE_PATHS)})/([^/]+)/attach")


@dataclass(frozen=True)
class Node:
    """A process of a gateway.

    Attributes:
        gateway: its name in ids, hexadecimal.
        worker: number of the process, from 0 to 255.
    """

    gateway: str
    worker: int = 0

    @classmethod
    def of(cls, gateway: str, worker: int) -> Self:
        """`gateway`: a longer name, hexadecimal and random."""
        return cls(gateway[:_NAME_DIGITS], worker)

    def __str__(self) -> str:
        """As in ids: rtc_NODE_..., live_NODE_..."""
        return f"{self.gateway}{self.worker:02x}"


@dataclass(frozen=True)
class Held:
    """What a request is about: a call, which any process of its gateway reaches, or a Live session.

    Attributes:
        path: of the request's route, for logs and metrics.
    """

    id: str
    path: str
    is_call: bool
    node: Node


def held_of(scope: Scope) -> Held | None:
    """None: the request is about neither, or the id does not say where it is."""
    found, path = _id_in(scope)
    if (match := _HELD.fullmatch(found)) is None:
        return None
    route = path.replace(found, "{call_id}" if "/calls/" in path else "{session_id}")
    return Held(found, route, match[1] == "rtc", Node(match[2], int(match[3], 16)))


def call_gone(call_id: str) -> ApiError:
    message = f"there is no call {call_id[:64]!r}; it may have ended, or its gateway is gone"
    return ApiError(404, message, "call_id", "call_id_not_found")


def _id_in(scope: Scope) -> tuple[str, str]:
    """(id, path); ("", path): it names nothing."""
    path: str = scope["path"]
    if scope["type"] == "websocket":
        if path in (PATH, AZURE_PATH):
            return HTTPConnection(scope).query_params.get("call_id", ""), path
        found = _ATTACHES.fullmatch(path)
    else:
        found = _ENDS.fullmatch(path) if scope["method"] == "POST" else None
    return (found[1] if found else ""), path
