"""Errors as Anthropic's clients know them."""

import re
from typing import Any

from gateway.errors import ApiError
from gateway.http.json_writer import Json, error_headers

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_STATUS = {503: 529}  # what its clients wait at
_TOO_LONG = re.compile(r"the prompt has (?:at least )?(\d+) tokens; the limit is (\d+)")


def headers_of(request_id: str) -> dict[str, str]:
    return {"request-id": f"req_{request_id}"}


def body(error: ApiError, request_id: str) -> dict[str, Any]:
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = error.message
    if error.code == "context_length_exceeded" and (found := _TOO_LONG.search(message)):
        # agents shorten their conversation by themselves when they read these words
        message = f"prompt is too long: {found[1]} tokens > {found[2]} maximum"
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": f"req_{request_id}"}


def refused(error: ApiError, request_id: str) -> Json:
    """The response to a request that cannot be served."""
    headers = error_headers(error) | headers_of(request_id)
    return Json(body(error, request_id), _STATUS.get(error.status, error.status), headers)
