"""The streams of `StreamDeltas`: the deltas of many answers to one caller, those of a step in one message."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

from quartet.v1 import thinker_pb2
from services.common.errors import QueueFull, Unavailable, require
from services.common.rpc.requests import check_id

# Deltas that may wait for a slow caller; then their answers wait.
_MOST_WAITING = 1024
MOST_OPEN = 1024  # streams


class DeltaStreams:
    def __init__(self) -> None:
        self._open: dict[str, _Stream] = {}

    async def serve(self, stream_id: str) -> AsyncGenerator[thinker_pb2.StreamDeltasResponse]:
        """The messages of a stream, which is open until this iterator is closed. Raises InvalidInput, or QueueFull."""
        check_id("stream_id", stream_id)
        require(stream_id not in self._open, "stream_id", "is open already; choose another one")
        if len(self._open) >= MOST_OPEN:
            raise QueueFull(f"{MOST_OPEN} streams of deltas are open; retry later")
        stream = self._open[stream_id] = _Stream()
        try:
            yield thinker_pb2.StreamDeltasResponse()
            while True:
                yield await stream.message()
        finally:
            del self._open[stream_id]
            stream.close()

    async def redirected(
        self, responses: AsyncIterator[thinker_pb2.GenerateResponse], destination: thinker_pb2.DeltaDestination
    ) -> AsyncGenerator[thinker_pb2.GenerateResponse]:
        """The part of an answer that stays in its call while deltas go to `destination`; all of it, if there is no such
        stream. Raises Unavailable: that has ended."""
        stream, count = self._open.get(destination.stream_id), 0
        async for response in responses:
            if stream is not None and response.HasField("delta"):
                await stream.put(destination.answer, response.delta)
                count += 1
                continue
            if stream is not None and response.HasField("summary"):
                response.summary.streamed_deltas = count
            yield response


class _Stream:
    def __init__(self) -> None:
        self._waiting = thinker_pb2.StreamDeltasResponse()
        self._came, self._room, self._closed = asyncio.Event(), asyncio.Event(), False

    async def put(self, answer: int, delta: thinker_pb2.GenerateDelta) -> None:
        """Raises Unavailable: the stream has ended."""
        while len(self._waiting.deltas) >= _MOST_WAITING and not self._closed:
            self._room.clear()
            await self._room.wait()
        if self._closed:
            raise Unavailable("the stream that the answer's deltas go to has ended")
        self._waiting.deltas.add(answer=answer, delta=delta)
        self._came.set()

    async def message(self) -> thinker_pb2.StreamDeltasResponse:
        """All that waits, once something does. Its caller runs after the answers that a step has woken."""
        await self._came.wait()
        self._came.clear()
        self._room.set()
        message, self._waiting = self._waiting, thinker_pb2.StreamDeltasResponse()
        return message

    def close(self) -> None:
        self._closed = True
        self._room.set()
