"""Files that clients may get a range of."""

import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from email.utils import formatdate

from starlette.requests import Request
from starlette.responses import Response

from gateway.http.connection import StreamedResponse

_RANGE = re.compile(r"bytes\s*=\s*(\d{0,19})\s*-\s*(\d{0,19})\s*", re.IGNORECASE)


async def file_response(
    http: Request,
    size: int,
    open_range: Callable[[int, int], Awaitable[AsyncGenerator[bytes, None]]],
    tag: str,
    modified_s: float,
    limit_s: float,
    media_type: str,
    headers: Mapping[str, str],
) -> Response:
    """A file, or the range of it that the request names. Several ranges at once, and what is none, get the whole file,
    as RFC 9110 allows.

    Args:
        size: in bytes.
        open_range: returns the bytes from a first to before a last one.
        tag: what no other file has, nor this one with other bytes.
        modified_s: Unix seconds.
        limit_s: of the work.

    Raises:
        ApiError: those of `open_range`.
    """
    etag, modified = f'"{tag}"', formatdate(modified_s, usegmt=True)
    headers = {**headers, "accept-ranges": "bytes", "etag": etag, "last-modified": modified}
    if http.headers.get("if-range", etag) not in (etag, modified):  # the rest of another file is of no use
        found = None
    else:
        found = _range_of(http.headers.get("range", ""), size)
    if found is None:
        start, end, status = 0, size, 200
    else:
        start, end, status = *found, 206
        if start >= end:
            return Response(status_code=416, headers={"content-range": f"bytes */{size}"})
        headers["content-range"] = f"bytes {start}-{end - 1}/{size}"
    response = StreamedResponse(await open_range(start, end), limit_s, media_type, headers, status)
    response.headers["content-length"] = str(end - start)
    return response


def _range_of(header: str, size: int) -> tuple[int, int] | None:
    """The first byte, and the one behind the last. None: the header names no range, or several."""
    named = _RANGE.fullmatch(header)
    if named is None or named.group(1) == named.group(2) == "":
        return None
    first, last = named.groups()
    if not first:  # so many of the end
        return (max(0, size - int(last)), size) if int(last) else (size, size)
    if last and int(last) < int(first):
        return None
    return int(first), min(int(last) + 1, size) if last else size
