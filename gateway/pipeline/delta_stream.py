"""Reader of `StreamDeltas`: one stream with the deltas of all answers at a thinker."""

import asyncio
import itertools
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from quartet.v1 import thinker_pb2, thinker_pb2_grpc

TakeDelta = Callable[[thinker_pb2.GenerateDelta], None]


class DeltaStream:
    """A stream of deltas, until it breaks or is retired.

    Attributes:
        channel: to the thinker.
        is_open: whether answers may name it.
    """

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.is_open = self.has_ended = False
        self._id, self._numbers = uuid.uuid4().hex, itertools.count(1)
        self._answers: dict[int, StreamedCall] = {}
        self._retired = False
        self._reading = asyncio.create_task(self._read())

    def call(self, start: thinker_pb2.GenerateStart, take: TakeDelta, begin: Callable[[], Any]) -> "StreamedCall":
        """The call that `begin` makes with `start`; its deltas come by this stream and go to `take`."""
        number = next(self._numbers)
        start.deltas_to.stream_id, start.deltas_to.answer = self._id, number
        call = self._answers[number] = StreamedCall(begin(), take, lambda: self._forget(number))
        return call

    def retire(self) -> None:
        """Ends with the last answer."""
        self._retired = True
        if not self._answers:
            self._reading.cancel()

    def _forget(self, number: int) -> None:
        self._answers.pop(number, None)
        if self._retired:
            self.retire()

    async def _read(self) -> None:
        request = thinker_pb2.StreamDeltasRequest(stream_id=self._id)
        messages = thinker_pb2_grpc.ThinkerServiceStub(self.channel).StreamDeltas(request)
        error = grpc.aio.AioRpcError(
            grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "the stream of deltas has ended"
        )
        try:
            async for message in messages:
                self.is_open = True
                for item in message.deltas:
                    if (call := self._answers.get(item.answer)) is not None:
                        call.take(item.delta)
        except grpc.aio.AioRpcError as broken:
            error = broken
        finally:
            self.is_open, self.has_ended = False, True
            messages.cancel()
            for call in list(self._answers.values()):
                call.lose(error)


class StreamedCall:
    """A call of `Generate` whose deltas come by another gRPC stream, perhaps before its first response.

    `forget` is called at the end."""

    def __init__(self, call: Any, take: TakeDelta, forget: Callable[[], None]) -> None:
        self._call, self._take, self._forget = call, take, forget
        self._count, self._wanted = 0, -1  # deltas that have come, and that are waited for; -1: not known yet
        self._complete = asyncio.Event()
        self._error: grpc.aio.AioRpcError | None = None

    async def __aiter__(self) -> AsyncIterator[thinker_pb2.GenerateResponse]:
        """The call's responses. Raises AioRpcError: the call failed, or the stream broke."""
        try:
            async for response in self._call:
                if response.HasField("summary"):
                    await self._all(response.summary.streamed_deltas)
                yield response
        except asyncio.CancelledError:
            if self._error is None:
                raise
            raise self._error from None

    def cancel(self) -> None:
        self._forget()
        self._call.cancel()

    def take(self, delta: thinker_pb2.GenerateDelta) -> None:
        self._count += 1
        self._take(delta)
        if self._count == self._wanted:
            self._complete.set()

    def lose(self, error: grpc.aio.AioRpcError) -> None:
        """Ends the call with the stream's error."""
        self._error = error
        self._complete.set()
        self._call.cancel()

    async def _all(self, count: int) -> None:
        self._wanted = count
        if self._count < count:
            await self._complete.wait()
        if self._count < count and self._error is not None:
            raise self._error
