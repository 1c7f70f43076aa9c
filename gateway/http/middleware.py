"""Middleware: request ids, log lines, API keys, size limits."""

import asyncio
import re
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from http import HTTPStatus
from types import MappingProxyType
from typing import NoReturn

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.responses import Response
from starlette.status import WS_1008_POLICY_VIOLATION, WS_1011_INTERNAL_ERROR
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import metrics
from gateway.access.api_key import ApiKey, key_gone
from gateway.access.api_keys import ApiKeys, key_in
from gateway.access.client_secrets import ClientSecrets, opens, presented_key
from gateway.access.secret_text import PREFIX
from gateway.errors import ApiError, gateway_fault
from gateway.http.answer_span import with_firsts
from gateway.http.bodies import Bodies, no_room
from gateway.http.connection import CLIENT_CLOSED_REQUEST, ClientGone
from gateway.http.json_writer import error_response, refuse
from gateway.http.sockets import refuse_socket
from gateway.page.files import PATHS as PAGE_PATHS
from gateway.tasks import first, held
from services.common.telemetry import tracing
from services.common.telemetry.spans import Span, Spans

_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_QUIET_PATHS = {"/health", "/ready", "/metrics"}
# For probes, Prometheus and `quartet top`; the API's description is the same everywhere. An Ingress leaves them inside.
# The page asks for a key by itself.
OPEN_PATHS = frozenset({*_QUIET_PATHS, "/docs", "/openapi.json", *PAGE_PATHS})
# For clients that read these before they have a key. With one, they are told of more.
_OPEN_TO_READ = frozenset({"/v1/audio/voices", "/v1/audio/models"})
_WEBSOCKET = "WEBSOCKET"  # its method in logs and spans
_OF_OPERATORS = ("/start_profile", "/stop_profile")
_TRACED = ("POST", _WEBSOCKET)  # methods that may reach a stage
_SWITCHED = 101  # HTTP's status of a WebSocket that was accepted

log = structlog.get_logger()


class KeyGone(Exception):
    """The API key of a request was removed."""


class _OpenRequest:
    """A request until its log line is written. `fields` are the line's; `status` is 0 before a response. `ignored` are
    its members without effect, which the response names."""

    def __init__(self, scope: Scope, send: Send, request_id: str) -> None:
        self._scope, self._send, self.id = scope, send, request_id
        self.method: str = scope.get("method", _WEBSOCKET)
        self._is_quiet = scope["path"] in _QUIET_PATHS
        self._span = None if self._is_quiet else tracing.begin(self.method, request_id, Headers(scope=scope))
        self.fields: dict = {} if self._span is None else {"trace_id": self._span.trace_id}
        self.status = 0
        self.ignored: set[str] = set()
        self._started = time.monotonic()
        self._ended: float | None = None

    def span_so_far(self) -> Span:
        outcome = str(self.status) if self._ended else ""
        owner = self.fields.get("key")
        return with_firsts(Span(self.id, "gateway", self._started, self._ended, outcome, owner=owner), self.fields)

    async def send(self, message: Message) -> None:
        if message["type"] in ("http.response.start", "websocket.http.response.start", "websocket.accept"):
            self.status = message.get("status", _SWITCHED)
            message.setdefault("headers", [])
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self.id
            headers["x-content-type-options"] = "nosniff"
            if self.ignored:
                headers["x-quartet-ignored"] = ", ".join(sorted(self.ignored))
        elif message["type"] == "websocket.close":
            self.status = self.status or HTTPStatus.FORBIDDEN  # closed before it was accepted
            self.fields["close_code"] = message.get("code")
        await self._send(message)

    async def fail(self, receive: Receive) -> None:
        """Logs the current exception, and sends a 500 if no response has begun."""
        log.exception("request failed", request_id=self.id)
        error = gateway_fault(" under this request id")
        self.fields["code"] = error.code
        if self._scope["type"] == "websocket":
            await self.send({"type": "websocket.close", "code": WS_1011_INTERNAL_ERROR})
        elif self.status == 0:
            await error_response(error, self._scope["state"])(self._scope, receive, self.send)

    async def end_with_key(self, receive: Receive) -> None:
        """Tells the client, if no response has begun; the server cuts off one that has."""
        self.fields["code"] = "invalid_api_key"
        if self._scope["type"] == "websocket":
            await self.send({"type": "websocket.close", "code": WS_1008_POLICY_VIOLATION})
        elif self.status == 0:
            await error_response(key_gone(), self._scope["state"])(self._scope, receive, self.send)

    def end(self) -> None:
        duration_ms = round((time.monotonic() - self._started) * 1000, 1)
        path = getattr(self._scope.get("route"), "path", "other")  # the client's own path could be anything
        self.status = self.status or CLIENT_CLOSED_REQUEST
        metrics.HTTP_REQUESTS.labels(path, self.status).inc()
        for member in self.ignored:
            metrics.IGNORED.labels(path, member).inc()
        if self._span:
            _end_span(self._span, self.method, path, self.status, self.fields)
        line = {"request_id": self.id, "method": self.method, "path": path, "status": self.status}
        write = log.debug if self._is_quiet else log.info
        write("request", **line, duration_ms=duration_ms, **self.fields)
        self._ended = time.monotonic()


class RequestContext:
    """Gives each request an id, a span and a log line, and makes a 500 of uncaught errors.

    Keeps a client's x-request-id if it is sane and not in use. Sets `request.state.request_id`,
    `request.state.log`, the log line's fields, and `request.state.ignored`, names of members without effect.

    Args:
        refusals: by the beginning of their paths, the APIs with errors of their own form: (error, request's id) ->
            response."""

    def __init__(
        self,
        app: ASGIApp,
        spans: Spans,
        refusals: Mapping[str, Callable[[ApiError, str], Response]] = MappingProxyType({}),
    ) -> None:
        self._app, self._spans, self._refusals = app, spans, refusals
        self._running_ids: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        request = _OpenRequest(scope, send, self._request_id(Headers(scope=scope).get("x-request-id", "")))
        scope.setdefault("state", {}).update(request_id=request.id, log=request.fields, ignored=request.ignored)
        for prefix, refused in self._refusals.items():
            if f"{scope['path']}/".startswith(f"{prefix}/"):
                scope["state"]["refused"] = lambda error, refused=refused: refused(error, request.id)
        traced = ExitStack()
        if request.method in _TRACED and scope["path"] not in _OF_OPERATORS:
            traced.enter_context(self._spans.serving(request.span_so_far))
        self._running_ids.add(request.id)
        try:
            await self._app(scope, receive, request.send)
        except (ClientGone, ClientDisconnect):
            request.status = CLIENT_CLOSED_REQUEST
        except KeyGone:
            await request.end_with_key(receive)
        except Exception:
            await request.fail(receive)
        finally:
            self._running_ids.discard(request.id)
            request.end()
            traced.close()

    def _request_id(self, wanted: str) -> str:
        new_id = uuid.uuid4().hex
        if not _SANE_ID.fullmatch(wanted):
            return new_id
        return f"{wanted}-{new_id[:8]}" if wanted in self._running_ids else wanted


def _end_span(span: tracing.Span, method: str, path: str, status: int, fields: dict) -> None:
    span.rename(f"{method} {path}")
    names = ("code", "failed_stage", "ttft_ms", "ttfa_ms", "prompt_tokens", "text_tokens", "frames", "speech")
    span.set(stage="gateway", status=status, **{name: fields.get(name) for name in names})
    span.end(f"HTTP {status}" if status >= 500 else "")  # a client's mistake is no error of the span


class HeadAsGet:
    """Answers HEAD as GET; the server sends no body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_head = scope["type"] == "http" and scope["method"] == "HEAD"
        await self._app({**scope, "method": "GET"} if is_head else scope, receive, send)


class BodyLimit:
    """Refuses larger bodies with 413 while it reads them, and drops the rest: the client must read the answer.

    Refuses compressed ones with 415. Refuses large ones with 503 if those of all requests are more than `bodies` may
    hold. Sets `request.state.hold`, which counts what a request holds beside its body.

    Args:
        uploads: by "METHOD path", the most bytes of bodies that go to storage as they arrive: of each only
            `upload_bytes` are in memory at a time."""

    def __init__(
        self,
        app: ASGIApp,
        max_bytes: int,
        bodies: Bodies,
        uploads: Mapping[str, int] = MappingProxyType({}),
        upload_bytes: int = 0,
    ) -> None:
        self._app, self._max_bytes, self._bodies = app, max_bytes, bodies
        self._uploads, self._upload_bytes = uploads, min(upload_bytes, max_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        most = self._uploads.get(f"{scope['method']} {scope['path']}")
        max_bytes, most_held = (self._max_bytes, self._max_bytes) if most is None else (most, self._upload_bytes)
        error = ApiError(413, f"the body is larger than the {max_bytes} bytes allowed", None, "body_too_large")
        headers = Headers(scope=scope)
        if (coding := headers.get("content-encoding", "identity").lower()) not in ("", "identity"):
            message = f"the body's content-encoding is {coding[:64]!r}; send it as it is, without one"
            await refuse(ApiError(415, message, None, "unsupported_content_encoding"), scope, receive, send)
            return
        declared = headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > max_bytes:
            await refuse(error, scope, receive, send)
            return
        received = 0

        async def receive_limited() -> Message:
            nonlocal received
            message = await (first(receive(), gives_way()) if body.size and body.arrives else receive())
            size = len(message.get("body", b""))
            held_bytes = min(size, max(0, most_held - received))
            received += size
            if received > max_bytes:
                raise error
            body.hold(held_bytes)
            body.arrives = body.arrives and message.get("more_body", False)
            return message

        async def gives_way() -> NoReturn:
            await body.gives_way.wait()
            raise no_room()

        state = scope.setdefault("state", {})
        key = state.get("key")
        owner = (scope.get("client") or ("",))[0] if key is None else key.name
        with self._bodies.request(owner) as body:
            state["hold"] = body.hold
            held.set(body.hold)
            await self._app(scope, receive_limited, send)


class RequireKey:
    """Refuses requests without a known key with 401, and sets `request.state.key`.

    `secrets` open some endpoints for the key that made them."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, secrets: ClientSecrets) -> None:
        self._app, self._keys, self._secrets = app, keys, secrets

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        presented = (
            presented_key(HTTPConnection(scope)) if scope["type"] == "websocket" else key_in(Headers(scope=scope))
        )
        own = scope.get("state", {}).get("key")  # of a request that the gateway makes of itself
        key = own or (self._key(presented, scope) if presented else None)
        if key is not None:
            state = scope.setdefault("state", {})
            state["key"] = key
            state.setdefault("log", {})["key"] = key.name
            await self._until_gone(key, scope, receive, send)
        elif scope["type"] == "websocket":
            await refuse_socket(scope, send)
        elif not presented and scope["method"] == "GET" and scope["path"] in _OPEN_TO_READ:
            await self._app(scope, receive, send)
        elif presented.startswith(PREFIX) and not opens(scope):
            message = "a client secret does not open this; send an API key from a server of your own"
            await refuse(ApiError(401, message, None, "invalid_api_key"), scope, receive, send)
        else:
            reason = "the API key is not known here" if presented else "an API key is required"
            headers = "`Authorization: Bearer KEY` or `x-api-key: KEY`"
            message = f"{reason}; send {headers} with one that this server's operator gave out"
            await refuse(ApiError(401, message, None, "invalid_api_key"), scope, receive, send)

    async def _until_gone(self, key: ApiKey, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves the request. Raises KeyGone: the key was removed meanwhile."""
        task = asyncio.current_task()
        assert task is not None
        key.tasks.add(task)
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            if not key.is_gone or task.uncancel():
                raise
            raise KeyGone from None
        finally:
            key.tasks.discard(task)

    def _key(self, presented: str, scope: Scope) -> ApiKey | None:
        key = self._keys.find(presented)
        if key is None and opens(scope) and (secret := self._secrets.find(presented)) is not None:
            return next((each for each in self._keys if self._secrets.is_of(secret, each)), None)
        return key
