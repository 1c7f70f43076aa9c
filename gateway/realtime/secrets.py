"""Who may open `/v1/realtime`: API keys as clients present them, and the short-lived keys that stand for one.

A client secret lets an app's page or phone connect without the API key of the app's server. It opens realtime
connections and nothing else, any number of them until it expires, with the session that was asked for with it. The
gateway remembers it: behind a proxy, its connections must come to the gateway that made it.
"""

import json
import secrets
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, Field
from starlette.requests import HTTPConnection

from gateway.api_keys import ApiKey, bearer_of, digest
from gateway.errors import ApiError, invalid
from gateway.gateway import Gateway, not_reached
from gateway.json_writer import Json
from gateway.openai.connection import admitted
from gateway.openai.connection import key_of as api_key_of
from gateway.openai.forms import page, read_json
from gateway.realtime.drawing import check_tool, may_draw
from gateway.realtime.events import RealtimeError, to_api
from gateway.realtime.session import Session
from gateway.workers.shared import Shared

PATH = "/v1/realtime"
AZURE_PATH = "/openai/v1/realtime"  # where Azure's clients look for it
SUBPROTOCOL = "realtime"  # the one of those that browsers offer which the server takes
_KEY_SUBPROTOCOL = "openai-insecure-api-key."
_PREFIX = "ek_"
_RANDOM_BYTES = 32
_MAX_SECRETS, _MAX_SECRETS_PER_KEY = 10_000, 1000
_MAX_CONFIG_CHARACTERS = 256 * 1024  # of one session, as JSON
_MAX_HELD_CHARACTERS = 64 * 1024 * 1024  # of all
_MIN_S, _DEFAULT_S, _MAX_S = 10, 600, 7200
_RETRY_S = 10.0

router = APIRouter(tags=["realtime"])


@dataclass(frozen=True)
class ClientSecret:
    """What a client secret stands for.

    Attributes:
        expires_at: Unix time in seconds.
        key_sha256: hash of the API key that it was made with; a key that is replaced by one of its name takes its
            secrets along. "" where there are no keys.
        session_json: members of the session, as session.update has them.
    """

    expires_at: int
    key_sha256: str
    session_json: str

    @property
    def session(self) -> dict[str, Any]:
        """What `Session.updated` takes."""
        return json.loads(self.session_json)


class ClientSecrets:
    """Those that have not expired, by the hash of each.

    Args:
        shared: has them.
        now: Unix time in seconds.
    """

    def __init__(self, shared: Shared | None = None, now: Callable[[], float] = time.time) -> None:
        self._shared, self._now = shared or Shared(), now

    def make(self, key: ApiKey | None, session: dict[str, Any], lifetime_s: int) -> tuple[str, ClientSecret]:
        """A new one (its text, what it stands for). Raises ApiError: 429, there are too many; 400, too large."""
        session_json = json.dumps(session, ensure_ascii=False)
        if len(session_json) > _MAX_CONFIG_CHARACTERS:
            reason = f"has more than {_MAX_CONFIG_CHARACTERS} characters as JSON; send the rest by session.update"
            raise invalid("session", reason, "session_too_large")
        made = ClientSecret(int(self._now()) + lifetime_s, key.entry.sha256 if key else "", session_json)
        text, name = _PREFIX + secrets.token_urlsafe(_RANDOM_BYTES), key.name if key else ""
        with self._shared.change() as database:
            database.execute("DELETE FROM secrets WHERE expires_at <= ?", (self._now(),))
            _check_room(database, name, len(session_json))
            row = (digest(text), made.expires_at, name, made.key_sha256, session_json)
            database.execute("INSERT INTO secrets VALUES (?, ?, ?, ?, ?)", row)
        return text, made

    def find(self, presented: str) -> ClientSecret | None:
        """The one whose text is `presented`, if it has not expired."""
        statement = "SELECT expires_at, key_sha256, session_json FROM secrets WHERE digest = ? AND expires_at > ?"
        found = self._shared.first(statement, digest(presented), self._now())
        return None if found is None else ClientSecret(*found)


def _check_room(database: sqlite3.Connection, name: str, characters: int) -> None:
    """Raises ApiError: 429, the key `name` has too many secrets, or all keys together."""
    held = "SELECT count(*), coalesce(sum(length(session_json)), 0), coalesce(sum(key_name = ?), 0) FROM secrets"
    count, held_characters, of_key = database.execute(held, (name,)).fetchone()
    if name and of_key >= _MAX_SECRETS_PER_KEY:
        reason = f"the API key {name!r} has {_MAX_SECRETS_PER_KEY} client secrets, as many as may be"
    elif count >= _MAX_SECRETS:
        reason = f"there are {_MAX_SECRETS} client secrets, as many as may be"
    elif held_characters + characters > _MAX_HELD_CHARACTERS:
        reason = "the sessions of all client secrets take all the memory that they may"
    else:
        return
    message = f"{reason}; ask for ones that expire sooner, or use each for more connections"
    raise ApiError(429, message, None, "too_many_client_secrets", "rate_limit_error", _RETRY_S)


def key_of(socket: HTTPConnection) -> str:
    """The key that a WebSocket's client presents, "" for none: in the Authorization header, as Azure's clients do in
    `api-key`, or as browsers must, which cannot set headers, in a subprotocol."""
    if key := bearer_of(socket.headers) or socket.headers.get("api-key", "").strip():
        return key
    offered = (name for name in _offered(socket) if name.startswith(_KEY_SUBPROTOCOL))
    return next(offered, "").removeprefix(_KEY_SUBPROTOCOL)


def subprotocol_of(socket: HTTPConnection) -> str | None:
    """What to accept the WebSocket with. A browser that offers subprotocols gives up if none is taken."""
    return SUBPROTOCOL if SUBPROTOCOL in _offered(socket) else None


def _offered(socket: HTTPConnection) -> list[str]:
    return socket.scope.get("subprotocols") or []


def secret_of(socket: HTTPConnection) -> ClientSecret | None:
    """The client secret that the WebSocket was opened with; None: with an API key, or with none where none is needed.

    Raises:
        ApiError: 401, it is not known, or has expired.
    """
    presented = key_of(socket)
    if not presented.startswith(_PREFIX):
        return None
    found = socket.app.state.client_secrets.find(presented)
    if found is None:
        why = "it has expired, or is another gateway's"
        message = f"the client secret is not known here: {why}; make one by POST {PATH}/client_secrets"
        raise ApiError(401, message, None, "invalid_api_key")
    return found


def new_session(gateway: Gateway, **members: Any) -> Session:
    """A session of the model that answers here, before its client says anything.

    Args:
        gateway: the gateway.
        members: further arguments of Session.new.

    Raises:
        ApiError: 400, nothing here answers in text; 503, that was not reached yet.
    """
    stage = gateway.stage_for("text", None)
    model = gateway.model_of(stage)
    if model is None:
        raise not_reached(stage)
    speaks = gateway.pipeline.config.outputs.speech is not None
    return Session.new(model, gateway.pipeline.voices, speaks=speaks, draws=may_draw(gateway), **members)


class ExpiresAfter(BaseModel):
    """How long the secret opens connections. Those that are open then go on."""

    anchor: Literal["created_at"] = "created_at"
    seconds: int = Field(default=_DEFAULT_S, ge=_MIN_S, le=_MAX_S)


class ClientSecretRequest(BaseModel):
    """A secret and the session that it opens."""

    expires_after: ExpiresAfter | None = None
    session: dict[str, Any] | None = Field(default=None, description="members as in session.update")


@router.post(f"{PATH}/client_secrets", openapi_extra=page(ClientSecretRequest, "application/json", "the secret"))
async def make_client_secret(http: Request, gateway: Annotated[Gateway, Depends(admitted)]) -> Json:
    """Makes a short-lived key for one app's page or phone, which opens realtime connections only."""
    request = await read_json(http, ClientSecretRequest, gateway.settings.request_timeout_s)
    patch = request.session or {}
    session = _checked(gateway, patch)
    lifetime = request.expires_after or ExpiresAfter()
    text, secret = http.app.state.client_secrets.make(api_key_of(http), patch, lifetime.seconds)
    body = {"value": text, "expires_at": secret.expires_at, "session": session.public()}
    return Json(body, headers={"cache-control": "no-store"})


def _checked(gateway: Gateway, patch: dict[str, Any]) -> Session:
    """The session that `patch` makes. Raises ApiError: 400, it makes none."""
    try:
        json.dumps(patch, allow_nan=False)
    except ValueError:
        raise invalid("session", "has a number that JSON does not know: NaN or Infinity") from None
    try:
        session = new_session(gateway).updated(patch)
        check_tool(gateway, session)
        return session
    except RealtimeError as error:
        raise to_api(error) from None
