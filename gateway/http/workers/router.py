"""Routes requests between worker processes."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.errors import ApiError
from gateway.http.json_writer import error_response
from gateway.http.workers import merge as merging
from gateway.workers.siblings import PATH, SECRET, Siblings

# These paths need the answers of all processes, merged.
_TOGETHER = {"/metrics": merging.metrics, "/v1/quartet/trace/": merging.trace}
_OF_ONE_CONNECTION = {b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"te", b"trailer"}
METRICS_KEPT_S = 1.0


class WorkerRouter:
    """Serves a request here, or by all workers together."""

    def __init__(self, app: ASGIApp, siblings: Siblings) -> None:
        self._app, self._siblings = app, siblings
        self._merging, self._page, self._merged_s = asyncio.Lock(), Response(), -float("inf")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(PATH):
            request = Request(scope, receive)
            if self._siblings.knows(request.headers.get(SECRET, "")):
                answer = await self._siblings.answer(
                    scope["path"].removeprefix(PATH), orjson.loads(await request.body())
                )
                await Response(orjson.dumps(answer), media_type="application/json")(scope, receive, send)
                return
        merge = None
        if scope["type"] == "http" and scope["client"] is not None:  # no sibling's, by this process's own socket
            merge = next((each for begin, each in _TOGETHER.items() if scope["path"].startswith(begin)), None)
        if merge is None:
            await self._app(scope, receive, send)
            return
        response = await (self._metrics(scope) if merge is merging.metrics else self._merged(merge, scope))
        await response(scope, receive, send)

    async def _merged(self, merge: Callable[[merging.Answers], Response], scope: Scope) -> Response:
        answers = await self._siblings.ask_all(scope["method"], _target(scope), _passed_on(scope["headers"]))
        return merge(answers) if answers else error_response(_unreachable())

    async def _metrics(self, scope: Scope) -> Response:
        """All workers' metrics, merged at most once in METRICS_KEPT_S: that takes longer than a page of one."""
        async with self._merging:
            if time.monotonic() - self._merged_s >= METRICS_KEPT_S:
                self._page, self._merged_s = await self._merged(merging.metrics, scope), time.monotonic()
            return self._page


def _passed_on(headers: Iterable[tuple[bytes, bytes]]) -> Sequence[tuple[bytes, bytes]]:
    """The headers that outlive one connection."""
    return [(name, value) for name, value in headers if name.lower() not in _OF_ONE_CONNECTION]


def _target(scope: Scope) -> str:
    query = scope.get("query_string", b"")
    path = scope.get("raw_path") or scope["path"].encode()
    return (path + (b"?" + query if query else b"")).decode("ascii")


def _unreachable() -> ApiError:
    message = "the gateway's processes cannot reach each other; try again"
    return ApiError(503, message, None, "stage_unavailable", retry_after_s=1)
