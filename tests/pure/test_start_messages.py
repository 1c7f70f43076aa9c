"""The first messages of a call: a client that leaves while one arrives is not served."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from quartet.v1 import dit_pb2, media_pb2
from services.common.rpc.requests import first_start, read_bytes

Requests = AsyncIterator[dit_pb2.DitServiceGenerateRequest]
START = dit_pb2.DitServiceGenerateRequest(start=dit_pb2.DitStart(prompt="a red fox"))
FILE = dit_pb2.DitServiceGenerateRequest(media=media_pb2.MediaChunk(data=b"fox"))


def start_of(requests: Requests) -> Awaitable[Any]:
    context: Any = None  # of use only where the message is refused
    return first_start(requests, context)


def file_of(requests: Requests) -> Awaitable[Any]:
    return read_bytes("image", 3, requests)


@pytest.mark.parametrize(("read", "message"), [(start_of, START), (file_of, FILE)])
@pytest.mark.parametrize("turns", range(4))
async def test_a_cancellation_that_comes_with_the_message_is_not_lost(
    read: Callable[[Requests], Awaitable[Any]], message: dit_pb2.DitServiceGenerateRequest, turns: int
) -> None:
    """`turns` of the event loop after it."""
    arrival, forever = asyncio.Event(), asyncio.Event()

    async def requests() -> Requests:
        await arrival.wait()
        yield message

    async def serve() -> None:
        await read(requests())
        await forever.wait()

    call = asyncio.create_task(serve())
    await asyncio.sleep(0.01)  # it waits for its message
    arrival.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    call.cancel()
    done, _ = await asyncio.wait({call}, timeout=1)
    assert done
    assert call.cancelled()
