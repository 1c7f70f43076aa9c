"""Client secrets: short-lived keys for realtime connections and for requests that answers follow from alone."""

import json
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from starlette.requests import HTTPConnection
from starlette.types import Scope

from gateway.access.api_keys import ApiKey, bearer_of, digest
from gateway.access.secret_text import MAX_SESSION_BYTES, SecretTexts
from gateway.access.shared import SharedState
from gateway.access.signing import Signer, load
from gateway.errors import ApiError, invalid

PATH = "/v1/realtime"
CALLS_PATH = f"{PATH}/calls"
AZURE_PATH = "/openai/v1/realtime"  # where Azure's clients look for it
LIVE_PATHS = ("/v1/live/sessions", "/openai/v1/live/sessions")
SUBPROTOCOL = "realtime"  # the subprotocol that the server accepts
_KEY_SUBPROTOCOL = "openai-insecure-api-key."
# What a secret opens for its API key. It lists, keeps and removes nothing of the key's.
_SOCKETS = {PATH, AZURE_PATH, *LIVE_PATHS, "/v1/audio/speech/stream"}
_POSTS = {
    *("/v1/chat/completions", "/v1/completions", "/v1/images/generations", "/v1/images/edits", "/v1/messages"),
    *(CALLS_PATH, LIVE_PATHS[0]),
    *(f"/v1/audio/{name}" for name in ("speech", "transcriptions", "translations", "generations")),
}
_MAX_KEPT, _MAX_KEPT_PER_KEY = 10_000, 1000
_MAX_KEPT_BYTES = 64 * 1024 * 1024  # of all sessions, as JSON
_MAX_KEPT_BYTES_PER_KEY = _MAX_KEPT_BYTES // 16
_RETRY_S = 10.0
_REFERENCES = 65_536  # of API keys; one takes microseconds to compute, and a request needs those of all keys


@dataclass(frozen=True)
class ClientSecret:
    """The rights of a client secret.

    Attributes:
        expires_at: Unix time in seconds.
        key_reference: of the API key that made it, without which it is void.
        session_json: members of the session.
    """

    expires_at: int
    key_reference: bytes
    session_json: bytes

    @property
    def session(self) -> dict[str, Any]:
        return json.loads(self.session_json)


class ClientSecrets:
    """Client secrets that `signer` signs; the sessions that do not fit into their texts are in `shared`.

    `now` is Unix time in seconds."""

    def __init__(
        self, shared: SharedState | None = None, signer: Signer | None = None, now: Callable[[], float] = time.time
    ) -> None:
        self._shared, self._now = shared or SharedState(), now
        self._texts = SecretTexts(signer or load(None, self._shared))
        self._reference = lru_cache(_REFERENCES)(self._texts.reference)

    def make(self, key: ApiKey | None, session: dict[str, Any], lifetime_s: int) -> tuple[str, ClientSecret]:
        """A new secret: (text, rights). Raises ApiError: 429, too many large sessions; 400, too large a session."""
        session_json = json.dumps(session, ensure_ascii=False).encode(errors="surrogatepass")
        if len(session_json) > MAX_SESSION_BYTES:
            reason = f"has more than {MAX_SESSION_BYTES} bytes as JSON; send the rest by session.update"
            raise invalid("session", reason, "session_too_large")
        reference = self._reference(key.entry.sha256 if key else "")
        made = ClientSecret(int(self._now()) + lifetime_s, reference, session_json)
        text, is_whole = self._texts.write(made.expires_at, reference, session_json)
        if not is_whole:
            self._keep(text, key.name if key else "", made)
        return text, made

    def _keep(self, text: str, name: str, made: ClientSecret) -> None:
        """Raises ApiError: 429."""
        with self._shared.change() as database:
            database.execute("DELETE FROM secrets WHERE expires_at <= ?", (self._now(),))
            _check_room(database, name, len(made.session_json))
            row = (digest(text), made.expires_at, name, made.session_json)
            database.execute("INSERT INTO secrets VALUES (?, ?, ?, ?)", row)

    def find(self, presented: str) -> ClientSecret | None:
        """None: it is not signed here, has expired, or another gateway has its session."""
        claims = self._texts.read(presented)
        if claims is None or claims.expires_at <= self._now():
            return None
        session_json = claims.session_json
        if session_json is None:
            kept = self._shared.first("SELECT session_json FROM secrets WHERE digest = ?", digest(presented))
            if kept is None:
                return None
            (session_json,) = kept
        return ClientSecret(claims.expires_at, claims.key_reference, session_json)

    def is_of(self, secret: ClientSecret, key: ApiKey) -> bool:
        """Whether `key` made the secret."""
        return self._reference(key.entry.sha256) == secret.key_reference


def _check_room(database: sqlite3.Connection, name: str, size: int) -> None:
    """Raises ApiError: 429, too many large sessions of a key, or of all."""
    kept = "SELECT count(*), coalesce(sum(length(session_json)), 0) FROM secrets"
    count, kept_bytes = database.execute(kept).fetchone()
    of_key, bytes_of_key = database.execute(f"{kept} WHERE key_name = ?", (name,)).fetchone()
    if name and of_key >= _MAX_KEPT_PER_KEY:
        reason = f"the API key {name!r} has {_MAX_KEPT_PER_KEY} client secrets with large sessions, as many as may be"
    elif count >= _MAX_KEPT:
        reason = f"there are {_MAX_KEPT} client secrets with large sessions, as many as may be"
    elif name and bytes_of_key + size > _MAX_KEPT_BYTES_PER_KEY:
        limit = _MAX_KEPT_BYTES_PER_KEY
        reason = f"the large sessions of the API key {name!r} take as much memory as they may, {limit} bytes"
    elif kept_bytes + size > _MAX_KEPT_BYTES:
        reason = "the large sessions of all client secrets take all the memory that they may"
    else:
        return
    ways = "ask for ones that expire sooner, use each for more connections, or send less and the rest by session.update"
    message = f"{reason}; {ways}"
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
