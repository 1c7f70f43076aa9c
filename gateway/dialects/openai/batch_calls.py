"""Requests that the gateway makes of itself, as one of its clients would."""

import asyncio
import base64
from collections.abc import Callable
from typing import Any

import orjson
from starlette.types import ASGIApp, Message

from gateway.access.api_key import ApiKey
from gateway.access.shared import SharedState
from gateway.answers.batches.job import LineAnswer
from gateway.errors import ApiError, invalid
from gateway.http.json_writer import to_json

_HOST = b"localhost"  # a name that any gateway has
_TEXTS = ("text/", "application/x-subrip")  # as clients of one request get them: transcripts, events of speech


class BatchCalls:
    """Answers requests of JSON for the owners of API keys, beside the limits of their keys: a batch has its own.

    Args:
        app: the whole gateway, with all its middleware.
        find_key: the API key of a name; None: there are no keys.
    """

    def __init__(self, app: ASGIApp, find_key: Callable[[str], ApiKey | None] | None) -> None:
        self._app, self._find_key = app, find_key

    async def __call__(self, path: str, body: dict[str, Any], owner: str | None) -> LineAnswer:
        """Raises ApiError: 400, it would be a stream, whose pieces nobody waits for; 401, the owner's key is gone."""
        if body.get("stream"):
            raise invalid("stream", "a batch has no streams: leave it out")
        state: dict[str, Any] = {}
        if self._find_key is not None:
            state["key"] = self._unlimited(owner)
        sent = to_json(body)
        headers = [(b"host", _HOST), (b"content-type", b"application/json"), (b"content-length", b"%d" % len(sent))]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": headers,
            "client": None,
            "server": None,
            "state": state,
        }
        messages: list[Message] = []
        pending = [{"type": "http.request", "body": sent, "more_body": False}]

        async def receive() -> Message:
            return pending.pop() if pending else await _never()

        async def send(message: Message) -> None:
            messages.append(message)

        await self._app(scope, receive, send)
        return _answer(messages)

    def _unlimited(self, owner: str | None) -> ApiKey:
        """The owner's key without limits."""
        assert self._find_key is not None
        key = self._find_key(owner or "")
        if key is None:
            raise ApiError(401, "the API key that made this batch is gone", None, "invalid_api_key")
        without = {"max_concurrent_requests": None, "requests_per_minute": None}
        return ApiKey(key.entry.model_copy(update=without), SharedState())


async def _never() -> Message:
    """The gateway does not hang up on itself."""
    return await asyncio.get_running_loop().create_future()


def _answer(messages: list[Message]) -> LineAnswer:
    start = messages[0]
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in start["headers"]}
    content = b"".join(message.get("body", b"") for message in messages[1:])
    kind = headers.get("content-type", "")
    if kind.startswith("application/json"):
        body: Any = orjson.loads(content)
    elif kind.startswith(_TEXTS):
        body = content.decode()
    else:
        body = {"content_type": kind, "data": base64.b64encode(content).decode()}
    return LineAnswer(start["status"], headers.get("x-request-id", ""), body)
