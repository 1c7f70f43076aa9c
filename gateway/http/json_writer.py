"""JSON in UTF-8 without spaces."""

import json
from collections.abc import Sequence
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


def first_page(objects: Sequence[dict[str, Any]], limit: int) -> dict[str, Any]:
    """OpenAI's list of the first `limit` objects."""
    data = objects[:limit]
    ids = [each["id"] for each in data] or [None]
    return {"object": "list", "data": data, "first_id": ids[0], "last_id": ids[-1], "has_more": len(objects) > limit}


def error_response(error: ApiError) -> Json:
    headers = {"www-authenticate": "Bearer"} if error.status == 401 else {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, round(error.retry_after_s)))
    return Json(error.body(), error.status, headers)


async def refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answers a request with `error`, and notes it for the log line."""
    scope.get("state", {}).get("log", {}).update(error.log)
    await error_response(error)(scope, receive, send)
