"""Client secrets: short-lived keys for realtime connections and for requests that answers follow from alone."""

import json
import secrets
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import HTTPConnection
from starlette.types import Scope

from gateway.access.api_keys import ApiKey, bearer_of, digest
from gateway.access.shared import SharedState
from gateway.errors import ApiError, invalid

PATH = "/v1/realtime"
CALLS_PATH = f"{PATH}/calls"
AZURE_PATH = "/openai/v1/realtime"  # where Azure's clients look for it
AZURE_CALLS_PATH = f"{AZURE_PATH}/calls"
LIVE_PATHS = ("/v1/live/sessions", "/openai/v1/live/sessions")
SUBPROTOCOL = "realtime"  # the subprotocol that the server accepts
_KEY_SUBPROTOCOL = "openai-insecure-api-key."
PREFIX = "ek_"
# What a secret opens for its API key. It lists, keeps and removes nothing of the key's.
_SOCKETS = {PATH, AZURE_PATH, *LIVE_PATHS, "/v1/audio/speech/stream"}
_POSTS = {
    *("/v1/chat/completions", "/v1/completions", "/v1/images/generations", "/v1/images/edits", "/v1/messages"),
    *(CALLS_PATH, AZURE_CALLS_PATH, LIVE_PATHS[0]),
    *(f"/v1/audio/{name}" for name in ("speech", "transcriptions", "translations", "generations")),
}
_RANDOM_BYTES = 32
_MAX_SECRETS, _MAX_SECRETS_PER_KEY = 10_000, 1000
_MAX_CONFIG_BYTES = 256 * 1024  # of one session, as JSON
_MAX_HELD_BYTES = 64 * 1024 * 1024  # of all
_MAX_HELD_PER_KEY = _MAX_HELD_BYTES // 16
_RETRY_S = 10.0


@dataclass(frozen=True)
class ClientSecret:
    """The rights of a client secret.

    Attributes:
        expires_at: Unix time in seconds.
        key_sha256: of the API key that made it, without which it is void; "" without keys.
        session_json: members of the session.
    """

    expires_at: int
    key_sha256: str
    session_json: str

    @property
    def session(self) -> dict[str, Any]:
        return json.loads(self.session_json)


class ClientSecrets:
    """The secrets that have not expired; `now` is Unix time in seconds."""

    def __init__(self, shared: SharedState | None = None, now: Callable[[], float] = time.time) -> None:
        self._shared, self._now = shared or SharedState(), now

    def make(self, key: ApiKey | None, session: dict[str, Any], lifetime_s: int) -> tuple[str, ClientSecret]:
        """A new secret: (text, rights). Raises ApiError: 429, too many; 400, too large a session."""
        session_json = json.dumps(session, ensure_ascii=False)
        size = len(session_json.encode(errors="surrogatepass"))
        if size > _MAX_CONFIG_BYTES:
            reason = f"has more than {_MAX_CONFIG_BYTES} bytes as JSON; send the rest by session.update"
            raise invalid("session", reason, "session_too_large")
        made = ClientSecret(int(self._now()) + lifetime_s, key.entry.sha256 if key else "", session_json)
        text, name = PREFIX + secrets.token_urlsafe(_RANDOM_BYTES), key.name if key else ""
        with self._shared.change() as database:
            database.execute("DELETE FROM secrets WHERE expires_at <= ?", (self._now(),))
            _check_room(database, name, size)
            row = (digest(text), made.expires_at, name, made.key_sha256, session_json)
            database.execute("INSERT INTO secrets VALUES (?, ?, ?, ?, ?)", row)
        return text, made

    def find(self, presented: str) -> ClientSecret | None:
        statement = "SELECT expires_at, key_sha256, session_json FROM secrets WHERE digest = ? AND expires_at > ?"
        found = self._shared.first(statement, digest(presented), self._now())
        return None if found is None else ClientSecret(*found)


def _check_room(database: sqlite3.Connection, name: str, size: int) -> None:
    """Raises ApiError: 429, too many secrets of a key, or of all."""
    held = "SELECT count(*), coalesce(sum(length(CAST(session_json AS BLOB))), 0) FROM secrets"
    count, held_bytes = database.execute(held).fetchone()
    of_key, bytes_of_key = database.execute(f"{held} WHERE key_name = ?", (name,)).fetchone()
    if name and of_key >= _MAX_SECRETS_PER_KEY:
        reason = f"the API key {name!r} has {_MAX_SECRETS_PER_KEY} client secrets, as many as may be"
    elif count >= _MAX_SECRETS:
        reason = f"there are {_MAX_SECRETS} client secrets, as many as may be"
    elif name and bytes_of_key + size > _MAX_HELD_PER_KEY:
        reason = f"the sessions of the API key {name!r} take as much memory as they may, {_MAX_HELD_PER_KEY} bytes"
    elif held_bytes + size > _MAX_HELD_BYTES:
        reason = "the sessions of all client secrets take all the memory that they may"
    else:
        return
    message = f"{reason}; ask for ones that expire sooner, or use each for more connections"
    raise ApiError(429, message, None, "too_many_client_secrets", "rate_limit_error", _RETRY_S)


def opens(scope: Scope) -> bool:
    """Whether a client secret is enough for a request."""
    path = scope["path"]
    if scope["type"] == "websocket":
        return path in _SOCKETS
    return (scope["method"], path) == ("GET", "/v1/models") or (scope["method"] == "POST" and path in _POSTS)


def presented_key(socket: HTTPConnection) -> str:
    """A WebSocket's key, or "": in Authorization, in `api-key` of Azure's clients, or in a subprotocol of browsers."""
    if key := bearer_of(socket.headers) or socket.headers.get("api-key", "").strip():
        return key
    offered = (name for name in _offered(socket) if name.startswith(_KEY_SUBPROTOCOL))
    return next(offered, "").removeprefix(_KEY_SUBPROTOCOL)


def subprotocol_of(socket: HTTPConnection) -> str | None:
    """A browser that offers subprotocols gives up if the server takes none."""
    return SUBPROTOCOL if SUBPROTOCOL in _offered(socket) else None


def _offered(socket: HTTPConnection) -> list[str]:
    return socket.scope.get("subprotocols") or []
