"""JSON in UTF-8 without spaces."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import orjson
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from gateway.errors import ApiError


def to_json(value: Any) -> bytes:
    """Raises TypeError: JSON has no such type."""
    try:
        return orjson.dumps(value)
    except TypeError:  # a client's integer over 64 bits, or its lone surrogate
        return json.dumps(value, separators=(",", ":")).encode()


class Json(JSONResponse):
    def render(self, content: Any) -> bytes:
        return to_json(content)


async def in_thread(content: Any) -> Json:
    """The response with `content`, which may have megabytes."""
    return await asyncio.to_thread(Json, content)


def first_page(objects: Sequence[dict[str, Any]], limit: int) -> dict[str, Any]:
    """OpenAI's list of the first `limit` objects."""
    data = objects[:limit]
    ids = [each["id"] for each in data] or [None]
    return {"object": "list", "data": data, "first_id": ids[0], "last_id": ids[-1], "has_more": len(objects) > limit}


def error_headers(error: ApiError) -> dict[str, str]:
    headers = {"www-authenticate": "Bearer"} if error.status == 401 else {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, round(error.retry_after_s)))
    return headers


def error_response(error: ApiError, state: Mapping[str, Any] = MappingProxyType({})) -> Json:
    """In OpenAI's form, or in that of the request's API: `refused` in the request's `state`."""
    if (refused := state.get("refused")) is not None:
        return refused(error)
    return Json(error.body(), error.status, error_headers(error))


async def refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answers a request with `error`, and notes it for the log line."""
    state = scope.get("state", {})
    state.get("log", {}).update(error.log)
    await error_response(error, state)(scope, receive, send)
