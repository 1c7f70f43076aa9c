"""The lines of a batch's input file: a request each."""

import json
from collections.abc import AsyncGenerator, AsyncIterable
from dataclasses import dataclass
from typing import Any

MAX_LINES = 50_000  # as at OpenAI
_MAX_LINE_BYTES = 32 * 1024 * 1024
_MAX_CUSTOM_ID = 512  # characters


@dataclass(frozen=True)
class BatchLine:
    """`number`: from 0."""

    number: int
    custom_id: str
    body: dict[str, Any]


class LineError(Exception):
    """Why a line is none. `body`: OpenAI's BatchError."""

    def __init__(self, number: int, code: str, reason: str, param: str | None = None) -> None:
        super().__init__(reason)
        self.body = {"code": code, "message": f"line {number + 1}: {reason}", "line": number + 1, "param": param}


async def split(pieces: AsyncIterable[bytes]) -> AsyncGenerator[tuple[int, bytes], None]:
    """(number, line) of those that are not empty. Raises LineError: one is too long."""
    rest, number = bytearray(), 0
    async for piece in pieces:
        rest += piece
        if b"\n" in piece:
            *whole, last = bytes(rest).split(b"\n")
            rest = bytearray(last)
            for line in whole:
                if line.strip():
                    yield number, line
                    number += 1
        if len(rest) > _MAX_LINE_BYTES:
            raise LineError(number, "line_too_large", f"has more than {_MAX_LINE_BYTES} bytes")
    if rest.strip():
        yield number, bytes(rest)


def read_line(number: int, line: bytes, endpoint: str) -> BatchLine:
    """Raises LineError."""
    try:
        read = json.loads(line)
    except (ValueError, RecursionError):
        raise LineError(number, "invalid_json_line", "is no JSON") from None
    if not isinstance(read, dict):
        raise LineError(number, "invalid_json_line", "is no object")
    custom_id = read.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _MAX_CUSTOM_ID or "\0" in custom_id:
        reason = f"needs a custom_id, a text of 1 to {_MAX_CUSTOM_ID} characters"
        raise LineError(number, "missing_required_parameter", reason, "custom_id")
    if read.get("method") != "POST":
        raise LineError(number, "invalid_method", 'its method must be "POST"', "method")
    if read.get("url") != endpoint:
        raise LineError(number, "mismatched_endpoint", f"its url must be the batch's endpoint, {endpoint}", "url")
    if not isinstance(read.get("body"), dict):
        raise LineError(number, "missing_required_parameter", "needs a body, the request's object", "body")
    return BatchLine(number, custom_id, read["body"])
