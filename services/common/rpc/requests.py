"""The messages of a streamed request: its start, then the bytes of its files in pieces."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from services.common.errors import DeadlineExceeded, InvalidInput, require
from services.common.rpc.status import abort

START_TIMEOUT_S = 30.0  # longest wait for the first message
MEDIA_TIMEOUT_S = 30.0  # a client that is silent for longer gives up its place
MAX_ID_CHARACTERS = 256  # of a request or a stream: they are kept in spans and logs


async def first_start(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]) -> Any:
    """The `start` of the first of `requests`. Another first message, or none in time, ends the call."""
    try:
        first = await next_of(requests, START_TIMEOUT_S)
    except TimeoutError:
        await abort(context, DeadlineExceeded(f"no start came within {START_TIMEOUT_S:g} s"))
    if first is None or first.WhichOneof("message") != "start":
        await abort(context, InvalidInput("message", "the first message must be start"))
    return first.start


async def next_of(requests: AsyncIterator[Any], timeout_s: float) -> Any:
    """The next of `requests`; None at their end. Raises TimeoutError. Python 3.11's `asyncio.wait_for` would lose the
    call's cancellation if it came with the message: the call would be served for nobody, to its end."""
    async with asyncio.timeout(timeout_s):
        return await anext(requests, None)


def check_id(field: str, value: str) -> None:
    """Raises InvalidInput, which names `field`: an id is missing, or too long."""
    require(value, field, "is required")
    require(
        len(value) <= MAX_ID_CHARACTERS, field, f"has {len(value)} characters; at most {MAX_ID_CHARACTERS} are taken"
    )


async def read_bytes(field: str, size_bytes: int, requests: AsyncIterator[Any]) -> bytes:
    """The next `size_bytes` of the `MediaChunk`s in `requests`.

    Raises:
        InvalidInput: names `field`: the chunks do not fit, or the next one does not come within MEDIA_TIMEOUT_S.
    """
    data = bytearray()
    while len(data) < size_bytes:
        try:
            request = await next_of(requests, MEDIA_TIMEOUT_S)
        except TimeoutError:
            raise InvalidInput(field, f"no more of its bytes came for {MEDIA_TIMEOUT_S:g} s") from None
        if request is None or request.WhichOneof("message") != "media":
            raise InvalidInput(field, f"has {len(data)} of {size_bytes} bytes; media chunks must bring the rest")
        data += request.media.data
    require(len(data) <= size_bytes, field, f"a media chunk runs past its {size_bytes} bytes")
    return bytes(data)
