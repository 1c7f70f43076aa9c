"""Client secrets: keys of pages and phones that expire, with the realtime session they were made for.

Each gateway with the same signing key takes a secret, unless its session is a large one: the gateway that made it has
that alone."""

import json
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.requests import HTTPConnection

from gateway.access.client_secrets import PATH, ClientSecret, presented_key
from gateway.access.secret_text import PREFIX
from gateway.answers.catalog import not_reached
from gateway.answers.gateway import Gateway
from gateway.answers.tools.registry import offered
from gateway.dialects.realtime.output.tools import check_tools
from gateway.dialects.realtime.settings.session import Session
from gateway.errors import ApiError, invalid
from gateway.http.connection import admitted, key_of
from gateway.http.forms import page, read_json
from gateway.http.json_writer import Json
from gateway.validation import Strict

_MIN_S, _DEFAULT_S, _MAX_S = 10, 600, 7200

router = APIRouter(tags=["realtime"])


def secret_of(socket: HTTPConnection) -> ClientSecret | None:
    """The client secret of a WebSocket, if it has one. Raises ApiError: 401, unknown or expired."""
    presented = presented_key(socket)
    if not presented.startswith(PREFIX):
        return None
    found = socket.app.state.client_secrets.find(presented)
    if found is None:
        why = "it has expired, was changed, or is another gateway's"
        message = f"the client secret is not known here: {why}; make one by POST {PATH}/client_secrets"
        raise ApiError(401, message, None, "invalid_api_key")
    return found


def new_session(gateway: Gateway, **members: Any) -> Session:
    """Raises ApiError: 400, no model answers in text; 503, the model was not reached yet."""
    stage = gateway.catalog.stage_for("text", None)
    model = gateway.catalog.model_of(stage)
    if model is None:
        raise not_reached(stage)
    members |= {"speaks": gateway.pipeline.config.outputs.speech is not None, "hosted_tools": offered(gateway)}
    return Session.new(model, gateway.pipeline.voices, **members)


class ExpiresAfter(Strict):
    """How long the secret opens connections. Open connections outlive it."""

    anchor: Literal["created_at"] = "created_at"
    seconds: int = Field(default=_DEFAULT_S, ge=_MIN_S, le=_MAX_S)


class ClientSecretRequest(Strict):
    """A secret and the session that it opens."""

    expires_after: ExpiresAfter | None = None
    session: dict[str, Any] | None = Field(default=None, description="members as in session.update")


@router.post(f"{PATH}/client_secrets", openapi_extra=page(ClientSecretRequest, "the secret"))
async def make_client_secret(http: Request, gateway: Annotated[Gateway, Depends(admitted)]) -> Json:
    """Makes a short-lived key for one app's page or phone."""
    request = await read_json(http, ClientSecretRequest)
    patch = request.session or {}
    try:
        json.dumps(patch, allow_nan=False)
    except ValueError:
        raise invalid("session", "has a number that JSON does not know: NaN or Infinity") from None
    session = new_session(gateway).updated(patch)
    check_tools(gateway, session)
    lifetime = request.expires_after or ExpiresAfter()
    text, secret = http.app.state.client_secrets.make(key_of(http), patch, lifetime.seconds)
    body = {"value": text, "expires_at": secret.expires_at, "session": session.public()}
    return Json(body, headers={"cache-control": "no-store"})
