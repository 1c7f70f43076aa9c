"""Middleware: request ids, log lines, API keys, size limits."""

import re
import time
import uuid
from contextlib import ExitStack
from http import HTTPStatus

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.status import WS_1008_POLICY_VIOLATION, WS_1011_INTERNAL_ERROR
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import metrics
from gateway.access.api_keys import ApiKey, ApiKeys, bearer_of
from gateway.access.client_secrets import AZURE_PATH, PATH, ClientSecrets, presented_key
from gateway.errors import ApiError, gateway_fault
from gateway.http.answer_span import with_firsts
from gateway.http.connection import CLIENT_CLOSED_REQUEST, ClientGone
from gateway.http.json_writer import error_response
from gateway.page.files import PATHS as PAGE_PATHS
from services.common.telemetry import tracing
from services.common.telemetry.spans import Span, Spans

_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_QUIET_PATHS = {"/health", "/ready", "/metrics"}
# For probes, Prometheus and `quartet top`; the API's description is the same everywhere. An Ingress leaves them inside.
# The page asks for a key by itself.
OPEN_PATHS = frozenset({*_QUIET_PATHS, "/docs", "/openapi.json", *PAGE_PATHS})
_WEBSOCKET = "WEBSOCKET"  # its method in logs and spans
_OF_OPERATORS = ("/start_profile", "/stop_profile")
_TRACED = ("POST", _WEBSOCKET)  # methods that may reach a stage
_SWITCHED = 101  # HTTP's status of a WebSocket that was accepted

log = structlog.get_logger()


class RequestContext:
    """Gives each request an id and a span, logs one line at its end, and makes a 500 of uncaught errors.

    Keeps a client's x-request-id if it is sane and not in use. Sets `request.state.request_id` and `request.state.log`,
    the log line's fields."""

    def __init__(self, app: ASGIApp, spans: Spans) -> None:
        self._app, self._spans = app, spans
        self._running_ids: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        method = scope.get("method", _WEBSOCKET)
        request_id = self._request_id(Headers(scope=scope).get("x-request-id", ""))
        quiet = scope["path"] in _QUIET_PATHS
        span = None if quiet else tracing.begin(method, request_id, Headers(scope=scope))
        fields: dict = {} if span is None else {"trace_id": span.trace_id}
        scope.setdefault("state", {}).update(request_id=request_id, log=fields)
        started, status = time.monotonic(), 0
        ended: float | None = None

        def span_so_far() -> Span:
            outcome = str(status) if ended else ""
            return with_firsts(Span(request_id, "gateway", started, ended, outcome, owner=fields.get("key")), fields)

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] in ("http.response.start", "websocket.accept"):
                status = message.get("status", _SWITCHED)
                message.setdefault("headers", [])
                MutableHeaders(scope=message)["x-request-id"] = request_id
            elif message["type"] == "websocket.close":
                status = status or HTTPStatus.FORBIDDEN  # closed before it was accepted
                fields["close_code"] = message.get("code")
            await send(message)

        served = ExitStack()
        if method in _TRACED and scope["path"] not in _OF_OPERATORS:
            served.enter_context(self._spans.serving(span_so_far))
        self._running_ids.add(request_id)
        try:
            await self._app(scope, receive, send_with_id)
        except ClientGone:
            status = CLIENT_CLOSED_REQUEST
        except Exception:
            log.exception("request failed", request_id=request_id)
            error = gateway_fault(" under this request id")
            fields["code"] = error.code
            if scope["type"] == "websocket":
                await send_with_id({"type": "websocket.close", "code": WS_1011_INTERNAL_ERROR})
            elif status == 0:
                await error_response(error)(scope, receive, send_with_id)
        finally:
            self._running_ids.discard(request_id)
            duration_ms = round((time.monotonic() - started) * 1000, 1)
            path = getattr(scope.get("route"), "path", "other")  # the client's own path could be anything
            status = status or CLIENT_CLOSED_REQUEST
            metrics.HTTP_REQUESTS.labels(path, status).inc()
            if span:
                end_span(span, method, path, status, fields)
            line = {"request_id": request_id, "method": method, "path": path, "status": status}
            write = log.debug if quiet else log.info
            write("request", **line, duration_ms=duration_ms, **fields)
            ended = time.monotonic()
            served.close()

    def _request_id(self, wanted: str) -> str:
        new_id = uuid.uuid4().hex
        if not _SANE_ID.fullmatch(wanted):
            return new_id
        return f"{wanted}-{new_id[:8]}" if wanted in self._running_ids else wanted


def end_span(span: tracing.Span, method: str, path: str, status: int, fields: dict) -> None:
    """A client's mistake is no error of the span."""
    span.rename(f"{method} {path}")
    names = ("code", "failed_stage", "ttft_ms", "ttfa_ms", "prompt_tokens", "text_tokens", "frames", "speech")
    span.set(stage="gateway", status=status, **{name: fields.get(name) for name in names})
    span.end(f"HTTP {status}" if status >= 500 else "")


class BodyLimit:
    """Refuses larger bodies with 413 while it reads them, and drops the rest, so that the client reads the answer."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        error = ApiError(413, f"the body is larger than the {self._max_bytes} bytes allowed", None, "body_too_large")
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared) > self._max_bytes:
            await error_response(error)(scope, receive, send)
            return
        received = 0

        async def receive_limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise error
            return message

        await self._app(scope, receive_limited, send)


class RequireKey:
    """Refuses requests without a known key with 401, and sets `request.state.key`.

    `secrets` are short-lived keys, which open realtime sessions for the key that made them."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, secrets: ClientSecrets | None = None) -> None:
        self._app, self._keys, self._secrets = app, keys, secrets

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        presented = (
            presented_key(HTTPConnection(scope)) if scope["type"] == "websocket" else bearer_of(Headers(scope=scope))
        )
        key = self._key(presented, scope) if presented else None
        if key is not None:
            state = scope.setdefault("state", {})
            state["key"] = key
            state.setdefault("log", {})["key"] = key.name
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": WS_1008_POLICY_VIOLATION})
        else:
            await _refuse(presented, scope, receive, send)

    def _key(self, presented: str, scope: Scope) -> ApiKey | None:
        key = self._keys.find(presented)
        is_realtime = scope["type"] == "websocket" and scope["path"] in (PATH, AZURE_PATH)
        if key is None and self._secrets is not None and is_realtime:
            secret = self._secrets.find(presented)
            key = None if secret is None else self._keys.of_hash(secret.key_sha256)
        return key


async def _refuse(presented: str, scope: Scope, receive: Receive, send: Send) -> None:
    reason = "the API key is not known here" if presented else "an API key is required"
    message = f"{reason}; send `Authorization: Bearer KEY` with one that this server's operator gave out"
    error = ApiError(401, message, None, "invalid_api_key")
    scope.get("state", {}).get("log", {})["code"] = error.code
    response = error_response(error)
    response.headers["www-authenticate"] = "Bearer"
    await response(scope, receive, send)
