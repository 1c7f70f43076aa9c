"""Routes requests between worker processes."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress

import httpx
import structlog
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.errors import ApiError
from gateway.http.connection import ClientGone, while_connected
from gateway.http.json_writer import error_response
from gateway.http.workers import merge as merging
from gateway.http.workers.relay import relay
from gateway.http.workers.worker import Worker

# Only the first process has jobs, profiles and adapters.
_KEPT_BY_FIRST = (
    "/ready",  # no gateway is ready without its first process
    "/v1/videos",
    "/inference/v1/",
    "/start_profile",
    "/stop_profile",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
)
_KEPT_IN_MEMORY = ("/v1/responses", "/v1/conversations")  # of the first process, unless all share them
_FIRST = 0
# These paths need the answers of all processes, merged.
_TOGETHER = {"/metrics": merging.metrics, "/v1/quartet/trace/": merging.trace}
_OF_ONE_CONNECTION = {b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"te", b"trailer"}
_CONNECT_S = 5.0
METRICS_KEPT_S = 1.0
# Idle connections close before the other side closes them, after 5 s or more (keep_alive_s).
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0)

log = structlog.get_logger()


class WorkerRouter:
    """Serves a request here, in the first worker, or in all.

    Args:
        shares_responses: whether all workers have the responses that are kept.
    """

    def __init__(self, app: ASGIApp, worker: Worker, shares_responses: bool) -> None:
        self._app, self._worker = app, worker
        self._kept = _KEPT_BY_FIRST if shares_responses else (*_KEPT_BY_FIRST, *_KEPT_IN_MEMORY)
        self._clients: dict[int, httpx.AsyncClient] = {}
        self._merging, self._page, self._merged_s = asyncio.Lock(), Response(), -float("inf")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["client"] is None:  # a sibling's request, by this process's own socket
            await self._app(scope, receive, send)
            return
        path, is_kept = scope["path"], not self._worker.is_first and scope["path"].startswith(self._kept)
        if scope["type"] == "websocket":
            if is_kept:
                headers = _passed_on(scope["headers"])
                await relay(self._worker.socket_of(_FIRST), _target(scope), headers, scope, receive, send)
            else:
                await self._app(scope, receive, send)
            return
        merge = next((each for begin, each in _TOGETHER.items() if path.startswith(begin)), None)
        if merge is not None:
            response = await (self._metrics(scope) if merge is merging.metrics else self._merged(merge, scope))
            await response(scope, receive, send)
        elif is_kept:
            client = _Client(scope, receive)
            with suppress(ClientGone, ClientDisconnect):
                await while_connected(client.receive_after_body, self._forward(scope, client, send))
        else:
            await self._app(scope, receive, send)

    async def _merged(self, merge: Callable[[merging.Answers], Response], scope: Scope) -> Response:
        answers = await self._ask_all(scope)
        return merge(answers) if answers else error_response(_unreachable())

    async def _metrics(self, scope: Scope) -> Response:
        """All workers' metrics, merged at most once in METRICS_KEPT_S: that takes longer than a page of one."""
        async with self._merging:
            if time.monotonic() - self._merged_s >= METRICS_KEPT_S:
                self._page, self._merged_s = await self._merged(merging.metrics, scope), time.monotonic()
            return self._page

    def _to(self, number: int) -> httpx.AsyncClient:
        if number not in self._clients:
            transport = httpx.AsyncHTTPTransport(uds=str(self._worker.socket_of(number)), limits=_LIMITS)
            timeout = httpx.Timeout(None, connect=_CONNECT_S)
            self._clients[number] = httpx.AsyncClient(base_url="http://worker", transport=transport, timeout=timeout)
        return self._clients[number]

    async def _ask_all(self, scope: Scope) -> list[tuple[int, Response]]:
        """(number, answer) of every reachable worker."""

        async def ask(number: int) -> tuple[int, Response] | None:
            try:
                headers = _passed_on(scope["headers"])
                answer = await self._to(number).request(scope["method"], _target(scope), headers=headers)
            except httpx.TransportError:
                return None
            return number, Response(answer.content, answer.status_code, dict(answer.headers))

        answers = await asyncio.gather(*(ask(number) for number in range(self._worker.count)))
        return [answer for answer in answers if answer is not None]

    async def _forward(self, scope: Scope, client: "_Client", send: Send) -> None:
        first = self._to(_FIRST)
        headers, body = _passed_on(scope["headers"]), client.pieces()
        try:
            request = first.build_request(scope["method"], _target(scope), headers=headers, content=body)
            answer = await first.send(request, stream=True)
        except httpx.TransportError:
            await error_response(_unreachable())(scope, client.receive_after_body, send)
            return
        try:
            start = {"status": answer.status_code, "headers": _passed_on(answer.headers.raw)}
            await send({"type": "http.response.start", **start})
            async for piece in answer.aiter_raw():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except httpx.TransportError as error:  # the client sees a body that is cut short
            log.error("the first worker's answer broke off", path=scope["path"], error=str(error))
        finally:
            await answer.aclose()


class _Client(Request):
    """A client's request, and then its disconnection."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        super().__init__(scope, receive)
        self._is_read = asyncio.Event()

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body. Raises ClientDisconnect."""
        async for piece in self.stream():
            yield piece
        self._is_read.set()

    async def receive_after_body(self) -> Message:
        await self._is_read.wait()
        return await self.receive()


def _passed_on(headers: Iterable[tuple[bytes, bytes]]) -> Sequence[tuple[bytes, bytes]]:
    """The headers that outlive one connection."""
    return [(name, value) for name, value in headers if name.lower() not in _OF_ONE_CONNECTION]


def _target(scope: Scope) -> str:
    query = scope.get("query_string", b"")
    path = scope.get("raw_path") or scope["path"].encode()
    return (path + (b"?" + query if query else b"")).decode("ascii")


def _unreachable() -> ApiError:
    message = "the gateway's process that keeps this is starting anew; try again"
    return ApiError(503, message, None, "stage_unavailable", retry_after_s=1)
