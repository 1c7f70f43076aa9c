"""Writes JSON in UTF-8 without spaces, by orjson."""

import json
from typing import Any

import orjson
from starlette.responses import JSONResponse

from gateway.errors import ApiError


def to_json(value: Any) -> bytes:
    """Raises TypeError: JSON has no such type."""
    try:
        return orjson.dumps(value)
    except TypeError:  # what a client sent and gets back may be larger than 64 bits, or half of a surrogate pair
        return json.dumps(value, separators=(",", ":")).encode()


class Json(JSONResponse):
    def render(self, content: Any) -> bytes:
        return to_json(content)


def error_response(error: ApiError) -> Json:
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, round(error.retry_after_s)))
    return Json(error.body(), error.status, headers)
